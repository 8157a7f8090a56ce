"""Exception for models that cannot be traced."""

from __future__ import annotations


class RefusedError(Exception):
    """Raised inside a trace where the model cannot be traced; becomes a CaptureError with the user's line."""
