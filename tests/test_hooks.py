"""Hooks: what each watches for, and that it catches a pass that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import PassError, PipelineError, QuantcError, VerifyError
from quantc.hooks import Diff, DumpTo, Timing, Truth, Verify
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Hook, Outcome, Pass, Pipeline, Preserves
from quantc.text.parser import parse
from tests.support.by_hand import aten, two_layers


class Idle(Pass):
    """Changes nothing and says so."""

    name: ClassVar[str] = "idle"

    def run(self, program: Program) -> bool:
        return False


class Negate(Pass):
    """Puts a negation where the relu was: sound, but other numbers."""

    name: ClassVar[str] = "negate"
    gives: ClassVar[Stage | None] = Stage.FUSED
    preserves: ClassVar[Preserves] = Preserves.NOTHING

    says: bool = True

    def run(self, program: Program) -> bool:
        for node in program.graph.nodes:
            if node.target is aten.relu.default:
                program.replace(node, program.emit(aten.neg.default, node.args, before=node, like=node))
        return self.says


class Cycle(Pass):
    """Lets a node use one that comes after it."""

    name: ClassVar[str] = "cycle"

    def run(self, program: Program) -> bool:
        program.node("relu").args = (program.node("tanh"),)
        program.touch()
        return True


class Boast(Pass):
    """Changes nothing and says it did."""

    name: ClassVar[str] = "boast"

    def run(self, program: Program) -> Outcome:
        return Outcome(True)


class Retune(Pass):
    """Writes into a weight without a word."""

    name: ClassVar[str] = "retune"

    def run(self, program: Program) -> bool:
        with torch.no_grad():
            program.root.get_parameter("w1").mul_(2)
        return False


def test_verify_catches_a_pass_that_breaks_the_graph() -> None:
    with pytest.raises(PassError, match="pass cycle failed: VerifyError") as caught:
        Pipeline((Idle(), Cycle())).run(two_layers(), [Verify()])
    assert isinstance(caught.value.__cause__, VerifyError)
    assert "relu" in str(caught.value), "the fault is told"
    assert "ran before it: idle" in str(caught.value)


def test_verify_looks_only_where_something_changed() -> None:
    program = two_layers()
    Cycle().run(program)
    Pipeline((Idle(),)).run(program, [Verify()])
    with pytest.raises(PassError):
        Pipeline((Boast(),)).run(program, [Verify()])


def test_truth_accepts_passes_that_tell_it() -> None:
    Pipeline((Idle(), Negate())).run(two_layers(), [Truth()])


@pytest.mark.parametrize("liar", [Negate(says=False), Retune()])
def test_truth_catches_a_change_that_was_not_reported(liar: Pass) -> None:
    with pytest.raises(PassError, match=f"{liar.name} reported no change, but the program has changed"):
        Pipeline((liar,)).run(two_layers(), [Truth()])


def test_truth_catches_a_report_without_a_change() -> None:
    with pytest.raises(PassError, match="boast reported a change, but the program has not") as caught:
        Pipeline((Idle(), Boast())).run(two_layers(), [Truth()])
    assert "pass 2 of 2" in str(caught.value)


def test_truth_is_not_misled_by_the_stage_which_the_pipeline_moves() -> None:
    class Advance(Idle):
        name: ClassVar[str] = "advance"
        gives: ClassVar[Stage | None] = Stage.FUSED

    program = Pipeline((Advance(),)).run(two_layers(), [Truth()])
    assert program.stage is Stage.FUSED


def test_timing_gives_a_table() -> None:
    timing = Timing()
    program = Pipeline((Idle(), Negate())).run(two_layers(), [timing])
    assert timing.rows == program.log
    assert timing.seconds == pytest.approx(sum(entry.seconds for entry in program.log))
    lines = str(timing).splitlines()
    assert [line.split()[0] for line in lines] == ["idle", "negate", "total"]
    assert lines[1].endswith("changed")
    assert str(Timing()).startswith("total")


def test_dump_to_writes_the_start_and_each_change(tmp_path: Path) -> None:
    program = two_layers()
    start = program.dump("text")
    dumps = DumpTo(tmp_path / "deep" / "dumps")
    Pipeline((Idle(), Negate(), Idle())).run(program, [dumps])
    assert [file.name for file in dumps.files] == ["00-canonical.txt", "02-negate.txt"]
    assert dumps.files[0].read_text() == start
    assert dumps.files[1].read_text() == program.dump("text")
    assert parse(dumps.files[1].read_text()).stage is Stage.FUSED


def test_diff_collects_what_each_pass_changed() -> None:
    diffs = Diff()
    Pipeline((Idle(), Negate(), Idle())).run(two_layers(), [diffs])
    ((pass_, found),) = diffs.rows
    assert pass_ == Negate()
    assert "relu" in str(found)
    assert "neg" in str(found)
    assert str(diffs).startswith("== negate\n")


def test_hooks_see_passes_in_order_and_a_failing_hook_stops_the_run() -> None:
    timing = Timing()
    with pytest.raises(PassError):
        Pipeline((Idle(), Cycle(), Idle())).run(two_layers(), [Verify(), timing])
    assert [row.name for row in timing.rows] == ["idle"]


def test_a_module_is_not_rebuilt_by_passes_that_change_nothing() -> None:
    program = two_layers()
    module = program.module
    Pipeline((Idle(), Idle())).run(program, [Verify(), Truth(), Timing()])
    assert program.module is module
    assert isinstance(module, nn.Module)


@pytest.mark.parametrize("qat", [False, True])
def test_the_verbs_call_hooks_around_every_pass(qat: bool) -> None:
    class Seen(Hook):
        def __init__(self) -> None:
            self.names: list[str] = []

        def after(self, program: Program, pass_: Pass, changed: bool) -> None:
            self.names.append(str(pass_))

    seen, x = Seen(), torch.randn(2, 4)
    prepared = qc.prepare(
        qc.capture(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval(), (x,)), "qnnpack", qat=qat, hooks=[seen]
    )
    assert seen.names == [entry.name for entry in prepared.log][-len(seen.names) :]
    assert "annotate{backend=qnnpack}" in seen.names
    if not qat:
        qc.calibrate(prepared, [x])
    else:
        prepared(x)
    seen.names.clear()
    qc.convert(prepared, to="integer", hooks=[seen])
    assert {"quantize", "lower-integer"} <= {name.partition("{")[0] for name in seen.names}


def test_quantize_hands_hooks_on() -> None:
    class Refusing(Hook):
        def before(self, program: Program, pass_: Pass) -> None:
            if pass_.name == "quantize":
                raise RuntimeError("stopped here")

    x = torch.randn(2, 4)
    with pytest.raises(PassError, match="hook Refusing failed before pass quantize: RuntimeError: stopped here"):
        qc.quantize(nn.Linear(4, 4).eval(), (x,), [x], hooks=[Refusing()])


@pytest.mark.parametrize("hooks", [3, [3], [Timing]])
def test_what_is_no_hook_is_refused(hooks: Any) -> None:
    program = qc.capture(nn.Linear(2, 2).eval(), (torch.ones(1, 2),))
    with pytest.raises(PipelineError, match="is not a hook") as caught:
        qc.prepare(program, "qnnpack", hooks=hooks)
    assert "hooks=[Timing()]" in str(caught.value)


def test_what_a_hook_finds_is_an_error_of_the_pass() -> None:
    class Strict(Hook):
        def after(self, program: Program, pass_: Pass, changed: bool) -> None:
            raise QuantcError("this pass does too much")

    with pytest.raises(PassError, match="pass idle failed: QuantcError: this pass does too much"):
        Pipeline((Idle(),)).run(two_layers(), [Strict()])
