"""Modules that are trained to be converted to dynamic ones."""

from quantc.nn.qat.dynamic.modules.linear import Linear

__all__ = [
    "Linear",
]
