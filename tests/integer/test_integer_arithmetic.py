"""`Arithmetic`, for every rule that has an integer form: the bits are those of NumPy, which rounds and wraps by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import quantc as qc
from quantc.ir.dialect import op_name
from quantc.patterns import Rule, RuleTable, aten, const
from quantc.pipeline.registry import BACKENDS
from quantc.spec.arithmetic import Arithmetic, MultiplierForm, Rounding
from quantc.spec.formats import Offer
from quantc.testing.rule_trial import Standing, Subject, Trial, scale_inputs
from tests.support.integer_oracle_judge import MAX_FLIPS, Judge
from tests.support.integer_oracle_models import kit_trials, varied

ROUNDINGS: tuple[Rounding, ...] = ("half-even", "half-up", "half-away", "truncate", "floor")
MULTIPLIERS: tuple[MultiplierForm, ...] = ("float64", "fixed", "shift")
BACKEND_NAMES = ("executorch", "qnnpack", "x86")
WIDE = 5.0
"""Inputs that many results leave their range for."""
ROUNDED_ALIKE = {"softmax", "aten._safe_softmax.default", "layer_norm", "group_norm", "instance_norm", "rms_norm"}
"""Their ops round half to even and saturate; where a target does not, they stay float."""
BY_NUMBERS = ("number", "average", "batch-norm")
"""Words in rules whose multipliers are no powers of two: a mantissa is not exact."""
SHIFTS_ALONE = "the ratio of its scales is no power of two, and the target only shifts"


def rules(backend: str) -> list[str]:
    found = [rule for rule in BACKENDS[backend].table if "integer" in rule.supports and rule.static is not Offer.NO]
    return [rule.name for rule in found if kit_trials(backend, rule.name)]


@cache
def powers_of_two(backend: str) -> Subject:
    """A backend whose scales are powers of two."""
    own = BACKENDS[backend]
    specs = {name: outcome.spec.but(scale_bits=1) for name in own.roles if (outcome := own.outcome(name)).spec}
    return Subject(own.but(**specs))


def judged(trial: Trial, random: Random, factor: float = WIDE) -> Judge:
    """A model with an arithmetic at random; half of them have scales that are powers of two."""
    has_powers = random.random() < 0.5
    if has_powers:
        again = Trial.of(powers_of_two(trial.backend.name), trial.rule, trial.model)
        trial = again if again.verdict.standing is Standing.TAKEN else trial
        has_powers = again is trial
    is_inexact = any(word in trial.rule.name for word in BY_NUMBERS)
    multipliers: list[MultiplierForm] = [form for form in MULTIPLIERS if form != "fixed" or not is_inexact]
    multiplier: MultiplierForm = random.choice(multipliers) if has_powers else "float64"
    arithmetic = Arithmetic(
        rounding=random.choice(ROUNDINGS),
        multiplier=multiplier,
        saturate=random.random() < 0.6,
    )
    judge = Judge.of(trial, arithmetic)
    return replace(judge, inputs=tuple(scale_inputs(judge.inputs, factor)))


def check(judge: Judge) -> None:
    said = f"{judge.rule} {judge.arithmetic}"
    left = judge.left_in_float(judge.integer)
    for name, why in left.items():
        op = op_name(judge.integer.node(name))
        is_norm = op in ROUNDED_ALIKE and why.endswith("rounds half to even and saturates, and the target does not")
        is_shift = judge.arithmetic.multiplier == "shift" and why == SHIFTS_ALONE
        assert is_norm or is_shift or "in float" in why or judge.rule == "linear-add", f"{said}: {op}: {why}"
    if judge.integer_nodes():
        allowed = dict.fromkeys(ROUNDED_ALIKE, 2.0**-20)
        assert judge.differences(allowed) == [], said


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_every_rule_computes_as_the_target_does(backend: str) -> None:
    for number, rule in enumerate(rules(backend)):
        for trial in kit_trials(backend, rule)[: 4 if backend == "qnnpack" else 1]:
            check(judged(trial, Random(number)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_other_shapes_settings_and_grids_are_exact_too(backend: str) -> None:
    names = rules(backend)

    @settings(max_examples=120, phases=(Phase.explicit, Phase.generate))
    @given(data=st.data())
    def each(data: Any) -> None:
        trials = kit_trials(backend, data.draw(st.sampled_from(names)))
        trial = varied(trials[data.draw(st.integers(0, len(trials) - 1))], data.draw)
        check(judged(trial, Random(data.draw(st.integers(0, 2**20))), data.draw(st.sampled_from([0.95, WIDE, 40.0]))))

    each()


@pytest.mark.parametrize("rounding", ["half-even", "half-up", "half-away"])
def test_a_mantissa_and_shift_are_a_step_apart_next_to_ties_alone(rounding: Rounding) -> None:
    wrong = total = 0
    for rule in rules("qnnpack"):
        judge = Judge.of(kit_trials("qnnpack", rule)[0], Arithmetic(rounding=rounding))
        if judge.integer_nodes():
            flips = judge.flips()
            wrong, total = wrong + flips[0], total + flips[1]
    assert total > 1000
    assert wrong <= MAX_FLIPS * total


def test_the_judge_sees_another_rounding() -> None:
    """Each arithmetic differs from each other one somewhere."""
    for mine in ROUNDINGS:
        for other in ROUNDINGS:
            found = []
            for rule in ("linear", "add", "average"):
                trial = kit_trials("qnnpack", rule)[0]
                trial = Trial.of(powers_of_two("qnnpack"), trial.rule, trial.model)
                judge = Judge.of(trial, Arithmetic(rounding=mine))
                found += replace(judge, arithmetic=Arithmetic(rounding=other)).differences({})
            assert bool(found) == (mine != other), (mine, other)


# -- the width of accumulators -----------------------------------------------------------------------------------

FACTORS = ("x", const("w"), const("b?"))
PRODUCT = {"x": "act", "w": "weight", "b": "bias", "out": "act"}
PRODUCTS = RuleTable(
    "chip",
    (
        Rule("linear", aten.linear(*FACTORS), PRODUCT, supports={"qdq", "integer"}),
        Rule("conv", aten.conv(*FACTORS), PRODUCT, supports={"qdq", "integer"}),
        Rule("sum", aten.add, {"x": "act", "y": "act", "out": "act"}, supports={"qdq", "integer"}),
        Rule("mul", aten.mul, {"x": "act", "y": "act", "out": "act"}, supports={"qdq", "integer"}),
    ),
)
ROLES = {
    "act": qc.INT8.but(scheme="symmetric", scale_bits=1),
    "weight": qc.INT8_WEIGHT.but(scale_bits=1),
    "bias": qc.INT32_BIAS,
}
CHIP = qc.Backend("chip", PRODUCTS, roles=ROLES)


def converted(model: nn.Module, batch: tuple[torch.Tensor, ...], arithmetic: Arithmetic) -> tuple[Any, Any]:
    prepared = qc.prepare(qc.capture(model.eval(), batch), CHIP)
    prepared.plan.arithmetic["chip"] = arithmetic
    qc.calibrate(prepared, [batch])
    return qc.convert(prepared), qc.convert(prepared, to="integer")


def reason(integer: qc.Program) -> str:
    """The reason why the one op stays float; empty if it does not."""
    return " ".join(set(integer.plan.left_float.rows.values()))


def drawn_products() -> Iterator[tuple[nn.Module, torch.Tensor]]:
    for seed in range(12):
        torch.manual_seed(seed)
        if seed % 2:
            yield nn.Conv2d(4, 4, 3, groups=1 + seed % 4 // 2, bias=seed % 3 > 0), torch.randn(2, 4, 6, 6) * 3
        else:
            yield nn.Linear(5 + seed * 7, 3, bias=seed % 3 > 0), torch.randn(4, 5 + seed * 7) + seed % 5


def bits_needed(qdq: qc.Program, integer: qc.Program) -> int:
    """Bits that hold every sum of some of the products and the bias, for any input, in Python's integers."""
    (node,) = (node for node in integer.nodes() if str(node.target) in ("quantc.linear.default", "quantc.conv.default"))
    target: Any = node.target
    names = [row.name for row in target._schema.arguments]
    given: dict[str, Any] = dict(zip(names, node.args, strict=False))
    w, bias = (None if given[name] is None else integer.tensor(given[name]) for name in ("w", "bias"))
    assert w is not None
    low, high = -128 - given["x_zero_point"], 127 - given["x_zero_point"]
    needed = 0
    for channel, row in enumerate(w.flatten(1).tolist()):
        steps = [] if bias is None else [int(bias[channel])]
        top = sum(max(v * low, v * high, 0) for v in row) + sum(max(v, 0) for v in steps)
        bottom = sum(min(v * low, v * high, 0) for v in row) + sum(min(v, 0) for v in steps)
        needed = max(needed, top.bit_length() + 1, (-bottom - 1).bit_length() + 1 if bottom else 1)
    return needed


