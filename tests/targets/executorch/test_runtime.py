"""A `.pte` whose sizes vary, called again and again: what was called before must not show in the numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.errors import LoadError
from quantc.ir.program import Program
from quantc.targets.executorch import Pte
from quantc.targets.executorch.lazy_imports import runtime
from quantc.targets.executorch.runtime import Running, in_order
from tests.support.executorch_models import (
    Counter,
)

pytest.importorskip("executorch")
CLOSE = 0.15
"""Of the largest value: a step of the grid of means. What is wrong is off by several times the largest."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1)).eval()


def quantized(dims: dict[int, Any]) -> Program:
    x = torch.randn(2, 3, 16, 16)
    return qc.quantize(qc.capture(network(), (x,), dynamic_shapes=(dims,)), None, [(x,)], "executorch").program


def check(program: Program, lowered: Pte, shapes: Sequence[tuple[int, ...]]) -> None:
    for shape in shapes:
        x = torch.randn(shape)
        want, got = program(x), lowered(x)
        worst = float((want - got).abs().max() / want.abs().max())
        assert worst < CLOSE, f"{shape} after others: {worst}"


def test_batches_that_grow(tmp_path: Path) -> None:
    program = quantized({0: Dim("batch", max=16)})
    qc.lower(program, "executorch").save(tmp_path / "model.pte")
    for counts in ((5, 8), (4, 8), (2, 8), (4, 5, 6, 7, 8, 9, 16, 3, 16)):
        check(program, qc.load(tmp_path / "model.pte"), [(count, 3, 16, 16) for count in counts])


def test_batches_that_grow_elsewhere() -> None:
    """On ExecuTorch's bare runtime, as on a device: nobody loads the file anew there."""
    program = quantized({0: Dim("batch", max=16)})
    lowered = qc.lower(program, "executorch")
    loaded = runtime().load_program(lowered.content)
    method = loaded.load_method("forward")
    for count in (1, 5, 8, 3, 16, 2, 16):
        x = torch.randn(count, 3, 16, 16)
        want = program(x)
        assert float((want - method.execute([x])[0]).abs().max() / want.abs().max()) < CLOSE
    (row,) = lowered.delegation().fallen_back
    assert (row.op, row.place) == ("adaptive_avg_pool2d", "delegate, in float")
    assert "larger than those before" in row.why


def test_sizes_that_are_large_in_turns() -> None:
    dims = {0: Dim("batch", max=8), 2: Dim("rows", min=8, max=64), 3: Dim("columns", min=8, max=64)}
    program = quantized(dims)
    chosen = random.Random(0)
    shapes = [(chosen.randint(1, 8), 3, chosen.randint(8, 64), chosen.randint(8, 64)) for _ in range(40)]
    check(program, qc.lower(program, "executorch"), shapes)


def test_a_method_is_loaded_anew_only_for_what_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    program = quantized({0: Dim("batch", max=16)})
    lowered = qc.lower(program, "executorch")
    running = lowered._runs()
    loads: list[str] = []
    load = running._load_method

    def counted(name: str) -> Any:
        loads.append(name)
        return load(name)

    monkeypatch.setattr(running, "_load_method", counted)
    check(program, lowered, [(count, 3, 16, 16) for count in (8, 2, 8, 1, 12, 12, 3)])
    assert loads == ["forward", "forward"], "for 8, as the example has 2, and for 12"


def test_a_state_is_not_lost_when_inputs_grow() -> None:
    x = torch.randn(2, 4)
    program = qc.quantize(
        qc.capture(Counter().eval(), (x,), dynamic_shapes=({0: Dim("batch", max=16)},)), None, [(x,)], "executorch"
    ).program
    lowered = qc.lower(program, "executorch")
    assert [float(lowered(torch.randn(count, 4)).max()) for count in (1, 8, 16)] == [1.0, 2.0, 3.0]


def test_tensors_lie_in_order_as_executorch_reads_them() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    assert in_order(x) is x
    for other in (x.transpose(0, 2), x[:, ::2], x.to(memory_format=torch.contiguous_format)[:, :1].transpose(0, 1)):
        found = in_order(other)
        assert torch.equal(found, other)
        assert found.stride() == torch.empty(other.shape).stride()


def test_axes_of_one_place_have_the_stride_that_they_would_have() -> None:
    """torch takes any stride for contiguous there; ExecuTorch does not."""
    odd = torch.arange(8.0).as_strided((2, 1, 4), (4, 1, 1))
    assert odd.is_contiguous()
    found = in_order(odd)
    assert found.stride() == (4, 4, 1)
    assert torch.equal(found, odd)
    assert in_order(torch.empty(0, 3)).stride() == (3, 1)
    assert in_order(torch.tensor(2.0)).stride() == ()


def test_views_that_are_negated_classes_and_gradients_are_made_plain() -> None:
    x = torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag
    assert x.is_neg()
    found = in_order(x)
    assert not found.is_neg()
    assert torch.equal(found, -torch.arange(3.0))
    parameter = nn.Parameter(torch.ones(2))
    assert type(in_order(parameter)) is Tensor
    assert not in_order(torch.ones(2, requires_grad=True)).requires_grad


def test_what_executorch_cannot_read_is_told_with_its_place() -> None:
    with pytest.raises(LoadError, match="cannot read it") as caught:
        Running(b"\x10\0\0\0ET12" + bytes(64), "model.pte")
    assert caught.value.where == "model.pte"


class Method:
    """A method of a program that keeps the sizes it was called with."""

    def __init__(self, calls: list[tuple[int, ...]]) -> None:
        self.calls = calls

    def execute(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        self.calls.append(tuple(inputs[0].shape))
        return [inputs[0] * 2]


def test_a_program_is_loaded_anew_for_the_largest_of_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ExecuTorch: what is loaded, and the sizes it is first called with."""
    calls: list[tuple[int, ...]] = []
    loads: list[int] = []
    monkeypatch.setattr(Running, "_read", lambda self: None)

    def loaded(self: Running, name: str) -> Method:
        loads.append(len(calls))
        return Method(calls)

    monkeypatch.setattr(Running, "_load_method", loaded)
    running = Running(b"", "model.pte")
    for shape in ((2, 8), (2, 4), (4, 2), (4, 8)):
        assert torch.equal(running.run([torch.ones(shape)])[0], torch.full(shape, 2.0))
    assert calls == [(2, 8), (2, 4), (4, 8), (4, 2), (4, 8)], "the third loads it, and makes room for 4 by 8 at once"
    assert loads == [0, 2]
    state = Running(b"", "model.pte", has_state=True)
    for shape in ((2, 8), (4, 8)):
        state.run([torch.ones(shape)])
    assert loads == [0, 2, 5], "what has a state is not loaded anew"
