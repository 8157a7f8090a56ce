"""annotate: the decisions of a quantizer are in the plan, and a program of which nothing would be quantized is refused."""

from __future__ import annotations

from typing import Any

import pytest

import quantc as qc
from quantc.annotate.quantizer import quantizer_of
from quantc.errors import AnnotationError
from quantc.ir.decisions import Quantize
from quantc.ir.plan import Plan
from quantc.ir.program import Program
from quantc.passes.annotate import Annotate
from quantc.passes.share import Share
from quantc.pipeline.pipeline import Pipeline
from tests.support.small_backend import SMALL
from tests.support.text_programs import program_of

LINEAR = """program "Head" stage=canonical method=export mode=eval
  input %x : f32[2,3]
  const %w = "w" : f32[4,3] buffer
  %head : f32[2,4] = linear(%x, %w)
  %exp : f32[2,4] = exp(%head)
  output (%exp,)
"""
BLIND = """program "Blind" stage=canonical method=export mode=eval
  input %x
  input %y
  %sum = add(%x, %y)
  output (%sum,)
"""
IDLE = """program "Idle" stage=canonical method=export mode=eval
  input %x : f32[2]
  output (%x,)
"""
FLOAT = LINEAR.replace("linear(%x, %w)", "matmul(%x, %w)").replace("[4,3]", "[3,4]")


def decided(program: Program) -> dict[str, str]:
    return {str(site): str(outcome) for site, outcome in program.plan.outcomes.items()}


def test_decisions_are_in_the_plan_and_no_node_is_changed() -> None:
    program = program_of(LINEAR)
    before = program.dump(plan=False)
    outcome = Annotate(backend=quantizer_of(SMALL)).run(program)
    assert outcome.changed
    assert outcome.notes == ("1 nodes quantized",)
    assert program.dump(plan=False) == before
    assert decided(program) == {
        "head:in0": "quantize as UINT8",
        "head:in1": "quantize as INT8_WEIGHT",
        "head:out0": "quantize as UINT8",
    }
    assert program.plan.claims[program.node("head")].rule == "linear"
    assert program.plan.claims.get(program.node("exp")) is None


def test_the_same_decisions_a_second_time_keep_the_plan_and_its_groups() -> None:
    program = program_of(LINEAR)
    Pipeline((Annotate(backend=quantizer_of("small")), Share())).run(program)
    plan = program.plan
    config = qc.QuantConfig().set_op("linear", qc.UINT8)
    outcome = Annotate(backend=quantizer_of("small"), config=config).run(program)
    assert outcome.changed, "the config, which the text shows"
    assert not Annotate(backend=quantizer_of("small"), config=config).run(program).changed
    assert program.plan is plan
    assert plan.groups
    assert plan.config == config, "it asked for no more than it gets, and explain knows it"


def test_a_config_decides_before_the_backend() -> None:
    program = program_of(LINEAR)
    narrow = qc.UINT8.but(qmax=127)
    Annotate(backend=quantizer_of("small"), config=qc.QuantConfig().set_op("linear", narrow)).run(program)
    assert decided(program)["head:in0"] == str(Quantize(narrow))


@pytest.mark.parametrize(
    ("backend", "words"), [("smalll", ("'smalll'", "did you mean small")), (3, ("not a quantizer",))]
)
def test_what_is_no_quantizer_is_refused(backend: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="backend") as caught:
        Annotate(backend=backend)
    assert all(word in str(caught.value) for word in words)


def test_a_backend_may_go_by_its_name_or_as_it_is() -> None:
    made = [Annotate.model_validate({"backend": given}) for given in ("small", SMALL, quantizer_of(SMALL))]
    assert [pass_.backend.name for pass_ in made] == ["small"] * 3
    assert made[0] == made[1] == made[2]


def test_a_pass_is_written_by_the_name_of_its_backend() -> None:
    pipeline = Pipeline((Annotate(backend=quantizer_of(SMALL), allow_empty=True),))
    assert str(pipeline) == "annotate{backend=small allow-empty=true}"
    assert Pipeline.parse(str(pipeline)) == pipeline


# -- nothing is quantized -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "config", "what", "advice"),
    [
        (FLOAT, {}, "small has no rule that fits an op of Head", "allow_empty=True"),
        (LINEAR.replace("f32", "f64"), {}, "Head is in float64", 'dtype="float32"'),
        (LINEAR, {"linear": qc.FLOAT}, "the config leaves Head float: op linear", "leave that out of the config"),
        (
            BLIND,
            {},
            "no rule that fits an op of Blind",
            "give example_inputs",
        ),
        (IDLE, {}, "no rule that fits an op of Idle", "computes something"),
    ],
    ids=["no rule", "another float", "by config", "no types", "no ops"],
)
def test_a_program_of_which_nothing_is_quantized_is_refused(
    text: str, config: dict[str, Any], what: str, advice: str
) -> None:
    program, wanted = program_of(text), qc.QuantConfig()
    for op, use in config.items():
        wanted = wanted.set_op(op, use)
    before = program.plan
    with pytest.raises(AnnotationError) as caught:
        Annotate(backend=quantizer_of("small"), config=wanted).run(program)
    assert what in caught.value.what
    assert advice in str(caught.value.advice)
    assert program.plan is before


def test_an_empty_plan_may_be_allowed() -> None:
    program = program_of(FLOAT)
    outcome = Annotate(backend=quantizer_of("small"), allow_empty=True).run(program)
    assert outcome.notes == ()
    assert not program.plan.claims
    assert program.plan.outcomes == {}


def test_a_request_that_cannot_be_met_leaves_the_plan_as_it_was() -> None:
    program = program_of(LINEAR)
    before = program.plan = Plan()
    with pytest.raises(AnnotationError, match="cannot run INT16"):
        Annotate(backend=quantizer_of("small"), config=qc.QuantConfig().set_op("linear", qc.INT16)).run(program)
    assert program.plan is before
