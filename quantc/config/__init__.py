"""The user's config: rules, selectors, and their resolution on a program."""

from quantc.config.config import QuantConfig

__all__ = ["QuantConfig"]
