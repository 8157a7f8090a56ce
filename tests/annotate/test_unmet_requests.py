"""What a config asked for and an annotated program does not have is refused, with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

import quantc as qc
from quantc.errors import AnnotationError
from quantc.ir.program import Program
from quantc.spec.capability import Capability
from quantc.spec.formats import Timing
from quantc.spec.spec import INT8_WEIGHT, INT8_WEIGHT_ONLY, UINT8, UINT8_DYNAMIC
from tests.support.hand_quantizers import Deaf, annotated, prepared
from tests.support.pattern_graphs import Build
from tests.support.small_backend import SMALL


def test_a_format_that_a_quantizer_written_by_hand_does_not_heed_is_refused() -> None:
    with pytest.raises(AnnotationError, match="by-hand does not heed the config's rule 2") as caught:
        prepared(Deaf(), config=qc.QuantConfig().set("2", qc.INT16))
    assert "linear_1" in str(caught.value)
    with pytest.raises(AnnotationError, match="does not heed"):
        prepared(Deaf(), config=qc.QuantConfig().set("2", qc.FLOAT, role="weight"))
    prepared(Deaf(), config=qc.QuantConfig().set("2", Deaf().act))
    prepared(Deaf(act=qc.INT16), config=qc.QuantConfig().set("2", qc.INT16))


# -- rules that nothing came of ----------------------------------------------------------------------------------


TAKEN = replace(SMALL, takes=tuple(map(Capability.of, (UINT8, INT8_WEIGHT, UINT8_DYNAMIC, INT8_WEIGHT_ONLY))))


def small() -> Program:
    build = Build()
    linear = build("linear", build.input("x", 2, 4), build.const("w", 3, 4), None)
    return build.done(build("sigmoid", linear))


def test_a_dynamic_rule_for_an_op_that_is_static_is_refused() -> None:
    with pytest.raises(AnnotationError, match="nothing came of the config's rule op linear") as caught:
        annotated(small(), TAKEN, qc.QuantConfig().set_op("linear", UINT8_DYNAMIC))
    assert "linear has no dynamic form on small" in caught.value.what
    assert "linear" in str(caught.value.where)
    assert "quantc backends" in str(caught.value.advice)


def test_a_weight_only_rule_for_an_op_without_weights_is_refused() -> None:
    with pytest.raises(AnnotationError, match="nothing came of the config's rule op sigmoid") as caught:
        annotated(small(), TAKEN, qc.QuantConfig().set_op("sigmoid", INT8_WEIGHT_ONLY))
    assert "weights are constants" in str(caught.value.advice)


def test_a_rule_for_everything_asks_for_nothing_in_particular() -> None:
    program = annotated(small(), TAKEN, qc.QuantConfig().set_all(UINT8_DYNAMIC))
    assert not program.plan.claims


def test_a_rule_that_a_later_one_overrides_somewhere_is_no_request() -> None:
    build = Build()
    x, w = build.input("x", 2, 4), build.const("w", 3, 4)
    program = build.done(*(build("linear", x, w, None, name=name) for name in ("first", "second")))
    config = qc.QuantConfig().set_op("linear", UINT8_DYNAMIC)
    with pytest.raises(AnnotationError, match="nothing came of"):
        annotated(program, TAKEN, config)
    annotated(program, TAKEN, config.set_node("first", UINT8))
    assert {node.name: claim.timing for node, claim in program.plan.claims.rows.items()} == {"first": Timing.STATIC}


def test_a_rule_that_takes_effect_somewhere_is_met() -> None:
    program = annotated(small(), TAKEN, qc.QuantConfig().set_op("linear", INT8_WEIGHT_ONLY))
    assert program.plan.claims[program.node("linear")].timing is Timing.WEIGHT_ONLY
    twice = Build()
    x, w = twice.input("x", 2, 4), twice.const("w", 3, 4)
    computed = twice("linear", x, twice("neg", w), None, name="computed")
    both = annotated(
        twice.done(computed, twice("linear", x, w, None)), TAKEN, qc.QuantConfig().set_op("linear", INT8_WEIGHT_ONLY)
    )
    assert [node.name for node in both.plan.claims.rows] == ["linear"]
