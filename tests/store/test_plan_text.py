"""The plan in a program's text: what was decided parses back to the same meaning at every stage."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.annotate.annotator import Annotator
from quantc.annotate.quantizer import TableQuantizer, quantizer_of
from quantc.errors import CalibrationError, ObservationError, ParseError
from quantc.ir.decisions import OUTCOMES, Derived, Fixed, Float, Quantize, SameAs
from quantc.ir.plan import Plan
from quantc.ir.program import Program, Stage
from quantc.ir.sites import Site
from quantc.observe.store import Withheld
from quantc.passes.insert_observers import InsertObservers
from quantc.pipeline.pipeline import Pipeline
from quantc.spec.arithmetic import Arithmetic
from quantc.spec.spec import NAMED
from quantc.text.digests import constants, graph_constants

X = torch.linspace(-2, 3, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


class Net(nn.Module):
    """A convolution, a linear and what lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(288, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.head(torch.relu(self.conv(x)).flatten(1)))


@pytest.fixture(scope="module")
def captured() -> Program:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return qc.capture(Net().eval(), (X,))


@pytest.fixture(scope="module")
def stages(captured: Program) -> dict[str, Program]:
    """A program at each stage."""
    config = qc.QuantConfig().set("head", qc.FLOAT, role="bias")
    prepared = qc.prepare(captured, "x86", config=config)
    annotated = captured.clone()
    steps = qc.pipelines.prepare("x86", config)
    Pipeline(steps.passes[: steps.names.index("annotate") + 1]).run(annotated)
    observed = Pipeline((InsertObservers(),)).run_on_copy(prepared)
    calibrated = prepared.clone()
    qc.calibrate(calibrated, [X], progress="silent")
    folded = qc.convert(calibrated)
    quantized = Pipeline.parse("quantize").run_on_copy(calibrated)
    integer = qc.convert(calibrated, to="integer")
    rows = (captured, annotated, prepared, observed, calibrated, quantized, folded, integer)
    found = {program.stage.label: program for program in rows}
    assert list(found) == [stage.label for stage in Stage if stage not in (Stage.CAPTURED, Stage.FUSED, Stage.PLACED)]
    return found


def again(program: Program, **given: Any) -> Program:
    """What its text gives, with its example inputs: they say how many products there are."""
    twin = qc.parse(str(program), constants(program), **given)
    twin.example_inputs = program.example_inputs
    return twin


