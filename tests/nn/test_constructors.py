"""Constructors: classes with some of their arguments given."""

from __future__ import annotations

import torch

import quantc.nn.observers as own_observers


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
