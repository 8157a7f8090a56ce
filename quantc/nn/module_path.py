"""The running module and its model, found by walking the stack: for errors only, so it may be slow."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn


def running_module() -> str:
    """The innermost module that is being called, as `layer1.0 (Conv2d)`; empty outside of all modules."""
    found = _callers()
    if not found:
        return ""
    inner, outer = found[0], found[-1]
    path = next((name for name, module in outer.named_modules() if module is inner), "")
    return f"{path or 'the model itself'} ({type(inner).__name__})"


def _callers() -> list[nn.Module]:
    """The modules whose methods are on the stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    found: list[nn.Module] = []
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and (not found or found[-1] is not owner):
            found.append(owner)
        frame = frame.f_back
    return found
