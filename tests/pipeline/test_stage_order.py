"""The order of passes, checked by the stages that they need, give and must precede."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quantc.errors import PipelineError
from quantc.ir.program import Stage
from quantc.pipeline.pipeline import Pass, Pipeline
from quantc.pipeline.stage_order import check_order, check_start, first_needs
from tests.support.by_hand import two_layers
from tests.support.staged_passes import Join, Mark, Share, Step, Tidy, staged


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with staged():
        yield


def test_a_good_order_is_accepted_and_knows_what_it_needs() -> None:
    assert Pipeline((Tidy(), Join(), Mark(), Share())).needs is Stage.CAPTURED
    assert Pipeline((Join(), Mark(), Share())).needs is Stage.CANONICAL
    assert Pipeline((Share(),)).needs is Stage.ANNOTATED
    assert Pipeline().needs is Stage.CAPTURED


@pytest.mark.parametrize(
    ("passes", "first", "second", "fix"),
    [
        ((Join(), Tidy()), "test-join", "test-tidy", "put test-tidy before test-join"),
        ((Mark(), Join()), "test-join", "test-mark", "put test-join before test-mark"),
        ((Tidy(), Share(), Mark()), "test-share", "test-mark", "put test-mark before test-share"),
        ((Join(), Share()), "test-share", "test-join", "between test-join and test-share, run "),
    ],
)
def test_a_wrong_order_is_an_error_when_built(passes: tuple[Pass, ...], first: str, second: str, fix: str) -> None:
    with pytest.raises(PipelineError) as caught:
        Pipeline(passes)
    assert first in caught.value.what
    assert second in caught.value.what
    assert str(caught.value.advice).startswith(fix)
    with pytest.raises(PipelineError):
        Pipeline.parse(",".join(pass_.name for pass_ in passes))


def test_a_program_at_the_wrong_stage_is_refused_before_anything_runs() -> None:
    program = two_layers(stage=Stage.CAPTURED)
    with pytest.raises(
        PipelineError, match="test-mark needs a program that is canonical, but program is only"
    ) as early:
        Pipeline((Step(), Mark())).run(program)
    assert "test-tidy" in str(early.value.advice)
    program.stage = Stage.ANNOTATED
    with pytest.raises(PipelineError, match="is already annotated") as late:
        Pipeline((Step(), Join())).run(program)
    assert "without('test-join')" in str(late.value)
    assert program.log == []


def test_only_passes_whose_stage_nobody_gives_need_it_of_the_program() -> None:
    assert [pass_.name for pass_ in first_needs((Join(), Mark(), Share()))] == ["test-join"]
    assert [pass_.name for pass_ in first_needs((Tidy(), Mark(), Step(), Tidy(), Share()))] == []
    assert [pass_.name for pass_ in first_needs((Tidy(), Share(), Mark(), Share()))] == ["test-share"]


def test_a_pass_that_gives_more_than_is_needed_is_enough() -> None:
    """Share needs an annotated program and leaves a shared one: what needs the earlier stages may follow it."""
    check_order((Tidy(), Mark(), Share(), Mark()))
    with pytest.raises(PipelineError, match="test-join must run before a program is annotated, but test-share"):
        check_order((Share(), Join()))


def test_a_program_further_on_than_needed_is_accepted() -> None:
    check_start((Mark(), Share()), two_layers(stage=Stage.CANONICAL))
    check_start((Mark(), Share()), two_layers(stage=Stage.SHARED))
    check_start((Join(),), two_layers(stage=Stage.FUSED))
    with pytest.raises(PipelineError, match="test-share needs a program that is annotated"):
        check_start((Share(),), two_layers(stage=Stage.FUSED))


def test_the_advice_names_every_pass_that_gives_the_stage() -> None:
    with pytest.raises(PipelineError) as caught:
        check_start((Share(),), two_layers(stage=Stage.FUSED))
    told = str(caught.value.advice)
    assert "annotate" in told.replace(",", " ").split()
    assert "test-mark" in told
    assert "test-tidy" not in told
