"""What is raised where a model cannot be followed."""

from __future__ import annotations


class RefusedError(Exception):
    """Raised inside a trace where the model cannot be followed; becomes a CaptureError with the user's line."""
