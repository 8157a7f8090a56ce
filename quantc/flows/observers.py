"""Observers under the names they have in torch, and their presets: the public path of `quantc.nn.observers`."""

from quantc.nn.observers import *  # noqa: F403 - all that it lists
from quantc.nn.observers import __all__  # noqa: F401 - the same list
