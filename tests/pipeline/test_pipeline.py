"""Pipelines as values: others made from one, named ones, and running them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from quantc import pipelines
from quantc.errors import PassError, PipelineError, PluginError
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Hook, Outcome, Pass, Pipeline
from quantc.pipeline.registry import register_pipeline
from tests.support.by_hand import two_layers
from tests.support.staged_passes import Join, Mark, Options, Share, Step, Tidy, staged


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with staged():
        yield


# -- other pipelines from one ---------------------------------------------------------------------------------


def test_pipelines_are_changed_into_new_ones() -> None:
    base = Pipeline((Tidy(), Join(), Mark()))
    assert base.without("test-join").names == ("test-tidy", "test-mark")
    assert base.then(Share()).names[-1] == "test-share"
    assert base.then(Pipeline((Share(), Step()))).names[-2:] == ("test-share", "test-step")
    assert base.before("test-join", Step()).names == ("test-tidy", "test-step", "test-join", "test-mark")
    assert base.after("test-join", Step()).names == ("test-tidy", "test-join", "test-step", "test-mark")
    assert base.replace("test-join", Step(), Step()).names == ("test-tidy", "test-step", "test-step", "test-mark")
    assert base.names == ("test-tidy", "test-join", "test-mark")
    twice = Pipeline((Step(), Tidy(), Step()))
    assert twice.before("test-step", Options()).names[0] == "test-options"
    assert twice.after("test-step", Options()).names[-1] == "test-options"
    assert twice.without("test-step").names == ("test-tidy",)


@pytest.mark.parametrize(
    "change",
    [
        lambda pipeline: pipeline.without("test-jion"),
        lambda pipeline: pipeline.before("test-jion", Step()),
        lambda pipeline: pipeline.after("test-jion", Step()),
        lambda pipeline: pipeline.replace("test-jion", Step()),
    ],
)
def test_a_name_that_is_not_there_is_an_error(change: Callable[[Pipeline], Pipeline]) -> None:
    with pytest.raises(PipelineError, match="did you mean test-join"):
        change(Pipeline((Tidy(), Join())))


def test_a_change_that_breaks_the_order_is_refused() -> None:
    with pytest.raises(PipelineError, match="comes after"):
        Pipeline((Tidy(), Mark())).before("test-tidy", Join())


# -- named pipelines ------------------------------------------------------------------------------------------


def test_named_pipelines_expand_with_their_options() -> None:
    def test_both(count: int = 1, is_on: bool = False) -> Pipeline:
        return Pipeline((Step(), Options(count=count, is_on=is_on)))

    register_pipeline(test_both)
    parsed = Pipeline.parse("test-tidy,test-both{count=4 is-on=true},test-step")
    assert str(parsed) == "test-tidy,test-step,test-options{count=4 is-on=true},test-step"
    with pytest.raises(PipelineError, match="expected: count, is-on"):
        Pipeline.parse("test-both{cuont=1}")
    with pytest.raises(PipelineError, match="does not take count=x"):
        Pipeline.parse("test-both{count=x}")


def test_a_pipeline_that_uses_itself_is_named() -> None:
    register_pipeline(lambda: Pipeline.parse("test-pong"), name="test-ping")
    register_pipeline(lambda: Pipeline.parse("test-step,test-ping"), name="test-pong")
    with pytest.raises(PipelineError, match="test-ping uses test-pong uses test-ping"):
        Pipeline.parse("test-ping")


def test_a_named_pipeline_must_give_a_pipeline() -> None:
    wrong: Any = lambda: "test-step"  # noqa: E731
    register_pipeline(wrong, name="test-wrong")
    with pytest.raises(PluginError, match="gives a str"):
        Pipeline.parse("test-wrong")


def test_a_name_for_both_a_pass_and_a_pipeline_is_refused() -> None:
    register_pipeline(Pipeline, name="test-step")
    with pytest.raises(PluginError, match=r"name of a pass .* and of a pipeline"):
        Pipeline.parse("test-step")


def test_inference_is_a_value_and_a_name() -> None:
    pipeline = pipelines.inference()
    passes = (
        "sink-constants",
        "canonicalize",
        "strip-dropout",
        "fold-constants",
        "fuse-activations",
        "fuse",
        "eliminate-dead",
    )
    assert pipeline.names == passes
    assert Pipeline.parse("inference") == pipeline
    assert "fuse" not in pipeline.without("fuse").names


# -- running --------------------------------------------------------------------------------------------------


class Noisy(Step):
    """Says that it changed something, and why."""

    name: ClassVar[str] = "test-noisy"

    def run(self, program: Program) -> Outcome:  # type: ignore[override]
        return Outcome(True, ("renamed nothing",))


class Broken(Step):
    """Raises at a node."""

    name: ClassVar[str] = "test-broken"

    def run(self, program: Program) -> bool:
        for node in program.graph.nodes:
            if node.name == "relu":
                self.look_up(node.args)
        return False

    def look_up(self, args: tuple[object, ...]) -> object:
        return args[7]


class Calls(Hook):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def before(self, program: Program, pass_: Pass) -> None:
        self.seen.append(f"before {pass_.name}")

    def after(self, program: Program, pass_: Pass, changed: bool) -> None:
        self.seen.append(f"after {pass_.name} {changed} {program.stage.label} {len(program.log)}")

    def failed(self, program: Program, pass_: Pass, error: PassError) -> None:
        self.seen.append(f"failed {pass_.name} {type(error.__cause__).__name__}")


def test_a_run_changes_the_program_logs_and_moves_the_stage() -> None:
    program = two_layers(stage=Stage.CAPTURED)
    calls = Calls()
    assert Pipeline((Options(count=2), Tidy(), Noisy())).run(program, [calls]) is program
    assert [(entry.name, entry.changed, entry.notes) for entry in program.log] == [
        ("test-options{count=2}", False, ()),
        ("test-tidy", False, ()),
        ("test-noisy", True, ("renamed nothing",)),
    ]
    assert all(entry.seconds >= 0 for entry in program.log)
    assert program.stage is Stage.CANONICAL
    assert calls.seen == [
        "before test-options",
        "after test-options False captured 1",
        "before test-tidy",
        "after test-tidy False canonical 2",
        "before test-noisy",
        "after test-noisy True canonical 3",
    ]


def test_a_stage_never_goes_back() -> None:
    program = two_layers(stage=Stage.ANNOTATED)
    Pipeline((Tidy(),)).run(program)
    assert program.stage is Stage.ANNOTATED


def test_run_on_copy_leaves_the_program_alone() -> None:
    program = two_layers(stage=Stage.CAPTURED)
    twin = Pipeline((Tidy(),)).run_on_copy(program)
    assert twin is not program
    assert (program.log, program.stage) == ([], Stage.CAPTURED)
    assert twin.stage is Stage.CANONICAL


def test_an_exception_names_pass_predecessors_and_node() -> None:
    program = two_layers()
    calls = Calls()
    with pytest.raises(PassError, match="pass test-broken failed: IndexError") as caught:
        Pipeline((Step(), Options(count=1), Broken())).run(program, [calls])
    assert isinstance(caught.value.__cause__, IndexError)
    assert "pass 3 of 3" in str(caught.value.where)
    assert "ran before it: test-step, test-options{count=1}" in str(caught.value.where)
    assert "at node relu" in str(caught.value.where)
    assert calls.seen[-1] == "failed test-broken IndexError"
    assert len(program.log) == 2


def test_a_hook_that_fails_while_telling_of_a_failure_does_not_hide_it() -> None:
    class Clumsy(Hook):
        def failed(self, program: Program, pass_: Pass, error: PassError) -> None:
            raise OSError("disk full")

    calls = Calls()
    with pytest.raises(PassError, match="test-broken failed") as caught:
        Pipeline((Broken(),)).run(two_layers(), [Clumsy(), calls])
    assert caught.value.__notes__ == ["the hook Clumsy failed too: OSError: disk full"]
    assert calls.seen[-1].startswith("failed")
