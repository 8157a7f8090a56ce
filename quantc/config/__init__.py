"""The user's config: rules, selectors, and how they resolve on a program."""

from quantc.config.config import QuantConfig

__all__ = ["QuantConfig"]
