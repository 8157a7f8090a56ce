"""Source locations in the user's code: not in torch, not in the standard library, not in capture itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quantc.capture import source_lines
from quantc.capture.source_lines import (
    forward_line,
    is_user_code,
    user_frame,
    user_line_of_error,
    user_line_of_trace,
)

TORCH = str(Path(torch.__file__).parent / "nn" / "functional.py")
PACKAGES = Path(torch.__file__).parent.parent


def test_code_is_told_by_the_place_of_its_file() -> None:
    for path in (__file__, str(PACKAGES / "some_models" / "net.py"), "/anywhere/model.py"):
        assert is_user_code(path), path
    for path in (
        TORCH,
        json.__file__,
        source_lines.__file__,
        str(PACKAGES / "sympy" / "x.py"),
        "<string>",
        "<frozen x>",
    ):
        assert not is_user_code(path), path


def test_the_innermost_frame_of_the_user_is_found() -> None:
    file, line = user_frame(sys._getframe())
    assert file == __file__
    assert "user_frame(sys._getframe())" in Path(__file__).read_text(encoding="utf-8").splitlines()[line - 1]
    assert user_frame(None) == ("", 0)


def test_frames_outside_the_call_of_the_model_are_not_the_model_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_lines, "CALLER", __file__)
    assert user_frame(sys._getframe()) == ("", 0)


def test_the_last_line_of_the_user_in_a_trace_is_taken() -> None:
    trace = f"""  File "/home/a/model.py", line 3, in forward
    y = self.block(x)
  File "/home/a/block.py", line 12, in forward
    return torch.relu(x)
  File "{TORCH}", line 1500, in relu
"""
    assert user_line_of_trace(trace) == ("/home/a/block.py", 12)
    assert user_line_of_trace(f'File "{TORCH}", line 5') == ("", 0)
    assert user_line_of_trace(None) == ("", 0)


def failing(x: Any) -> Any:
    return json.loads(x)


def test_an_error_names_the_line_of_the_user_that_it_passed_through() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        failing("{")
    found = user_line_of_error(caught.value)
    assert found.startswith(f"{__file__}:")
    assert found.endswith(", in failing: `return json.loads(x)`")


def test_the_cause_is_asked_where_an_error_itself_has_no_line() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        failing("{")
    outer = RuntimeError("wrapped")
    assert user_line_of_error(outer) == ""
    outer.__cause__ = caught.value
    assert "in failing" in user_line_of_error(outer)


def test_the_place_of_forward_is_its_line_or_its_name() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    found = forward_line(Own())
    assert found.startswith(f"{__file__}:")
    assert found.endswith(", in forward")
    assert forward_line(nn.ReLU()) == "forward of ReLU"
    assert forward_line(torch.jit.script(nn.ReLU())).startswith("forward of ")
