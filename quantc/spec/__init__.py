"""Quantization specs: formats, granularity, capabilities, and the arithmetic of qparams."""

from quantc.spec.spec import *  # noqa: F403 - all that it lists
from quantc.spec.spec import __all__ as __all__
