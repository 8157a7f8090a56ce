"""Choices of the commands are those of the functions behind them."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, get_args

import pytest

from quantc.cli.options import CaptureMethod, Guarding, Narrowed, QuantizedForm, Technique
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.verbs.capture import METHODS, Method
from quantc.verbs.convert import FORMS, Form
from quantc.verbs.quantize_model import MODES, Mode


@pytest.mark.parametrize(
    ("choice", "known", "literal"),
    [
        (CaptureMethod, METHODS, Method),
        (QuantizedForm, FORMS, Form),
        (Technique, MODES, Mode),
        (Narrowed, get_args(RangeReduction), RangeReduction),
    ],
)
def test_a_choice_offers_what_the_function_takes(choice: type[StrEnum], known: tuple[str, ...], literal: Any) -> None:
    assert [item.value for item in choice] == list(known)
    assert set(known) == set(get_args(literal))


def test_what_is_chosen_unasked_comes_first() -> None:
    assert [next(iter(choice)).value for choice in (CaptureMethod, QuantizedForm, Technique, Guarding, Narrowed)] == [
        "auto",
        "qdq",
        "static",
        "auto",
        "auto",
    ]
