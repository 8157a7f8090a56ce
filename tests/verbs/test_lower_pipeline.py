"""`qc.lower(..., pipeline=..., hooks=...)`: lowering is a pipeline that can be printed, changed and watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import PipelineError, QuantcError, SaveError
from quantc.hooks import Guard, Hook, Timing, Truth, Verify
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass, Pipeline, Preserves
from quantc.pipeline.registry import register_pass
from quantc.targets.target import TARGETS, Target, register_target

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(8, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return [torch.relu(self.parts[0](x)), *(part(x) for part in self.parts[1:])]


@pytest.fixture(scope="module")
def converted() -> Program:
    return qc.quantize(Projections().eval(), (X,), mode="dynamic").program


def placing() -> Pipeline:
    return qc.pipelines.lower("x86")


def test_the_pipeline_shows_the_whole_way() -> None:
    assert str(placing()) == (
        "lower-weights,lower-integer{curves=float boundaries=whole},eliminate-dead,place-kernels{target=x86},"
        "fuse-epilogues,merge-siblings,fuse-attention,fuse-residual,assign-memory-format,eliminate-dead,"
        "overwrite-summands,copy-returned-constants"
    )
    assert Pipeline.parse(str(placing())) == placing()
    assert "place-kernels{target=qnnpack}" in str(qc.pipelines.lower("qnnpack"))


def test_a_pass_can_be_left_out(converted: Program) -> None:
    whole, apart = (qc.lower(converted, "x86", pipeline=steps) for steps in (None, placing().without("merge-siblings")))
    assert [row.kernel for row in whole.placed] == ["fbgemm linear, relu", *["fbgemm linear; 2 in one"] * 2]
    assert [row.kernel for row in apart.placed] == ["fbgemm linear, relu", *["fbgemm linear"] * 2]
    assert all(torch.equal(one, other) for one, other in zip(whole(X), apart(X), strict=True))


def test_text_will_do_too_and_without_kernels_ops_run_as_they_are_written(converted: Program) -> None:
    text = str(placing()).partition(",place-kernels")[0]
    lowered = qc.lower(converted, "x86", pipeline=text)
    assert lowered.placed == ()
    assert all(torch.equal(one, other) for one, other in zip(lowered(X), lowered.program(X), strict=True))


@register_pass
class CountKernels(Pass):
    """Say how many kernels there are."""

    name: ClassVar[str] = "test-count-kernels"
    needs: ClassVar[Stage] = Stage.PLACED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        return Outcome(False, (f"{len(program.graph.find_nodes(op='call_module'))} kernels",))


def test_a_pass_can_be_inserted_and_what_it_says_is_in_the_log(converted: Program) -> None:
    lowered = qc.lower(converted, "x86", pipeline=placing().after("merge-siblings", CountKernels()))
    notes = [note for entry in lowered.log for note in entry.notes]
    assert notes[:4] == [
        "3 of 3 ops on kernels of x86",
        "fused 1 relu",
        "merged 2 siblings: linear_1, linear_2",
        "2 kernels",
    ]
    assert lowered.log[0].name == "place-kernels{target=x86}"


def test_hooks_watch_all_passes(converted: Program) -> None:
    timing, guard = Timing(), Guard()
    qc.lower(converted, "x86", hooks=[Truth(), Verify(), guard, timing])
    assert [row.name for row in timing.rows] == [str(step) for step in placing()]
    assert "place-kernels" in guard.checked
    assert guard.skipped == []


def test_a_program_in_integer_form_skips_what_leads_there(converted: Program) -> None:
    integer = qc.lower(converted, "x86").program
    timing = Timing()
    lowered = qc.lower(integer, "x86", hooks=[timing])
    assert timing.rows[0].name == "eliminate-dead"
    assert all(torch.equal(one, other) for one, other in zip(lowered(X), qc.lower(converted, "x86")(X), strict=True))


def test_passes_that_need_kernels_are_refused_without(converted: Program) -> None:
    with pytest.raises(PipelineError, match="needs a program that is placed"):
        qc.lower(converted, "x86", pipeline=placing().without("place-kernels"))


def test_kernels_of_another_target_are_refused(converted: Program) -> None:
    with pytest.raises(QuantcError, match="places kernels of qnnpack"):
        qc.lower(converted, "x86", pipeline=qc.pipelines.lower("qnnpack"))


def test_what_was_left_out_stays_left_out_in_files_and_copies(converted: Program, tmp_path: Path) -> None:
    import copy

    lowered = qc.lower(converted, "x86", pipeline=placing().without("merge-siblings"))
    lowered.save(tmp_path / "net.qc")
    for again in (qc.load(tmp_path / "net.qc"), copy.deepcopy(lowered)):
        assert isinstance(again, qc.Lowered)
        assert [row.kernel for row in again.placed] == [row.kernel for row in lowered.placed]


# -- programs on kernels -----------------------------------------------------------------------------------------------


def placed(converted: Program) -> Program:
    return placing().run_on_copy(converted)


def test_a_placed_program_is_called_dumped_copied_and_verified(converted: Program) -> None:
    program, lowered = placed(converted), qc.lower(converted, "x86")
    assert program.stage is Stage.PLACED
    assert '{type="fbgemm linear for 2 layers' in program.dump()
    program.verify()
    for each in (program, program.clone()):
        assert all(torch.equal(one, other) for one, other in zip(each(X), lowered(X), strict=True))
    assert program.clone().dump() == program.dump()
    assert program.clone().placements.placed == program.placements.placed == lowered.placed


def test_a_placed_program_is_saved_as_a_lowered_module_alone(converted: Program, tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="it is on kernels") as caught:
        placed(converted).save(tmp_path / "net.qc")
    assert "qc.lower" in str(caught.value.advice)
    with pytest.raises(QuantcError, match="on kernels already"):
        qc.lower(placed(converted), "x86")


def test_a_second_run_changes_nothing(converted: Program) -> None:
    program = placed(converted)
    text, entries = program.dump(), len(program.log)
    Pipeline(placing().passes[4:]).run(program, [Truth()])
    assert not any(entry.changed for entry in program.log[entries:])
    assert program.dump() == text


# -- other targets -----------------------------------------------------------------------------------------------------


def test_the_passes_of_a_target_run_before_its_function(converted: Program) -> None:
    target = Target("testnpu", lambda program: program, pipeline="lower-integer,eliminate-dead")
    register_target(target)
    try:
        timing = Timing()
        made = qc.lower(converted, "testnpu", hooks=[timing])
        assert (made.stage, converted.stage) == (Stage.LOWERED, Stage.FOLDED)
        assert [row.name for row in timing.rows] == ["lower-integer", "eliminate-dead"]
        assert qc.lower(converted, "testnpu", pipeline="eliminate-dead").stage is Stage.FOLDED
        assert qc.lower(made, "testnpu").dump() == made.dump()
    finally:
        TARGETS.forget("testnpu")


class Seen(Hook):
    """The names of the passes that run."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def before(self, program: Program, pass_: Pass) -> None:
        self.names.append(pass_.name)


@pytest.mark.parametrize(
    ("backend", "target", "options"),
    [
        ("x86", "x86", {}),
        ("qnnpack", "qnnpack", {}),
        ("onnx", "onnx", {}),
        pytest.param("executorch", "executorch", {}, marks=pytest.mark.slow),
        ("x86", "x86", {"engine": "onnxruntime"}),
    ],
)
def test_every_target_takes_a_pipeline_as_text_or_as_one_and_one_hook(
    backend: str, target: str, options: dict[str, Any]
) -> None:
    program = qc.quantize(nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval(), (X,), [X], backend=backend).program
    with pytest.raises(PipelineError, match="3 is no pipeline"):
        qc.lower(program, target, pipeline=3, **options)
    own = Pipeline.parse(TARGETS["onnx" if options else target].pipeline)
    for given, names in (("eliminate-dead", ("eliminate-dead",)), (own, own.names), (None, own.names)):
        seen = Seen()
        qc.lower(program, target, pipeline=given, hooks=seen, **options)
        assert tuple(seen.names) == names
