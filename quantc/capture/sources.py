"""Which line of the user's code something comes from."""

from __future__ import annotations

import os
import re
import traceback
from types import FrameType, TracebackType

import torch

TORCH = os.path.dirname(torch.__file__) + os.sep
CAPTURE = os.path.dirname(os.path.abspath(__file__)) + os.sep
FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def is_user_file(path: str) -> bool:
    """Whether code at a path is the user's rather than torch's, the capture's or the standard library's."""
    if path.startswith("<"):
        return False
    return not path.startswith((TORCH, CAPTURE)) and not path.startswith(STANDARD) and os.sep + "quantc" + os.sep + "api.py" not in path


STANDARD = os.path.dirname(os.__file__) + os.sep
STANDARD_SITE = ("site-packages", "dist-packages")


def _counts(path: str) -> bool:
    """Installed packages live below the standard library; they are user code, but for torch."""
    if path.startswith(STANDARD) and any(part in path for part in STANDARD_SITE):
        return not path.startswith(TORCH)
    return is_user_file(path)


def user_frame(frame: FrameType | None) -> tuple[str, int]:
    """(file, line) of the innermost frame that is user code; ("", 0) if there is none."""
    while frame is not None:
        if _counts(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def user_line_of_trace(text: str | None) -> tuple[str, int]:
    """The same from the text of a stack trace, as torch.export keeps it."""
    for file, line in reversed(FRAME.findall(text or "")):
        if _counts(file):
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
    frames = [frame for frame in traceback.extract_tb(trace) if _counts(frame.filename)]
    return frames[-1] if frames else None
