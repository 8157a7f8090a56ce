"""The user's config: rules, selectors, and their resolution on a program."""

from quantc.config.config import QuantConfig
from quantc.config.config_rule import ConfigRule

__all__ = ["ConfigRule", "QuantConfig"]
