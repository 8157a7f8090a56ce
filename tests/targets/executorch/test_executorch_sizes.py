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
from quantc.errors import RefusedError
from quantc.ir.program import Program
from quantc.targets.executorch import Pte
from quantc.targets.executorch.lazy_imports import runtime
from tests.support.executorch_models import static

pytest.importorskip("executorch")
NEAR = 0.15
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
        assert worst < NEAR, f"{shape} after others: {worst}"


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
        assert float((want - method.execute([x])[0]).abs().max() / want.abs().max()) < NEAR
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
    load = running._loaded

    def counted(name: str) -> Any:
        loads.append(name)
        return load(name)

    monkeypatch.setattr(running, "_loaded", counted)
    check(program, lowered, [(count, 3, 16, 16) for count in (8, 2, 8, 1, 12, 12, 3)])
    assert loads == ["forward", "forward"], "for 8, as the example has 2, and for 12"


class Counter(nn.Module):
    """Counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        counted: Tensor = self.layer(x) * 0 + self.calls
        return counted


def test_a_state_begins_where_the_program_has_it_and_is_kept(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    lowered = qc.lower(static(Counter(), x), "executorch")
    lowered.save(tmp_path / "counter.pte")
    for made in (lowered, qc.load(tmp_path / "counter.pte")):
        assert made.metadata is not None
        assert made.metadata.has_state
        assert [float(made(x).max()) for _ in range(3)] == [1.0, 2.0, 3.0]


def test_a_state_begins_with_its_value() -> None:
    model, x = Counter(), torch.randn(2, 4)
    model.calls.fill_(41.0)
    lowered = qc.lower(static(model, x), "executorch")
    assert [float(lowered(x).max()) for _ in range(2)] == [42.0, 43.0]


def test_a_program_that_writes_to_its_input_is_refused() -> None:
    class Writing(Counter):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.layer(torch.relu(self.layer(x)))
            x[0] += 5.0
            return made

    program = static(Writing(), torch.randn(2, 4))
    with pytest.raises(RefusedError, match="writes to its input 'x'"):
        qc.lower(program, "executorch")


def test_a_state_is_not_lost_when_inputs_grow() -> None:
    x = torch.randn(2, 4)
    program = qc.quantize(
        qc.capture(Counter().eval(), (x,), dynamic_shapes=({0: Dim("batch", max=16)},)), None, [(x,)], "executorch"
    ).program
    lowered = qc.lower(program, "executorch")
    assert [float(lowered(torch.randn(count, 4)).max()) for count in (1, 8, 16)] == [1.0, 2.0, 3.0]
