"""The base class of passes: values with options, a text form, and what is refused when a class is defined."""

from __future__ import annotations

import types
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from quantc.errors import PipelineError
from quantc.ir.program import Stage
from quantc.pipeline.base_pass import Outcome, Pass, Preserves
from tests.support.by_hand import two_layers
from tests.support.staged_passes import Options, Step


def test_a_pass_is_frozen_compares_and_refuses_what_it_does_not_know() -> None:
    one = Options(count=1)
    assert one == Options(count=1) != Options(count=2)
    with pytest.raises(ValidationError, match="frozen"):
        setattr(one, "count", 2)  # noqa: B010 - the type checker knows it too
    with pytest.raises(ValidationError, match="Extra inputs"):
        Options.model_validate({"cuont": 1})
    assert hash(Step()) == hash(Step())


def define(**members: Any) -> type[Pass]:
    body = {"__module__": __name__, "run": lambda self, program: False, **members}
    annotations = dict.fromkeys(members, ClassVar[Any])
    made: type[Pass] = types.new_class(
        "Made", (Pass,), exec_body=lambda names: names.update(body, __annotations__=annotations)
    )
    return made


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


class Choosy(Step):
    """Chooses ops.

    The rest of the docstring is for the page of the pass.
    """

    name: ClassVar[str] = "test-choosy"

    only_ops: frozenset[str] = frozenset()
    at_most: int = 3


def test_the_text_has_the_options_that_are_not_defaults() -> None:
    assert str(Choosy()) == str(Choosy(at_most=3)) == "test-choosy"
    assert str(Choosy(at_most=4)) == "test-choosy{at-most=4}"
    assert str(Options(count=0, is_on=True)) == "test-options{is-on=true}"


def test_the_text_of_a_set_does_not_depend_on_its_order() -> None:
    names = [f"op{number}" for number in range(9)]
    texts = {str(Choosy(only_ops=frozenset(names[start:] + names[:start]))) for start in range(9)}
    (text,) = texts
    assert [text.index(name) for name in names] == sorted(text.index(name) for name in names)


def test_options_and_summary_are_what_the_reference_shows() -> None:
    assert Choosy.options() == ("only-ops", "at-most")
    assert Choosy.summary() == "Chooses ops."
    assert Step.options() == ()


def test_an_abstract_pass_needs_no_name() -> None:
    class Half(Pass):
        """Leaves `run` to its subclasses."""

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]
    with pytest.raises(PipelineError, match="kebab-case"):
        types.new_class("Whole", (Half,), exec_body=lambda names: names.update(run=lambda self, program: False))


def test_an_outcome_is_true_if_something_changed() -> None:
    assert Outcome(True)
    assert not Outcome(False, ("nothing to do",))


def test_a_pass_takes_nothing_from_a_config_and_leaves_nothing_whole_unless_it_says_so() -> None:
    step = Options(count=2)
    assert step.for_config({"count": 3}) == step
    assert step.left_whole(two_layers()) == {}
