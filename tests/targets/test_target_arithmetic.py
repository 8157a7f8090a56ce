"""`Target.arithmetic`: read by the integer form, its proof, files and kernels; programs keep it without the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import PluginError
from quantc.integer.library import OPS
from quantc.integer.match_lowering import NotIntegerError, Task
from quantc.integer.proof.overflow_report import Safety, accumulators
from quantc.integer.semantics import Semantics
from quantc.patterns import Rule, RuleTable, aten, const, optional
from quantc.pipeline.registry import BACKENDS
from quantc.spec.arithmetic import Arithmetic
from quantc.targets.target import TARGETS, Target, register_target

X = torch.linspace(-3, 3, 64).reshape(4, 16)
ACT = qc.INT8.but(scheme="symmetric")
LINEAR = aten.linear("x", const("w"), const("b?")) >> optional(aten.clamp)
ROLES = {"x": "act", "w": "weight", "b": "bias", "out": "act"}
EXACT_SCALES = qc.Backend(
    "chip",
    RuleTable("chip", (Rule("linear", LINEAR, ROLES, supports={"qdq", "integer"}),)),
    roles={"act": ACT, "weight": qc.INT8_WEIGHT, "bias": qc.INT32_BIAS},
)
POWERS = EXACT_SCALES.but(act=ACT.but(scale_bits=1), weight=qc.INT8_WEIGHT.but(scale_bits=1))


def lower(program: qc.Program) -> qc.Program:
    return program


Declare = Callable[..., str]


@pytest.fixture
def declare() -> Iterator[Declare]:
    """Register a backend and a target of an arithmetic; their name."""

    def register(backend: qc.Backend = POWERS, **arithmetic: object) -> str:
        BACKENDS.register("chip", backend)
        register_target(Target("chip", lower, arithmetic=Arithmetic.model_validate(arithmetic)))
        return "chip"

    yield register
    for registry in (BACKENDS, TARGETS):
        if "chip" in registry:
            registry.forget("chip")


def prepared(backend: str) -> qc.Program:
    torch.manual_seed(0)
    made = qc.prepare(qc.capture(nn.Sequential(nn.Linear(16, 8), nn.ReLU()).eval(), (X,)), backend)
    qc.calibrate(made, [X])
    return made


def product(program: qc.Program) -> torch.fx.Node:
    (found,) = (node for node in program.nodes() if node.target is OPS["linear"].target)
    return found


def test_the_integer_form_rounds_and_shifts_as_the_target_does(declare: Declare) -> None:
    program = qc.convert(prepared(declare(rounding="half-up", multiplier="shift")), to="integer")
    node = product(program)
    assert node.args[-1] == "half-up"
    quantize, *_ = (each for each in program.nodes() if each.name.startswith("quantize"))
    seen = program.slice([each for each in program.nodes() if each.op == "call_function"][:5])
    levels = seen(X).numpy().astype(np.int64)
    assert quantize.name in {item.name for item in seen.nodes()}
    w, b, shift = (program.tensor(node.args[index]).numpy() for index in (2, 4, 7))  # type: ignore[union-attr, arg-type]
    acc = levels @ w.astype(np.int64).T + b
    expected = np.clip((acc + (1 << shift.astype(np.int64) - 1)) >> shift, 0, 127)
    only = program.slice([*[each for each in program.nodes() if each.op == "call_function"][:5], node])
    assert np.array_equal(only(X).numpy(), expected)


def test_a_multiplier_that_is_asked_for_comes_first(declare: Declare) -> None:
    made = prepared(declare(rounding="floor", multiplier="shift"))
    node = product(qc.convert(made, to="integer", multiplier="float64"))
    assert (node.args[7], node.args[-1]) == (None, "floor")


def test_scales_that_no_shift_is_leave_the_op_in_float_with_the_reason(declare: Declare) -> None:
    made = prepared(declare(EXACT_SCALES, multiplier="shift"))
    (row,) = (row for row in qc.convert(made, to="integer").coverage().rows if row.op == "linear")
    assert row.reason == "the ratio of its scales is no power of two, and the target only shifts"


def test_narrow_accumulators_are_proven_and_keep_ops_out(declare: Declare) -> None:
    made = prepared(declare(accumulator_bits=12))
    converted = qc.convert(made)
    (row,) = accumulators(converted).rows
    assert (row.safety, row.pairs) == (Safety.OVERFLOWS, ())
    (left,) = (row for row in qc.convert(made, to="integer").coverage().rows if row.op == "linear")
    assert left.reason.startswith("its accumulator could need")
    assert left.reason.endswith("bits, and has 12")


def test_a_program_keeps_the_arithmetic_in_its_file(declare: Declare, tmp_path: Path) -> None:
    made = prepared(declare(rounding="half-away", multiplier="shift"))
    expected = qc.convert(made, to="integer")
    made.save(tmp_path / "made.qc")
    TARGETS.forget("chip")
    loaded = qc.load(tmp_path / "made.qc")
    assert loaded.plan.arithmetic == {"chip": Arithmetic(rounding="half-away", multiplier="shift")}
    again = qc.convert(loaded, to="integer")
    assert product(again).args[-1] == "half-away"
    assert torch.equal(again(X), expected(X))


def test_files_without_one_say_nothing_of_it(tmp_path: Path) -> None:
    made = prepared("qnnpack")
    assert not made.plan.arithmetic
    made.save(tmp_path / "made.qc")
    assert b"arithmetic" not in (tmp_path / "made.qc").read_bytes()


def test_kernels_that_round_otherwise_leave_it_to_the_reference(declare: Declare) -> None:
    made = prepared(declare(rounding="floor", multiplier="shift"))
    integer = qc.convert(made, to="integer")
    lowered = qc.lower(qc.convert(made), "x86")
    (row,) = (row for row in lowered.placed if row.op == "linear")
    assert (row.kernel, row.reason) == ("", "kernels round half to even and saturate")
    with torch.no_grad():
        assert torch.equal(lowered(X), integer(X))


def refuse(task: Task) -> None:
    raise NotIntegerError("the chip has no products")


ROWS = [Semantics(("linear",), "none", refuse)]


def test_rows_of_the_target_come_before_those_of_the_table(declare: Declare) -> None:
    made = prepared(declare(semantics=f"{__name__}:ROWS"))
    (left,) = (row for row in qc.convert(made, to="integer").coverage().rows if row.op == "linear")
    assert left.reason == "the chip has no products"


def test_rows_that_are_not_there_are_an_error_that_names_the_place(declare: Declare) -> None:
    backend = declare(semantics="quantc.nowhere:ROWS")
    with pytest.raises(PluginError, match=r"no semantics at quantc\.nowhere:ROWS"):
        prepared(backend)


def test_the_plan_of_several_backends_has_the_arithmetic_of_each(declare: Declare) -> None:
    both = qc.prepare(qc.capture(nn.Linear(16, 8).eval(), (X,)), [declare(rounding="floor"), "x86"])
    assert both.plan.arithmetic == {"chip": Arithmetic(rounding="floor")}


def rounded(exact: np.ndarray, rounding: str) -> np.ndarray:
    """Numbers rounded by NumPy alone."""
    ways: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "half-even": np.rint,
        "half-up": lambda x: np.floor(x + 0.5),
        "half-away": lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5),
        "truncate": np.trunc,
        "floor": np.floor,
    }
    return ways[rounding](exact)


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("multiplier", ["float64", "fixed", "shift"])
@pytest.mark.parametrize("rounding", ["half-even", "half-up", "half-away", "truncate", "floor"])
def test_every_arithmetic_is_that_of_numpy(declare: Declare, rounding: str, multiplier: str, saturate: bool) -> None:
    program = prepared(declare(POWERS, rounding=rounding, multiplier=multiplier, saturate=saturate))
    integer = qc.convert(program, to="integer")
    node = product(integer)
    seen: dict[str, torch.Tensor] = {}

    class Values(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            made = super().run_node(n)
            if isinstance(made, torch.Tensor):
                seen[n.name] = made
            return made

    wide = X * 9  # most results leave the range
    left_the_range = False
    for batch in (X, wide):
        Values(integer.root, graph=integer.graph).run(batch)
        target: Any = node.target
        given: dict[str, Any] = dict(zip([row.name for row in target._schema.arguments], node.args, strict=False))
        x, w, b = (seen[given[name].name].numpy().astype(np.int64) for name in ("x", "w", "bias"))
        scales = [program_scale(integer, name) for name in ("linear:in0", "linear:in1", "relu:out0")]
        ratio = np.asarray(scales[0] * scales[1] / scales[2], np.float64)
        exact = (x @ w.T + b) * ratio  # exact: the ratio is a power of two
        expected = rounded(exact, rounding).astype(np.int64)
        left_the_range |= bool((expected > 127).any())
        expected = expected.clip(-128, 127) if saturate else (expected + 128) % 256 - 128
        expected = expected.clip(0, 127)  # the relu
        assert np.array_equal(seen[node.name].numpy().astype(np.int64), expected)
    assert left_the_range


def program_scale(program: qc.Program, group: str) -> np.ndarray:
    return program.plan.qparams[group].scale.double().numpy()
