"""Calls of a session with the arguments of a program: flattened, checked once per kind, and results arranged again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.errors import InputError
from quantc.targets.onnx.onnx_export import export
from quantc.targets.onnx.profiles import PROFILES
from quantc.targets.onnx.session_calls import Calling
from quantc.targets.onnx.sessions import OnnxRuntime
from tests.support.onnx_models import quantized
from tests.support.onnx_ops import drawn


class Nested(nn.Module):
    """A dict and a number in, a dict with a number out."""

    def forward(self, x: Tensor, parts: dict[str, Tensor], scale: int, *, flag: bool = True) -> dict[str, Any]:
        y = x * scale + parts["a"]
        return {"y": (y, parts["b"]) if flag else y, "scale": scale, "same": x}


class Recorded:
    """A session that keeps what it was given."""

    def __init__(self, session: OnnxRuntime) -> None:
        self.session = session
        self.given: list[list[Tensor]] = []

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        self.given.append(list(inputs))
        return self.session(inputs)


def calling(program: qc.Program) -> tuple[Calling, Recorded]:
    exported = export(program, PROFILES["onnxruntime"])
    return Calling.of(program, exported), Recorded(OnnxRuntime(exported.model.SerializeToString(), 1))


def parts() -> dict[str, Tensor]:
    return {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([-1.0])}


def test_results_are_arranged_like_those_of_the_model() -> None:
    x = torch.tensor([3.0, -1.0])
    program = qc.capture(Nested().eval(), (x, parts(), 2))
    call, session = calling(program)
    assert not call.is_one
    made = call(session, (x, parts(), 2), {})
    wanted = Nested()(x, parts(), 2)
    assert made["scale"] == 2
    assert [made["y"][0].tolist(), made["y"][1].tolist()] == [[7.0, 0.0], [-1.0]]
    assert torch.equal(made["same"], wanted["same"])
    assert [given.tolist() for given in session.given[0]] == [[3.0, -1.0], [1.0, 2.0], [-1.0]], "no number is an input"


def test_other_numbers_and_structures_than_at_capture_are_refused() -> None:
    x = torch.tensor([3.0, -1.0])
    call, session = calling(qc.capture(Nested().eval(), (x, parts(), 2)))
    for args in ((x, parts(), 3), (x, {"a": x}, 2), (x, parts()), (x[:1], parts(), 2)):
        with pytest.raises(InputError):
            call(session, args, {})
    assert session.given == []


def linear() -> qc.Program:
    torch.manual_seed(0)
    sizes = ({0: Dim("batch", min=1, max=8)},)
    return quantized(nn.Linear(4, 3), [(drawn(2, 4),)], dynamic_shapes=sizes)


def test_a_lone_tensor_comes_back_as_it_is_and_each_call_is_looked_at_for_nan() -> None:
    call, session = calling(linear())
    assert call.is_one
    for count in (2, 2, 5):
        made = call(session, (drawn(count, 4),), {})
        assert isinstance(made, Tensor)
        assert made.shape == (count, 3)
        broken = drawn(count, 4)
        broken[0, 1] = float("nan")
        with pytest.raises(InputError, match="NaN"):
            call(session, (broken,), {})
    with pytest.raises(InputError):
        call(session, (drawn(9, 4),), {})
    assert len(session.given) == 3


def test_gradients_and_arguments_by_name_are_refused() -> None:
    call, session = calling(linear())
    x = drawn(2, 4)
    with pytest.raises(InputError, match="gradient"):
        call(session, (x.clone().requires_grad_(),), {})
    with pytest.raises(InputError, match="by position"):
        call(session, (), {"input_1": x})
    with torch.no_grad():
        assert call(session, (x.clone().requires_grad_(),), {}).shape == (2, 3)
