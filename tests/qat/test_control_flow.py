"""Higher-order ops as plain Python: the results of torch's own ops, and gradients for what is inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop

import quantc as qc
from quantc.ir.program import Program
from quantc.qat.control_flow import (
    AS_PYTHON,
    run_cond,
    run_map,
    run_scan,
    run_while,
    run_with_autocast,
    run_with_grad,
    write_as_ops,
    write_as_python,
)


def test_a_cond_runs_the_branch_that_its_predicate_selects() -> None:
    x = torch.tensor([1.0, -2.0])
    for pred in (True, False, torch.tensor(True), torch.tensor([False])):
        found = run_cond(pred, torch.relu, torch.neg, (x,))
        assert found.tolist() == ([1.0, 0.0] if bool(pred) else [-1.0, 2.0])


def test_a_while_loop_gives_what_torch_s_gives() -> None:
    def keeps_on(i: Tensor, total: Tensor, limit: Tensor) -> Tensor:
        return i < limit

    def body(i: Tensor, total: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, total * 2 + limit

    limit = torch.tensor(4)
    found = run_while(keeps_on, body, (torch.tensor(0), torch.tensor([1, 3])), (limit,))
    theirs: Any = while_loop(  # type: ignore[no-untyped-call]
        lambda i, total: i < limit, lambda i, total: (i + 1, total * 2 + limit), (torch.tensor(0), torch.tensor([1, 3]))
    )
    assert [part.tolist() for part in found] == [part.tolist() for part in theirs]
    none = run_while(lambda i, total: (i < 0,), body, (torch.tensor(0), torch.tensor([1, 3])))
    assert [part.tolist() for part in none] == [0, [1, 3]]  # a condition in a tuple, and no round at all


def test_a_map_runs_over_the_first_axis_of_what_is_taken_apart() -> None:
    x, y, shift = torch.randn(3, 2), torch.randn(3), torch.tensor(0.5)
    doubled, moved = run_map(lambda row, number, shift: (row * number, number + shift), (x, y), (shift,))
    assert torch.equal(doubled, x * y.unsqueeze(1))
    assert torch.equal(moved, y + 0.5)


def test_a_scan_carries_and_stacks_as_torch_s_does() -> None:
    x, start, factor = torch.randn(4, 2), torch.zeros(2), torch.tensor(0.5)
    carried, every = run_scan(lambda h, row, f: (h * f + row, h - row), (start,), (x,), (factor,))
    theirs: Any = scan(lambda h, row: (h * factor + row, h - row), start, x)
    assert torch.equal(carried, theirs[0])
    assert torch.equal(every, theirs[1])


def test_a_scan_of_several_values_keeps_each_in_its_place() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    total, count, every = run_scan(lambda t, n, row: (t + row, n + 1, t), (torch.tensor(0.0), torch.tensor(0)), (x,))
    assert (float(total), int(count), every.tolist()) == (6.0, 3, [0.0, 1.0, 3.0])


def test_regions_hold_inside_and_end_behind_them() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    assert not run_with_grad(False, lambda x: x * 2, x).requires_grad
    assert torch.is_grad_enabled()
    half = run_with_autocast("cpu", torch.bfloat16, True, None, torch.matmul, x, x)
    assert half.dtype == torch.bfloat16
    assert torch.matmul(x, x).dtype == torch.float32
    assert run_with_autocast("cpu", torch.bfloat16, False, None, torch.matmul, x, x).dtype == torch.float32


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: self.a(x).relu(), self.b, (x,))


@pytest.fixture(scope="module")
def captured() -> Program:
    torch.manual_seed(0)
    return qc.capture(Branch().eval(), (torch.ones(3, 2),))


def test_ops_become_functions_and_ops_again(captured: Program) -> None:
    program = captured.clone()
    before, x = str(program), torch.randn(3, 2)
    expected = program(x)
    write_as_python(program)
    assert AS_PYTHON["cond"] in [node.target for node in program.nodes()]
    assert torch.equal(program(x), expected)
    write_as_ops(program)
    assert str(program) == before
    assert torch.equal(program(x), expected)


def test_parameters_inside_a_branch_get_the_gradients_of_eager(captured: Program) -> None:
    program = captured.clone()
    write_as_python(program)
    torch.manual_seed(0)
    model, x = Branch(), torch.ones(3, 2)
    (model.a if bool(x.sum() > 0) else model.b)(x).relu().sum().backward()
    program(x).sum().backward()
    found = dict(program.named_parameters())["a.weight"].grad
    assert found is not None
    assert model.a.weight.grad is not None
    assert torch.equal(found, model.a.weight.grad)