STAGES = ["canonical", "annotated", "shared", "observed", "calibrated", "quantized", "folded", "lowered"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_plan_parses_back_at_every_stage(stage: str, stages: dict[str, Program]) -> None:
    program = stages[stage].clone()
    twin = again(program)
    assert str(twin) == str(program)
    assert str(twin.plan) == str(program.plan)
    for fact in ("quantizer", "config", "outcomes", "groups", "batches", "instruction_sets", "arithmetic"):
        assert getattr(twin.plan, fact) == getattr(program.plan, fact), fact
    tables: Any = zip(twin.plan.tables, program.plan.tables, strict=True)
    for mine, theirs in tables:
        assert {node.name: row for node, row in mine.rows.items()} == {
            node.name: row for node, row in theirs.rows.items()
        }
    assert all(twin.plan.qparams[name].equals(found) for name, found in program.plan.qparams.items())
    assert list(twin.plan.statistics) == list(program.plan.statistics) or stage == "observed"
    assert torch.equal(twin(X), program(X))
    twin.verify()
    if program.stage >= Stage.ANNOTATED:
        assert twin.coverage() == program.coverage()
        for name in ("relu", "flatten"):
            assert not program.has_node(name) or str(twin.explain(name)) == str(program.explain(name))


@pytest.mark.parametrize("stage", STAGES)
def test_a_plan_without_its_tensors_prints_the_same(stage: str, stages: dict[str, Program]) -> None:
    program = stages[stage]
    blank = qc.parse(str(program))
    assert str(blank) == str(program)
    assert str(blank.clone()) == str(program)


def test_what_was_parsed_goes_on_as_the_program_does(stages: dict[str, Program]) -> None:
    shared = again(stages["shared"])
    qc.calibrate(shared, [X], progress="silent")
    calibrated = stages["calibrated"]
    for source in (shared, again(calibrated)):
        for form in ("qdq", "integer"):
            expected: Any = qc.convert(calibrated, to=form)
            actual = qc.convert(source, to=form)
            assert str(actual) == str(expected)
            assert torch.equal(actual(X), expected(X))
    observed = again(stages["observed"])
    observed(X)
    assert qc.convert(observed).dump(plan=False) == qc.convert(calibrated).dump(plan=False)
    mine, theirs = qc.lower(again(stages["lowered"]), "x86"), qc.lower(stages["lowered"], "x86")
    assert [str(row) for row in mine.placed] == [str(row) for row in theirs.placed]
    assert torch.equal(mine(X), theirs(X))


def test_statistics_that_are_not_given_are_withheld_and_said_so(stages: dict[str, Program]) -> None:
    calibrated = stages["calibrated"]
    parsed = qc.parse(str(calibrated), graph_constants(calibrated))
    assert torch.equal(parsed(X), calibrated(X))
    found = parsed.plan.statistics["conv2d:in0"]
    assert isinstance(found, Withheld)
    assert found.seen == X.numel()
    with pytest.raises(ObservationError, match="not given with the text"):
        found.qparams(qc.UINT8)
    for form in ("qdq", "integer"):
        with pytest.raises(CalibrationError, match="not given with the text") as caught:
            qc.convert(parsed, to=form)
        assert "constants(program)" in str(caught.value.advice)
        assert "conv2d:in0" in str(caught.value.where)
    qc.calibrate(parsed, [X], progress="silent")
    assert parsed.plan.batches == 1
    assert any("started anew" in note for note in parsed.log[-1].notes)
    assert str(qc.convert(parsed)) == str(qc.convert(calibrated))


def test_small_statistics_need_no_constants(captured: Program) -> None:
    config = qc.QuantConfig().set_all(qc.UINT8.but(observe="minmax"), role="act")
    program = qc.prepare(captured, "x86", config=config)
    qc.calibrate(program, [X], progress="silent")
    assert '"minmax"' in str(program)
    parsed = qc.parse(str(program), graph_constants(program))
    assert torch.equal(qc.convert(parsed)(X), qc.convert(program)(X))


def test_other_statistics_than_those_of_the_text_are_refused(stages: dict[str, Program]) -> None:
    program = stages["calibrated"]
    given = constants(program)
    name = next(name for name in given if name.startswith("statistics/"))
    given[name] = given[name] + 1
    with pytest.raises(ParseError, match=f"the constant given for {re.escape(repr(name))} has digest"):
        qc.parse(str(program), given)


class ByHand:
    """A quantizer that no package offers."""

    name = "by-hand"

    def __init__(self) -> None:
        self.table = quantizer_of("x86")

    def transforms(self) -> tuple[Any, ...]:
        return ()

    def annotate(self, annotator: Annotator) -> None:
        self.table.annotate(annotator)

    def validate(self, program: Program) -> None: ...

    def supported_operators(self) -> tuple[str, ...]:
        return self.table.supported_operators()

    def explain(self, program: Program, node: str) -> Any:
        return self.table.explain(program, node)


def test_a_quantizer_that_is_not_installed_is_given(captured: Program) -> None:
    mine = ByHand()
    program = qc.prepare(captured, mine)
    without = again(program)
    assert without.plan.quantizer is None
    assert str(without) == str(program), "its name is not lost"
    assert any("by-hand is not an installed backend" in note for note in without.log[-1].notes)
    twin = again(program, quantizers={"by-hand": mine})
    assert twin.plan.quantizer is mine
    assert str(twin.explain("conv2d")) == str(program.explain("conv2d"))
    assert isinstance(again(qc.prepare(captured, "x86")).plan.quantizer, TableQuantizer)


def test_several_quantizers_are_looked_up_in_order(captured: Program) -> None:
    program = qc.prepare(captured, ["qnnpack", "x86"])
    twin = again(program)
    assert twin.plan.quantizer == program.plan.quantizer
    assert twin.plan.instruction_sets == program.plan.instruction_sets


def test_an_arithmetic_is_kept(stages: dict[str, Program]) -> None:
    program = stages["calibrated"].clone()
    program.plan.arithmetic["x86"] = Arithmetic(rounding="half-up", multiplier="fixed", accumulator_bits=24)
    twin = again(program)
    assert twin.plan.arithmetic == program.plan.arithmetic
    assert str(qc.convert(twin, to="integer")) == str(qc.convert(program, to="integer"))


OUTCOME = [
    *(Quantize(spec) for spec in NAMED.values()),
    Quantize(qc.UINT8.but(eps=1.2345678901234567e-7, scale_bits=8, observe="percentile{percentile=99.9}")),
    Quantize(qc.INT4_GROUP.but(granularity={"kind": "per-group", "axis": 1, "size": 7})),
    Fixed(0.1 + 0.2, 3, qc.UINT8),
    SameAs(Site("true_graph_0", "conv2d", operand=11)),
    Derived((Site("", "a", out=0), Site("b/c", "d", operand=2))),
    Float('why "so", %x:\n…'),
]


@pytest.mark.parametrize("outcome", OUTCOME, ids=str)
def test_every_decision_parses_back(outcome: Any, captured: Program) -> None:
    program = captured.clone()
    program.plan = Plan(outcomes={Site("", "conv2d", operand=0): outcome})
    (found,) = again(program).plan.outcomes.values()
    assert found == outcome
    assert OUTCOMES.dump_json(found) == OUTCOMES.dump_json(outcome)


def test_what_training_has_learned_is_not_in_text_and_said_so(captured: Program) -> None:
    program = qc.prepare(captured, "x86", qat=True)
    program(X)
    twin = again(program)
    assert str(twin) == str(program)
    twin.verify()
    with pytest.raises(CalibrationError, match="does not hold what its fake quantizers have learned"):
        qc.convert(twin)
    converted = qc.convert(program)
    assert torch.equal(again(converted)(X), converted(X))


def test_a_broken_program_is_printed_with_what_it_says(stages: dict[str, Program]) -> None:
    program = stages["shared"].clone()
    program.plan.left_float[stages["canonical"].node("relu")] = "a node of another program"
    assert 'left_float "relu" = "a node of another program"' in str(program)