def test_an_accumulator_is_wide_enough_or_the_op_stays_float() -> None:
    for model, x in drawn_products():
        qdq, integer = converted(model, (x,), Arithmetic())
        needed = bits_needed(qdq, integer)
        (row,) = qdq.coverage().accumulators.rows
        assert row.bits == needed
        for bits in (needed - 1, needed, 32):
            _, made = converted(model, (x,), Arithmetic(accumulator_bits=bits))
            expected = f"its accumulator could need {needed} bits, and has {bits}" if bits < needed else ""
            assert reason(made) == expected


class Both(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.op(x, y)
        return made


@pytest.mark.parametrize(("op", "needed"), [(torch.add, 15), (torch.mul, 16)])
def test_sums_and_products_of_tensors_are_no_wider(op: Any, needed: int) -> None:
    """One summand is 2^6 steps of the other: 2^6 · 128 + 128 needs 15 bits; 256 · 128 and 128 · 128 need 16."""
    x = torch.linspace(-1, 1, 33)
    batch = (x, x * (64 if op is torch.add else 1))
    for bits in (needed - 2, needed - 1, needed, 32):
        qdq, made = converted(Both(op), batch, Arithmetic(accumulator_bits=bits, multiplier="shift"))
        assert ("its accumulator could need" in reason(made)) == (bits < needed), (bits, reason(made))
    assert np.isfinite(qdq(*batch).numpy()).all()
