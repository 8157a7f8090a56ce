"""Validated values: frozen, comparable, and refused with the field at fault."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from pydantic import Field, StrictInt, TypeAdapter, ValidationError

from quantc.errors import ConfigError, SpecError
from quantc.support.validated import MAX_SHOWN, Frozen, faults_of


class Range(Frozen, frozen=True):
    noun: ClassVar[str] = "range"

    low: StrictInt = 0
    high: StrictInt = Field(default_factory=lambda known: known["low"] + 1)

    def why_not(self) -> str | None:
        return None if self.low < self.high else "low: it must be below high"


class Setting(Range, frozen=True):
    noun: ClassVar[str] = "setting"
    fault = ConfigError


def test_values_are_compared_hashed_and_not_changed() -> None:
    assert Range(low=2) == Range(low=2, high=3)
    assert len({Range(low=2), Range(low=2, high=3), Range()}) == 2
    with pytest.raises(ValidationError, match="frozen"):
        Range().low = 3  # type: ignore[misc]


def test_every_faulty_field_is_named_with_what_was_given() -> None:
    with pytest.raises(SpecError) as caught:
        Range.model_validate({"low": "2", "high": 1.5, "middle": 3})
    assert "range" in caught.value.what
    for told in ("low: Input should be a valid integer (given: '2')", "high: ", "(given: 1.5)", "middle: "):
        assert told in caught.value.what
    assert caught.value.advice is not None
    assert "low, high" in caught.value.advice


def test_a_default_that_follows_from_a_faulty_field_is_no_fault_of_its_own() -> None:
    with pytest.raises(SpecError) as caught:
        Range.model_validate({"low": None})
    assert "high" not in caught.value.what


def test_fields_that_do_not_go_together_are_refused_in_the_same_way() -> None:
    with pytest.raises(SpecError, match="low: it must be below high"):
        Range(low=3, high=3)


def test_a_class_chooses_its_error() -> None:
    with pytest.raises(ConfigError, match="setting"):
        Setting(low=3, high=3)


def test_a_value_that_was_checked_is_taken_as_it_is() -> None:
    unchecked = Range.model_construct(low=5, high=1)
    assert Range.model_validate(unchecked) is unchecked


def test_long_values_are_cut_and_fields_inside_fields_have_a_path() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(dict[str, list[int]])
    with pytest.raises(ValidationError) as caught:
        adapter.validate_python({"sizes": [1, "x" * 500]})
    (line,) = faults_of(caught.value)
    assert line.startswith("sizes.1: ")
    assert line.endswith("…)")
    assert len(line) < MAX_SHOWN + 150
