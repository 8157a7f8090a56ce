"""Conformance kit for authors of backends, quantizers, targets, passes and observations.

from quantc.testing import check_backend

check_backend(MY_BACKEND).raise_if_failed()
"""

from quantc.testing.backend_checks import check_backend
from quantc.testing.conformance import Check, Conformance, Row
from quantc.testing.example_programs import Example

__all__ = ["Check", "Conformance", "Example", "Row", "check_backend"]
