"""`qc.capture`: which method is followed, and what the log says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quantc.errors import CaptureError
from quantc.ir.program import Program, Stage
from quantc.verbs.capture import capture


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.inner = Inner()

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        made: Tensor = self.inner(self.layer(x))
        return made if scale is None else made * scale


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


def notes(program: Program) -> str:
    entry = program.log[0]
    return f"{entry.name}: {'; '.join(entry.notes)}"


@pytest.mark.parametrize("method", ["auto", "export", "fx"])
def test_every_method_gives_a_canonical_program_of_the_model(net: Net, method: Any) -> None:
    program = capture(net, (X,), method)
    assert program.stage is Stage.CANONICAL
    assert torch.equal(program(X), net(X))
    assert program.method == ("export" if method == "auto" else method)
    assert program.log[0].name == f"capture ({program.method})"


def test_without_examples_the_model_is_traced_and_the_log_says_why(net: Net) -> None:
    program = capture(net)
    assert program.method == "fx"
    assert "no example inputs" in notes(program)
    assert torch.equal(program(X), net(X))


@pytest.mark.parametrize("leaf", ["inner", Inner, ("inner",), [Inner]])
def test_leaves_are_given_by_name_or_class_alone_or_in_a_list(net: Net, leaf: Any) -> None:
    program = capture(net, (X,), leaf=leaf)
    assert program.method == "fx"
    assert [node.target for node in program.graph.nodes if node.op == "call_module"] == ["inner"]
    assert "whole" in notes(program)


def test_arrays_and_keywords_are_examples_too(net: Net) -> None:
    scale = np.full((2,), 3.0, dtype=np.float32)
    program = capture(net, (X.numpy(),), example_kwargs={"scale": scale})
    assert torch.equal(program(X, scale=torch.tensor(scale)), net(X) * 3)
    assert [tuple(tensor.shape) for tensor in program.example_inputs or ()] == [(4, 3), (2,)]


def test_the_batch_is_open_unless_told_otherwise(net: Net) -> None:
    more = torch.randn(7, 3)
    assert torch.equal(capture(net, (X,))(more), net(more))
    static = capture(net, (X,), dynamic_shapes=None)
    assert static.signature.inputs[0].type is not None
    assert static.signature.inputs[0].type.shape == (4, 3)


def test_a_model_of_another_dtype_is_cast_in_a_copy(net: Net) -> None:
    net.double()
    program = capture(net, (X.double(),), dtype="float32")
    assert program(X).dtype is torch.float32
    assert net.layer.weight.dtype is torch.float64
    assert "float32" in notes(program)


def test_exported_programs_and_their_files_are_taken(net: Net, tmp_path: Path) -> None:
    exported = torch.export.export(net, (X,))
    torch.export.save(exported, tmp_path / "small_net.pt2")
    for given, says in ((exported, "ExportedProgram"), (tmp_path / "small_net.pt2", "small_net.pt2")):
        program = capture(given)
        assert torch.equal(program(X), net(X))
        assert says in notes(program)
    assert program.name == "small_net"


def test_the_model_is_left_in_its_mode_with_its_numbers(net: Net) -> None:
    net.train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert capture(net, (X,)).training
    assert net.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"method": "exprot"}, "exprot"),
        ({"example_inputs": None, "method": "export"}, "example inputs"),
        ({"method": "export", "leaf": "inner"}, "whole"),
        ({"example_inputs": None, "dynamic_shapes": ({0: torch.export.Dim("n")},)}, "dynamic_shapes"),
    ],
)
def test_what_does_not_go_together_is_refused(net: Net, options: dict[str, Any], word: str) -> None:
    with pytest.raises(CaptureError, match=word) as caught:
        capture(net, **{"example_inputs": (X,), **options})
    assert caught.value.where
    assert caught.value.advice


def test_if_no_method_works_both_reasons_are_given() -> None:
    class Neither(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(CaptureError) as caught:
        capture(Neither(), (X,))
    with pytest.raises(CaptureError) as traced:
        capture(Neither(), (X,), "fx")
    assert traced.value.what in caught.value.what
