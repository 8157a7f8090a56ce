"""The user's config: rules, selectors, and their resolution on a program."""

from quantc.config.config import ConfigRule, QuantConfig

__all__ = ["ConfigRule", "QuantConfig"]
