"""Errors: what is wrong, where, and what to do about it."""

from __future__ import annotations

import inspect

import pytest

from quantc import errors
from quantc.errors import (
    ConfigError,
    ConformanceError,
    MissingDependencyError,
    MixedTensorsError,
    ParseError,
    QuantcError,
    RefusedError,
    UnknownNameError,
    VerifyError,
    suggest,
)

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]


def test_an_error_says_what_where_and_what_to_do() -> None:
    error = QuantcError("it broke", where="layer.2", advice="mend it")
    assert str(error) == "it broke\n  where: layer.2\n  what to do: mend it"
    assert (error.what, error.where, error.advice) == ("it broke", "layer.2", "mend it")
    assert str(QuantcError("it broke")) == "it broke"
    assert str(QuantcError("it broke", advice="mend it")) == "it broke\n  what to do: mend it"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_caught_as_one_of_quantc_and_says_what_it_is(kind: type[Exception]) -> None:
    assert issubclass(kind, QuantcError)
    assert kind.__doc__


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        (UnknownNameError, LookupError),
        (MissingDependencyError, ImportError),
        (MixedTensorsError, RuntimeError),
        (ConfigError, RefusedError),
    ],
)
def test_errors_are_also_what_python_calls_them(kind: type[QuantcError], other: type[Exception]) -> None:
    with pytest.raises(other, match="here"):
        raise kind("here")


def test_every_fault_and_every_failure_is_listed() -> None:
    for error in (
        VerifyError("broken", ["one", "two"], where="x"),
        ConformanceError("broken", ["one", "two"], where="x"),
    ):
        assert str(error) == "broken\n  where: x\n  - one\n  - two"


def test_a_place_in_a_text_is_pointed_at() -> None:
    error = ParseError("no such op", text="first line\nsecond line\n", line=2, column=8, advice="look it up")
    assert str(error).splitlines() == [
        "no such op",
        "  where: line 2, column 8",
        "    second line",
        "           ^",
        "  what to do: look it up",
    ]
    assert (error.line, error.column) == (2, 8)


@pytest.mark.parametrize("line", [0, 3, 99])
def test_a_place_beyond_the_text_is_named_alone(line: int) -> None:
    assert ParseError("at an end", text="one\ntwo", line=line).where == f"line {line}, column 1"


def test_a_file_may_stand_for_the_place() -> None:
    assert ParseError("no", text="abc", column=3, where="net.txt").where == "net.txt\n    abc\n      ^"


def test_the_closest_names_come_first_and_all_are_listed() -> None:
    assert (
        suggest("anotate", ["share", "annotate"], noun="passes")
        == "did you mean annotate? Known passes: annotate, share"
    )
    assert suggest("zzz", ["b", "a"]) == "known names: a, b"
    assert suggest("zzz", []) == "known names: none"


def test_names_are_compared_without_case_and_shown_as_they_are() -> None:
    assert suggest("INT8", ["int8", "Int16"]).startswith("did you mean int8 or Int16?")
    assert suggest("linear", ["Linear"]) == "did you mean Linear? Known names: Linear"
