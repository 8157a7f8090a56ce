"""Nothing is quantized across a write: programs that write through views, from every ATen schema that writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from tests.support.aliasing_judge import METHODS, Case, RefusedProgramError, Verdict, judge, search, search_traced
from tests.support.aliasing_programs import PLACES


class Layers(nn.Module):
    """Two layers, what happens between them is given; and a third beside them, that can always be quantized."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x), self.c(torch.relu(self.c(x)))


def _row(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    torch.add(y[0], 5.0, out=y[0])
    return s.b(y)


def _view(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    torch.neg(y.view(8, 4), out=y.view(8, 4))
    return s.b(y)


def _columns(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    torch.mul(y[:, 2:6], -4.0, out=y[:, 2:6])
    return s.b(y)


def _turned(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    torch.add(y.t(), 5.0, out=y.t())
    return s.b(y)


def _chunk(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    low, high = y.chunk(2)
    torch.add(low, high, out=high)
    torch.neg(low, out=low)
    return s.b(y)


def _input(s: Any, x: Tensor) -> Any:
    torch.add(x[0], 5.0, out=x[0])
    return s.b(s.a(x))


def _reverse(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    v = y.flatten()
    torch.neg(y, out=y)
    return s.b(v.view(4, 8))


NAMED = {"row": _row, "view": _view, "columns": _columns, "t": _turned, "chunk": _chunk, "input": _input}
NAMED["reverse"] = _reverse


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", ["x86", "qnnpack", "executorch"])
@pytest.mark.parametrize("name", NAMED)
@torch.no_grad()
def test_nothing_is_quantized_across_a_write_with_out(name: str, backend: str, method: Any) -> None:
    torch.manual_seed(0)
    model = Layers(NAMED[name]).eval()
    batches = [torch.randn(4, 8) for _ in range(3)]
    prepared = qc.prepare(qc.capture(model, (batches[0].clone(),), method), backend)
    qc.calibrate(prepared, batches)
    quantized = qc.convert(prepared)
    for x in batches:
        left, right = x.clone(), x.clone()
        for expected, found in zip(model(left), quantized(right), strict=True):
            assert (found - expected).norm() < 0.1 * expected.norm()
        assert torch.equal(left, right)


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_the_reason_names_the_write(method: Any) -> None:
    program = qc.capture(Layers(_row).eval(), (torch.randn(4, 8),), method)
    prepared = qc.prepare(program, "x86")
    assert "linear is written to in place" in str(prepared.coverage())


def _bias(s: Any, x: Tensor) -> Any:
    s.a.bias.data.add_(5.0)
    return s.b(s.a(x))


@torch.no_grad()
def test_a_bias_that_is_written_to_is_read_when_the_op_runs() -> None:
    model, x = Layers(_bias).eval(), torch.randn(4, 8)
    prepared = qc.prepare(qc.capture(model, (x,), "fx"), "x86")
    qc.calibrate(prepared, [x])
    quantized = qc.convert(prepared)
    forms = (quantized.clone(), qc.convert(prepared, to="integer"), qc.lower(quantized, "x86"))
    expected = model(x)[0]
    for form in forms:
        assert (form(x)[0] - expected).norm() < 0.1 * expected.norm()


def _branch(s: Any, x: Tensor) -> Any:
    def written(v: Tensor) -> Tensor:
        v.add_(5.0)
        return v + 0.0

    y = s.a(x)
    z = torch.cond(x.sum() > -1000.0, written, torch.neg, (y,))
    return s.b(z) + s.b(y)


@torch.no_grad()
def test_a_write_inside_a_branch_is_one_to_its_operand() -> None:
    torch.manual_seed(0)
    model, x = Layers(_branch).eval(), torch.randn(4, 8)
    expected = model(x)[0]
    prepared = qc.prepare(qc.capture(model, (x,), "export"), "x86")
    qc.calibrate(prepared, [x])
    quantized = qc.convert(prepared)
    for form in (quantized, qc.convert(prepared, to="integer"), qc.lower(quantized, "x86")):
        assert (form(x)[0] - expected).norm() < 0.1 * expected.norm()


def _negated(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    torch.neg(y, out=y)
    return s.b(y)


def _into_new(s: Any, x: Tensor) -> Any:
    o = torch.zeros(x.shape[0], 8)
    torch.add(s.a(x), x, out=o)
    return s.b(o)


def _into_nothing(s: Any, x: Tensor) -> Any:
    o = torch.empty(0)
    torch.add(s.a(x), x, out=o)
    return s.b(o)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("run", [_negated, _into_new, _into_nothing])
@torch.no_grad()
def test_out_that_nobody_else_sees_becomes_a_result(run: Any, method: Any) -> None:
    model, x = Layers(run).eval(), torch.randn(4, 8)
    program = qc.capture(model, (x,), method)
    assert not program.opaque()
    torch.testing.assert_close(program(x), model(x))


def _wider(s: Any, x: Tensor) -> Any:
    o = torch.zeros(4, 8, dtype=torch.float64)
    torch.add(s.a(x), x, out=o)
    return o


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_out_of_another_dtype_is_written_to(method: Any) -> None:
    model, x = Layers(_wider).eval(), torch.randn(4, 8)
    program = qc.capture(model, (x,), method)
    assert [str(node.target) for node in program.opaque()] == ["aten.add.out"]
    assert program(x)[0].dtype is torch.float64


def test_a_slice_of_the_aliasing_programs() -> None:
    _search(11, 20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_aliasing_programs(seed: int) -> None:
    _search(seed, 600)


def test_a_slice_of_the_aliasing_programs_traced() -> None:
    _search(12, 15, search_traced)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_aliasing_programs_traced(seed: int) -> None:
    _search(seed, 550, search_traced)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_executorch_runs_what_writes(place: str) -> None:
    index = list(PLACES).index(place)
    write = ("torch.add(out)", "v += 5", "v[...] = 5", "v *= -3", "torch.neg(out)")[index % 5]
    view = ("row", "steps", "chunk", "view", "t")[index * 2 % 5]
    case = Case(write, view, place, METHODS[index % 2], "executorch")
    if "input" in place:
        with pytest.raises(RefusedProgramError, match="writes to its input"):
            judge(case, lower_all=True)
    else:
        assert judge(case, lower_all=True)


def _search(seed: int, count: int, judged: Callable[[int, int], Verdict] = search) -> None:
    verdict = judged(seed, count)
    assert not verdict.wrong, str(verdict)
    assert verdict.quantized > count // 2, str(verdict)
