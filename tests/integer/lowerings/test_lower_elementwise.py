"""How sums and products of elements are written on integers: each rule, from the model to the integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.ir.program import Program
from quantc.passes.decompose_integer import DecomposeInteger
from quantc.patterns import aten
from quantc.patterns.dsl import op, optional
from quantc.patterns.operand_patterns import number
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.spec import INT16, UINT8
from tests.support.integer_matches import Array, Match, Steps, calibrated, floats_inside, integer_ops, same, values_of


def added(x: Any, y: Any, so: float) -> Array:
    return x[0] * (x[1] / so) + y[0] * (y[1] / so)


CASES: dict[str, tuple[Callable[..., Tensor], str, Steps]] = {
    "add": (lambda self, x, y: x + y, "add", added),
    "add-relu": (lambda self, x, y: torch.relu(x + y), "add", lambda *a: np.maximum(added(*a), 0)),
    "add-clamp": (
        lambda self, x, y: torch.clamp(x + y, -0.7, 1.1),
        "add",
        lambda x, y, so: np.clip(added(x, y, so), -0.7 / so, 1.1 / so),
    ),
    "add-itself": (lambda self, x, y: x + x, "add", added),
    "add-broadcast": (lambda self, x, y: x + y[:1, :, :1], "add", added),
    "add-constant": (lambda self, x, y: x + self.k, "add", added),
    "constant-add": (lambda self, x, y: self.k + x, "add", added),
    "sub": (lambda self, x, y: x - y, "sub", lambda x, y, so: x[0] * (x[1] / so) - y[0] * (y[1] / so)),
    "mul": (lambda self, x, y: x * y, "mul", lambda x, y, so: x[0] * y[0] * (x[1] * y[1] / so)),
    "mul-broadcast": (lambda self, x, y: x[:1] * y[:, :1], "mul", lambda x, y, so: x[0] * y[0] * (x[1] * y[1] / so)),
    "mul-constant": (lambda self, x, y: x * self.k, "mul", lambda x, y, so: x[0] * y[0] * (x[1] * y[1] / so)),
    "mul-relu": (
        lambda self, x, y: torch.relu(x * y),
        "mul",
        lambda x, y, so: np.maximum(x[0] * y[0] * (x[1] * y[1] / so), 0),
    ),
    "add-number": (lambda self, x, y: x + 1.3, "add", lambda x, c, so: x[0] * (x[1] / so) + c / so),
    "sub-number": (lambda self, x, y: x - 2, "sub", lambda x, c, so: x[0] * (x[1] / so) - c / so),
    "sub-from-number": (lambda self, x, y: 0.6 - x, "rsub", lambda x, c, so: x[0] * (-x[1] / so) + c / so),
    "mul-number": (lambda self, x, y: x * -1.7, "mul", lambda x, c, so: x[0] * (x[1] * c / so)),
    "div-number": (lambda self, x, y: x / 3, "div", lambda x, c, so: x[0] * (x[1] / c / so)),
    "div-number-relu": (
        lambda self, x, y: torch.relu(x / -0.7),
        "div",
        lambda x, c, so: np.maximum(x[0] * (x[1] / c / so), 0),
    ),
}


class Model(nn.Module):
    """A function of its inputs and of a constant `k`, which has a number for each of the last axis."""

    k: Tensor

    def __init__(self, forward: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        self.register_buffer("k", torch.tensor([0.3, -1.2, 0.9, 2.0]))
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self._forward(self, x, y)


def inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 5, 4, generator=generator), torch.rand(3, 5, 4, generator=generator) * 3


def captured(forward: Any, examples: Sequence[Tensor], **modules: nn.Module) -> Program:
    return qc.capture(Model(forward, **modules).eval(), tuple(examples))


@pytest.mark.parametrize("name", CASES)
def test_rules_are_written_on_integers(name: str) -> None:
    forward, core, steps = CASES[name]
    given_ = inputs()
    prepared = calibrated(captured(forward, given_), "qnnpack", given_)
    simulated, integer = qc.convert(prepared), qc.convert(prepared, to="integer")
    integer.verify()
    match = Match(simulated, core, given_)
    (written,) = integer_ops(integer)
    found = values_of(integer, given_)[written.name]
    assert same(found, match.rounded(match.steps(steps)))
    assert not floats_inside(integer)
    assert (integer(*given_) - simulated(*given_)).abs().max() <= match.out_scale * 1.001
    decomposed = qc.Pipeline((DecomposeInteger(),)).run(integer)
    assert not integer_ops(decomposed)
    assert torch.equal(decomposed(*given_), integer(*given_))


@pytest.mark.parametrize("name", CASES)
def test_rules_in_fixed_form_are_as_close(name: str) -> None:
    """A mantissa of 31 bits moves a result by less than 2^-20 steps, so only ties may go the other way."""
    forward, core, steps = CASES[name]
    given_ = inputs(1)
    prepared = calibrated(captured(forward, given_), "qnnpack", given_)
    integer = qc.convert(prepared, to="integer", multiplier="fixed")
    match = Match(qc.convert(prepared), core, given_)
    (written,) = integer_ops(integer)
    found = values_of(integer, given_)[written.name]
    exact = np.asarray(match.steps(steps))
    tie = np.abs(np.abs(exact - np.floor(exact)) - 0.5) < 2.0**-20
    off = (found.long() - match.rounded(exact).long()).abs().numpy()
    assert off[~tie].max(initial=0) == 0
    assert off.max() <= 1
    assert not any(dtype.is_floating_point for dtype in constant_dtypes(integer, written))


def constant_dtypes(program: Program, node: fx.Node) -> list[torch.dtype]:
    found = [program.tensor(item) for item in node.all_input_nodes]
    return [item.dtype for item in found if item is not None]


READING = Backend(
    "reading",
    RuleTable(
        "reading",
        (
            Rule("add", aten.add >> optional(op("relu", "gelu", args="_")), {"x": "act", "y": "act"}),
            Rule("mul-number", aten.mul("x", number("c")) >> optional(aten.relu), {"x": "act"}),
        ),
    ),
    roles={"act": UINT8},
    summary="reads integers and yields floats, for tests",
)


@pytest.mark.parametrize("form", ["float64", "fixed"])
@pytest.mark.parametrize("after", [torch.relu, nn.functional.gelu, torch.neg])
def test_results_that_are_read_in_float_are_float(after: Any, form: Any) -> None:
    """What follows the op stays as it is, be it of the match or not."""
    given_ = inputs(3)
    prepared = calibrated(captured(lambda self, x, y: after(x + y), given_), READING, given_)
    integer = qc.convert(prepared, to="integer", multiplier=form)
    integer.verify()
    (one, scale), (other, also) = Match(qc.convert(prepared), "add", given_).operands
    expected = torch.from_numpy((one * scale + other * also).astype(np.float32))
    (written,) = integer_ops(integer)
    assert same(values_of(integer, given_)[written.name], expected)
    assert torch.equal(integer(*given_), after(expected))


def test_a_single_term_that_is_read_in_float_is_float() -> None:
    given_ = inputs(4)
    prepared = calibrated(captured(lambda self, x, y: x * 1.7, given_), READING, given_)
    (n, scale), c = Match(qc.convert(prepared), "mul", given_).operands
    expected = torch.from_numpy((n * (scale * c)).astype(np.float32))
    assert same(qc.convert(prepared, to="integer")(*given_), expected)


# -- 16 bits -------------------------------------------------------------------------------------------------------

everything = {"x": "act", "y": "act", "out": "act"}
WIDE = Backend(
    "wide",
    RuleTable(
        "wide",
        (
            Rule("add", aten.add, everything),
            Rule("mul", aten.mul, everything),
            Rule("sub", aten.sub, everything),
        ),
    ),
    roles={"act": INT16.but(scheme="affine")},
    summary="activations of 16 bits, for tests",
)


@pytest.mark.parametrize("form", ["float64", "fixed"])
@pytest.mark.parametrize("name", ["add", "mul", "sub"])
def test_operands_of_16_bits(name: str, form: Any) -> None:
    forward, core, steps = CASES[name]
    given_ = inputs(2)
    prepared = calibrated(captured(forward, given_), WIDE, given_)
    integer = qc.convert(prepared, to="integer", multiplier=form)
    match = Match(qc.convert(prepared), core, given_)
    (written,) = integer_ops(integer)
    found = values_of(integer, given_)[written.name]
    expected = match.rounded(match.steps(steps))
    assert found.dtype == torch.int16
    off = (found.long() - expected.long()).abs()
    assert int(off.max()) == 0 if form == "float64" else float((off > 0).double().mean()) < 0.01


def test_products_of_16_bits_stay_inside_an_int64() -> None:
    """Both factors at the end of their range, times a mantissa: with one of 31 bits this would not fit."""
    given_ = (torch.tensor([[0.0, 4.0]]), torch.tensor([[0.0, 4.0]]))
    prepared = calibrated(captured(lambda self, x, y: x * y, given_), WIDE, given_)
    integer = qc.convert(prepared, to="integer", multiplier="fixed")
    (written,) = integer_ops(integer)
    mantissa = integer.tensor(written.args[4])  # type: ignore[arg-type]
    assert mantissa is not None
    assert 2**60 < abs(int(mantissa)) * 65535**2 < 2**62
    assert integer(*given_)[0, 1].item() == pytest.approx(16.0, rel=1e-4)


# -- what the rules do not come to by themselves -------------------------------------------------------------------


def changed(name: str, change: Callable[[Program, fx.Node], None]) -> tuple[Program, Match]:
    """A case as an integer program, with its op changed just before it is lowered; and its match, as it was."""
    forward, core, _ = CASES[name]
    given_ = inputs()
    program = qc.convert(calibrated(captured(forward, given_), "qnnpack", given_))
    match = Match(program, core, given_)
    change(program, match.core)
    return qc.Pipeline.parse("lower-integer,eliminate-dead").run(program), match


def at(index: int, value: Any) -> Callable[[Program, fx.Node], None]:
    return lambda program, node: node.update_arg(index, value)


def alpha(program: Program, node: fx.Node) -> None:
    node.update_kwarg("alpha", 2)


def read_in_float(program: Program, node: fx.Node) -> None:
    node.update_arg(1, [item for item in program.graph.nodes if item.op == "placeholder"][1])


def constant(value: Any, index: int = 1) -> Callable[[Program, fx.Node], None]:
    def change(program: Program, node: fx.Node) -> None:
        node.update_arg(index, program.constant("c", torch.tensor(value), before=node))

    return change


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("add", alpha, "its alpha is 2, not 1"),
        ("sub-from-number", alpha, "its alpha is 2, not 1"),
        ("add", read_in_float, "y does not come quantized"),
        ("mul", read_in_float, "y does not come quantized"),
        ("sub", constant([1.0, 2.0, 3.0, 4.0]), "c does not come quantized"),
        ("add-number", at(1, math.inf), "inf is not finite"),
        ("mul-number", at(1, math.nan), "nan is not finite"),
        ("div-number", at(1, 0), "it divides by zero"),
        ("div-number", read_in_float, "it does not divide by a number"),
        ("add-number", at(0, 1.0), "no operand that comes quantized"),
    ],
)
def test_what_is_not_written_says_why(name: str, change: Any, reason: str) -> None:
    program, _ = changed(name, change)
    assert not integer_ops(program)
    assert reason in "".join(program.plan.left_float.rows.values())


@pytest.mark.parametrize(("name", "index"), [("add", 0), ("add", 1), ("sub", 0), ("sub", 1), ("mul", 0), ("mul", 1)])
def test_constants_without_axes_are_numbers(name: str, index: int) -> None:
    program, match = changed(name, constant(1.25, index))
    (n, scale), so = match.operands[1 - index], match.out_scale
    steps = {
        ("add", 0): n * (scale / so) + 1.25 / so,
        ("add", 1): n * (scale / so) + 1.25 / so,
        ("sub", 0): n * (-scale / so) + 1.25 / so,
        ("sub", 1): n * (scale / so) - 1.25 / so,
        ("mul", 0): n * (scale * 1.25 / so),
        ("mul", 1): n * (scale * 1.25 / so),
    }[name, index]
    (written,) = integer_ops(program)
    assert same(values_of(program, inputs())[written.name], match.rounded(steps))
