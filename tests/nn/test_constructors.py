"""Constructors: classes with some of their arguments given."""

from __future__ import annotations

from typing import Any

import torch

import quantc.nn.observers as own_observers
from quantc.nn.constructors import Constructible


def test_constructors_compare_and_print_and_later_arguments_win() -> None:
    make = own_observers.MinMaxObserver.with_args
    assert make(dtype=torch.qint8) == make(dtype=torch.qint8)
    assert make(dtype=torch.qint8) != make(dtype=torch.quint8)
    assert len({make(dtype=torch.qint8), make(dtype=torch.qint8)}) == 1
    assert make(quant_min=0).with_args(quant_max=15, dtype=torch.quint8)().quant_max == 15
    assert repr(make(dtype=torch.qint8)) == "MinMaxObserver(dtype=torch.qint8)"
    counted = iter(range(10))
    later = own_observers.RecordingObserver.with_callable_args(dtype=lambda: next(counted))
    assert [later().dtype, later().dtype] == [0, 1]


class Made(Constructible):
    def __init__(self, *args: Any, **keywords: Any) -> None:
        self.args, self.keywords = args, keywords


def test_arguments_given_at_the_call_win_over_those_made_for_it() -> None:
    make = Made.with_args(a=1, b=2).with_callable_args(c=list)
    assert make(b=3).keywords == {"a": 1, "b": 3, "c": []}
    assert make(c=5).keywords == {"a": 1, "b": 2, "c": 5}
    assert make("first").args == ("first",)
    assert make().keywords["c"] is not make().keywords["c"]


def test_more_arguments_make_another_constructor() -> None:
    one = Made.with_args(a=1)
    other = one.with_args(a=2).with_callable_args(b=dict)
    assert one().keywords == {"a": 1}
    assert other().keywords == {"a": 2, "b": {}}
    assert other.with_args(c=3)().keywords == {"a": 2, "b": {}, "c": 3}
    assert one != other
    assert other != Made.with_args(a=2)
    assert repr(other) == "Made(a=2, b=dict())"


def test_a_constructor_equals_nothing_but_constructors() -> None:
    assert Made.with_args() != Made
    assert Made.with_args(a=1).p.keywords == {"a": 1}
