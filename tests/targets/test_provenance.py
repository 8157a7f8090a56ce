"""Provenance of a deployed file: digests that tell apart what it was made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import version

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import QuantcError
from quantc.targets.provenance import Provenance, check_quantized

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def converted(
    backend: str = "x86", *, scale: float = 1.0, config: qc.QuantConfig | None = None, spread: float = 1.0
) -> qc.Program:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).eval()
    with torch.no_grad():
        model.weight.mul_(scale)
    prepared = qc.prepare(qc.capture(model, (X,)), backend, config=config)
    qc.calibrate(prepared, [X * spread], progress="silent")
    return qc.convert(prepared)


@cache
def first() -> Provenance:
    return Provenance.of(converted())


def test_the_same_steps_give_the_same_provenance() -> None:
    assert Provenance.of(converted()) == first()
    assert (first().quantc, first().program, first().backend) == (version("quantc"), "Linear", "x86")


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (lambda: converted(scale=1.5), {"source"}),
        (lambda: converted(spread=3.0), {"source"}),
        (
            lambda: converted(config=qc.QuantConfig().set_op("linear", qc.INT8_WEIGHT, role="weight")),
            {"config", "source"},
        ),
        (lambda: converted("qnnpack"), {"backend", "source"}),
    ],
    ids=["another weight", "another range", "another config", "another backend"],
)
def test_what_was_made_otherwise_is_told_apart(make: Callable[[], qc.Program], changed: set[str]) -> None:
    found = Provenance.of(make())
    assert {name for name in vars(found) if getattr(found, name) != getattr(first(), name)} == changed


def test_a_copy_has_the_provenance_of_the_program() -> None:
    program = converted()
    assert Provenance.of(program.clone()) == Provenance.of(program)


def test_programs_in_qdq_form_are_taken() -> None:
    check_quantized(converted(), "a file")


def test_float_programs_are_refused_with_the_step_that_is_missing() -> None:
    program = qc.capture(nn.Linear(4, 3).eval(), (X,))
    for stage in (program, qc.prepare(program, "x86")):
        with pytest.raises(QuantcError, match="Linear is not quantized") as caught:
            check_quantized(stage, "a file")
        assert "qc.convert" in str(caught.value.advice)
        assert stage.stage.label in str(caught.value.where)


def test_programs_in_integer_form_are_refused_by_the_name_of_the_target() -> None:
    program = qc.pipelines.integer().run_on_copy(converted())
    with pytest.raises(QuantcError, match=r"integer form, and a \.pte file is written from the Q/DQ form"):
        check_quantized(program, "a .pte file")


def test_a_single_level_of_a_weight_is_told_apart() -> None:
    program = converted()
    other = program.clone()
    levels = next(tensor for tensor in other.root.buffers() if tensor.dtype is torch.int8)
    levels[0, 0] += 1
    assert Provenance.of(other).source != Provenance.of(program).source
