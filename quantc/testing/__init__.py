"""Conformance kit for backend authors.

from quantc.testing import check_backend

check_backend(MY_BACKEND).raise_if_failed()
"""

from quantc.testing.conformance import Check, Conformance, Row
from quantc.testing.kit import Example, check_backend

__all__ = ["Check", "Conformance", "Example", "Row", "check_backend"]
