"""Source locations in the user's code."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from types import FrameType, TracebackType
from typing import Any

import torch

SITE = os.path.dirname(os.path.dirname(torch.__file__)) + os.sep
MACHINERY = tuple(SITE + name for name in ("torch" + os.sep, "sympy" + os.sep, "mpmath" + os.sep, "numpy" + os.sep))
STANDARD = os.path.dirname(os.__file__) + os.sep
CORE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
OURS = (os.path.join(CORE, "capture") + os.sep, os.path.join(CORE, "verbs", "capture.py"))
CALLER = os.path.join(CORE, "capture", "symbolic", "symbolic_capture.py")
"""The file that calls the model: frames outside it belong to the caller of capture."""
FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def is_user_code(path: str) -> bool:
    """True if a file holds the user's code (or that of a package with models) rather than torch's or capture's."""
    if path.startswith(("<", *MACHINERY, *OURS)):
        return False
    return path.startswith(SITE) or not path.startswith(STANDARD)


def user_frame(frame: FrameType | None) -> tuple[str, int]:
    """(file, line) of the innermost user frame of the model; ("", 0) if there is none."""
    while frame is not None and frame.f_code.co_filename != CALLER:
        if is_user_code(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def user_line_of_trace(text: str | None) -> tuple[str, int]:
    """Like `user_frame`, from the text of a stack trace as torch.export keeps it."""
    for file, line in reversed(FRAME.findall(text or "")):
        if is_user_code(file):
            return file, int(line)
    return "", 0


def user_line_of_error(error: BaseException) -> str:
    """`model.py:12, in forward: \\`if x.sum() > 0:\\`` for the innermost user frame an error passed through."""
    found: traceback.FrameSummary | None = None
    current: BaseException | None = error
    while current is not None and found is None:
        found = _innermost(current.__traceback__)
        current = current.__cause__ or current.__context__
    if found is None:
        return ""
    code = f": `{found.line}`" if found.line else ""
    return f"{found.filename}:{found.lineno}, in {found.name}{code}"


def _innermost(trace: TracebackType | None) -> traceback.FrameSummary | None:
    frames = [frame for frame in traceback.extract_tb(trace) if is_user_code(frame.filename)]
    return frames[-1] if frames else None


def forward_line(model: Any) -> str:
    """Location of a model's `forward`; its name alone if it is in a library."""
    function = inspect.unwrap(getattr(model, "forward", type(model)))
    code = getattr(function, "__code__", None)
    if code is None or not is_user_code(code.co_filename):
        return f"forward of {type(model).__name__}"
    return f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}"
