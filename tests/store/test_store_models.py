"""Models of the zoo, saved and loaded at every stage they reach: captured, prepared, calibrated, quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch.export import Dim
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.ir.program import Program
from tests.support.staged_models import FEW, METHODS, Method, stages
from tests.support.store_files import images, small_model
from tests.zoo import BY_NAME, CASES, Case, detached


def assert_comes_back(program: Program, path: Path, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """Saved and loaded it is the same, and gives the same when called."""
    program.save(path)
    loaded = qc.load(path)
    assert loaded.dump() == program.dump()
    assert not program.diff(loaded)
    assert (loaded.stage, loaded.log, str(loaded.plan)) == (program.stage, program.log, str(program.plan))
    twin = program.clone()
    for args, keywords in calls:
        expected = pytree.tree_leaves(twin(*detached(args), **detached(keywords)))
        actual = pytree.tree_leaves(loaded(*detached(args), **detached(keywords)))
        assert len(actual) == len(expected)
        for left, right in zip(actual, expected, strict=True):
            assert torch.equal(left, right) if isinstance(left, Tensor) else left == right


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FEW)
def test_a_model_comes_back_at_every_stage(name: str, method: Method, tmp_path: Path) -> None:
    args, keywords = BY_NAME[name].example()
    for program in stages(BY_NAME[name], method):
        assert_comes_back(program, tmp_path / "model.qc", (args, keywords))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", [case for case in CASES if case.name not in FEW], ids=str)
def test_every_other_model_comes_back_at_every_stage(case: Case, method: Method, tmp_path: Path) -> None:
    args, keywords = case.example()
    for program in stages(case, method):
        assert_comes_back(program, tmp_path / "model.qc", (args, keywords))


@pytest.mark.parametrize("method", METHODS)
def test_dynamic_sizes_come_back_with_their_bounds(method: Method, tmp_path: Path) -> None:
    shapes = ({0: Dim("batch", min=2, max=8)},)
    prepared = qc.prepare(qc.capture(small_model(), (images(),), method=method, dynamic_shapes=shapes), "x86")
    qc.calibrate(prepared, [images(1)])
    quantized = qc.convert(prepared)
    quantized.save(tmp_path / "model.qc")
    loaded = qc.load(tmp_path / "model.qc")
    five = torch.cat([images(2), images(3), images(4)])[:5]
    assert torch.equal(loaded(five), quantized(five))
    assert loaded.signature.ranges == quantized.signature.ranges
    with pytest.raises(qc.errors.InputError, match="outside the captured range"):
        loaded(torch.cat([five, five]))
    exported = torch.export.export(loaded.module, (images(),), dynamic_shapes=shapes)
    assert torch.equal(exported.module()(five), quantized(five))


class Branches(nn.Module):
    """A branch in a branch, both with weights, and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        def inner(a: Tensor) -> Tensor:
            return torch.cond(a.sum() > 4, self.left, self.right, (a,))  # type: ignore[no-any-return]

        chosen = torch.cond(x.mean() > 0, inner, self.right, (x,))
        return while_loop(lambda y: y.sum() < 9, lambda y: (y + 1,), (chosen,))  # type: ignore[no-untyped-call]


def test_nested_graphs_come_back_at_every_stage(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Branches().eval()
    batches = [torch.full((2, 4), 3.0), torch.full((2, 4), 0.1), torch.full((2, 4), -1.0)]
    program = qc.capture(model, (batches[0],))
    assert len(list(program.graphs())) >= 7
    prepared = qc.prepare(program, "x86")
    calibrated = prepared.clone()
    qc.calibrate(calibrated, batches)
    for each in (program, prepared, calibrated):
        assert_comes_back(each, tmp_path / "model.qc")
    assert_comes_back(qc.convert(calibrated), tmp_path / "model.qc", *(((batch,), {}) for batch in batches))
