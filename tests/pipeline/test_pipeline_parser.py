"""The text form of pipelines: it reads back, and what does not read is told with its place."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from quantc.errors import ParseError, PipelineError
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Pass, Pipeline
from quantc.pipeline.registry import PASSES, register_pass


class Colour(Enum):
    RED = "red"
    ODD = "not a word, this"
    TWO = 2


class Shape(BaseModel):
    model_config = ConfigDict(frozen=True)

    width: int = 1
    label: str | None = None


class Options(Pass):
    """A pass with an option of every kind."""

    name: ClassVar[str] = "test-options"
    needs: ClassVar[Stage] = Stage.CAPTURED

    text: str = ""
    count: int = 0
    share: float = 0.5
    is_on: bool = False
    colour: Colour = Colour.RED
    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] = ("a", "b")
    deep: tuple[tuple[float | None, ...] | None, ...] | None = None
    either: int | str | float | None = None
    marks: frozenset[str] = frozenset()
    shape: Shape = Shape()
    table: dict[str, int] = Field(default_factory=dict)

    def run(self, program: Program) -> bool:
        return False


class Step(Pass):
    """Has no options and does nothing."""

    name: ClassVar[str] = "test-step"
    needs: ClassVar[Stage] = Stage.CAPTURED

    def run(self, program: Program) -> bool:
        return False


@pytest.fixture(autouse=True, scope="module")
def known() -> Iterator[None]:
    register_pass(Options)
    register_pass(Step)
    yield
    PASSES.session.clear()


texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["none", "true", "1", "-1e5", "nan", "inf", 'a"b', "a\\", "a,b", "{}", "[", "x=y", " ", "\n", "é", "layer1.*", "-"]
)
floats = st.floats(allow_nan=False)
options = st.builds(
    Options,
    text=texts,
    count=st.integers(),
    share=floats,
    is_on=st.booleans(),
    colour=st.sampled_from(Colour),
    sizes=st.lists(st.integers(), max_size=4).map(tuple),
    names=st.lists(texts, max_size=4).map(tuple),
    deep=st.none() | st.lists(st.none() | st.lists(st.none() | floats, max_size=3).map(tuple), max_size=3).map(tuple),
    either=st.none() | st.integers() | texts | floats,
    marks=st.frozensets(texts, max_size=3),
    shape=st.builds(Shape, width=st.integers(), label=st.none() | texts),
    table=st.dictionaries(texts, st.integers(), max_size=3),
)


@given(st.lists(options | st.builds(Step), max_size=3))
def test_a_pipeline_reads_back_from_its_text(passes: list[Pass]) -> None:
    pipeline = Pipeline(tuple(passes))
    text = str(pipeline)
    assert "\n" not in text
    again = Pipeline.parse(text)
    assert again == pipeline
    assert str(again) == text


def test_the_text_leaves_defaults_out_and_writes_dashes() -> None:
    assert str(Options()) == "test-options"
    assert str(Options(is_on=True, sizes=(2, 3))) == "test-options{is-on=true sizes=2,3}"
    assert str(Options(sizes=(2,), names=())) == "test-options{sizes=[2] names=[]}"
    assert str(Options(text="quoted, text")) == 'test-options{text="quoted, text"}'
    assert str(Options(shape=Shape(width=3))) == "test-options{shape={width=3 label=none}}"
    assert str(Options(marks=frozenset({"c", "a", "b"}))) == "test-options{marks=a,b,c}"


def test_spaces_lines_and_underscores_are_accepted() -> None:
    spread = Pipeline.parse(" test-step ,\n test-options{ is_on = true  sizes = 2 , 3 } ")
    assert spread == Pipeline((Step(), Options(is_on=True, sizes=(2, 3))))


def test_the_empty_text_is_the_empty_pipeline() -> None:
    assert Pipeline.parse("") == Pipeline() == Pipeline.parse(" ")
    assert str(Pipeline()) == ""


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("test-step,", 11, "the name of a pass, found the end"),
        (",test-step", 1, "the name of a pass, found ','"),
        ("test-step test-step", 11, "expected ','"),
        ("test-step}", 10, "expected ','"),
        ("test-options{", 13, "never closed"),
        ("test-options{count}", 19, "expected '='"),
        ("test-options{count=}", 20, "a value, found '}'"),
        ("test-options{=1}", 14, "the name of an option"),
        ("test-options{count=1 count=2}", 22, "given twice"),
        ("test-options{sizes=1, count=2}", 28, "found '='"),
        ("test-options{sizes=[1}", 22, "between the items of a list"),
        ("test-options{sizes=[1", 20, "never closed"),
        ('test-options{text="a}', 19, "does not read"),
        ('test-options{text="\\q"}', 19, "does not read"),
        ("test-options{text=é}", 19, "a value, found 'é'"),
        (f"test-options{{count={'9' * 5000}}}", 20, "too long"),
    ],
)
def test_bad_text_is_a_parse_error_that_points_at_the_place(text: str, column: int, says: str) -> None:
    with pytest.raises(ParseError, match=says) as caught:
        Pipeline.parse(text)
    assert (caught.value.line, caught.value.column) == (1, column)
    shown = str(caught.value).splitlines()
    caret = next(index for index, line in enumerate(shown) if line.strip() == "^")
    assert shown[caret - 1] == f"    {text}"
    assert shown[caret].index("^") - 4 == column - 1


def test_a_fault_on_a_later_line_is_shown_there() -> None:
    with pytest.raises(ParseError) as caught:
        Pipeline.parse("test-step,\n  test-options{count=?}")
    assert (caught.value.line, caught.value.column) == (2, 22)
    with pytest.raises(ParseError) as caught:
        Pipeline.parse("test-step\n}")
    assert (caught.value.line, caught.value.column) == (2, 1)


def test_an_unknown_pass_lists_the_known_and_suggests() -> None:
    with pytest.raises(PipelineError, match="unknown pass or pipeline 'test-stp'") as caught:
        Pipeline.parse("test-step,test-stp")
    assert "did you mean test-step" in str(caught.value)
    assert "eliminate-dead" in str(caught.value)
    assert "column 11" in str(caught.value)


def test_an_unknown_option_lists_given_and_expected() -> None:
    with pytest.raises(PipelineError) as caught:
        Pipeline.parse("test-options{count=1 is-onn=true}")
    assert "given: count, is-onn" in str(caught.value)
    assert "expected: text, count, share, is-on" in str(caught.value)
    assert "did you mean is-on" in str(caught.value)
    with pytest.raises(PipelineError, match="takes no options"):
        Pipeline.parse("test-step{a=1}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("test-options{count=abc}", "does not take count=abc: Input should be a valid integer"),
        ("test-options{colour=blue}", "Input should be 'red'"),
        ("test-options{sizes=1,x}", "does not take sizes=1,x"),
        ("test-options{text=1}", 'write text="..." if it is text'),
        ("test-options{is-on=true is_on=false}", "twice"),
        ("test-options{shape={width=x}}", "does not take shape={width=x}"),
    ],
)
def test_a_bad_value_is_our_error_and_points_at_it(text: str, says: str) -> None:
    with pytest.raises(PipelineError, match="column") as caught:
        Pipeline.parse(text)
    assert says in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_a_required_option_is_asked_for() -> None:
    @register_pass
    class Needy(Step):
        name: ClassVar[str] = "test-needy"
        backend: str

    with pytest.raises(PipelineError, match="cannot be built: backend: Field required") as caught:
        Pipeline.parse("test-needy")
    assert "test-needy{backend=...}" in str(caught.value)
    assert str(Needy(backend="x86")) == "test-needy{backend=x86}"
