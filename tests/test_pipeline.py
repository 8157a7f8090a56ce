"""Passes and pipelines as values: text form, order, running, finding them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantc import pipelines
from quantc.errors import ParseError, PassError, PipelineError, PluginError
from quantc.pipeline import Hook, Outcome, Pass, Pipeline, Preserves
from quantc.pipeline_text import Value, read, spell
from quantc.program import Program, Stage
from quantc.registry import PASSES, PIPELINES, register_pass, register_pipeline
from tests.by_hand import two_layers


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
    """Does nothing; its subclasses stand at different stages."""

    name: ClassVar[str] = "test-step"
    needs: ClassVar[Stage] = Stage.CAPTURED

    def run(self, program: Program) -> bool:
        return False


class Tidy(Step):
    name: ClassVar[str] = "test-tidy"
    gives: ClassVar[Stage | None] = Stage.CANONICAL


class Join(Step):
    name: ClassVar[str] = "test-join"
    needs: ClassVar[Stage] = Stage.CANONICAL
    before: ClassVar[Stage | None] = Stage.ANNOTATED
    gives: ClassVar[Stage | None] = Stage.FUSED


class Mark(Step):
    name: ClassVar[str] = "test-mark"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage | None] = Stage.ANNOTATED


class Share(Step):
    name: ClassVar[str] = "test-share"
    needs: ClassVar[Stage] = Stage.ANNOTATED
    gives: ClassVar[Stage | None] = Stage.SHARED


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    kinds: tuple[type[Pass], ...] = (Options, Step, Tidy, Join, Mark, Share)
    for kind in kinds:
        register_pass(kind)
    yield
    PASSES.session.clear()
    PIPELINES.session.clear()


# -- text form ------------------------------------------------------------------------------------------------

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


values: st.SearchStrategy[Value] = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
)


@given(values)
def test_any_value_reads_back_with_its_type(value: Value) -> None:
    (call,) = read(f"a{{x={spell(value)}}}")
    assert repr(call.options[0].value) == repr(value)


@given(st.text(alphabet='ab1-_.,={}[]" \\\n', max_size=30))
def test_any_text_reads_or_is_refused_with_its_place(text: str) -> None:
    faults: list[ParseError] = []
    try:
        read(text)
    except ParseError as error:
        faults.append(error)
    for fault in faults:
        assert 1 <= fault.line <= text.count("\n") + 1
        assert 1 <= fault.column <= max(len(row) for row in text.split("\n")) + 1
        assert fault.advice


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
    with pytest.raises(PipelineError, match="no pass or pipeline 'test-stp'") as caught:
        Pipeline.parse("test-tidy,test-stp")
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


# -- passes as values -----------------------------------------------------------------------------------------


def test_a_pass_is_frozen_compares_and_refuses_what_it_does_not_know() -> None:
    one = Options(count=1)
    assert one == Options(count=1) != Options(count=2)
    with pytest.raises(ValidationError, match="frozen"):
        one.count = 2
    with pytest.raises(ValidationError, match="Extra inputs"):
        Options.model_validate({"cuont": 1})
    assert hash(Step()) == hash(Step())


def define(**members: Any) -> type[Pass]:
    body = {"__module__": __name__, "run": lambda self, program: False, **members}
    annotations = dict.fromkeys(members, ClassVar[Any])
    return type(Pass)("Made", (Pass,), {**body, "__annotations__": annotations})


@pytest.mark.parametrize("name", ["Fuse", "fold_constants", "", "fold--it", "-a", 3])
def test_a_pass_without_a_proper_name_is_refused_when_defined(name: object) -> None:
    with pytest.raises(PipelineError, match="kebab-case"):
        define(name=name)


def test_a_pass_that_can_never_run_is_refused_when_defined() -> None:
    with pytest.raises(PipelineError, match="can never run"):
        define(name="never", needs=Stage.FUSED, before=Stage.FUSED)


def test_defaults_are_the_strict_ones() -> None:
    assert define(name="plain").preserves is Preserves.EXACTLY
    assert define(name="plain").needs is Stage.CANONICAL


# -- order ----------------------------------------------------------------------------------------------------


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
    assert pipeline.names == ("canonicalize", "strip-dropout", "fold-constants", "fuse", "eliminate-dead")
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
