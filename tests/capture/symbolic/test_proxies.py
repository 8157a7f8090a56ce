"""Traced values: they answer what shapes decide, and refuse what only data could."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantc.capture.export.dimensions import DynamicDim
from quantc.capture.refused_trace import RefusedError
from tests.support.symbolic_traces import traced

X = torch.arange(6.0).reshape(2, 3)
ROWS = {(0, 0): DynamicDim("rows", 2, None)}


def asked(question: Callable[[Any], Any], *, marks: Any = None, examples: bool = True) -> Any:
    """What a traced tensor answers."""
    found: list[Any] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        found.append(question(x))
        return x + 0

    traced(forward, *([X] if examples else []), marks=marks)
    return found[0]


def test_known_sizes_are_plain_numbers() -> None:
    assert asked(lambda x: (len(x), x.shape[1], x.size(0) * 2)) == (2, 3, 4)
    assert asked(lambda x: type(x.shape[0])) is int
    assert asked(lambda x: [row.shape for row in x]) == [(3,), (3,)]


@pytest.mark.parametrize("convert", [int, float, bool, range], ids=lambda kind: str(kind.__name__))
def test_data_is_no_python_number(convert: Callable[[Any], Any]) -> None:
    with pytest.raises(RefusedError, match=r"data|value") as caught:
        asked(lambda x: convert(x.sum()))
    assert "sum" in str(caught.value)


def test_an_open_size_is_no_python_number_either() -> None:
    converts: tuple[Callable[[Any], Any], ...] = (int, float, range)
    for convert in converts:
        with pytest.raises(RefusedError, match="dynamic size"):
            asked(lambda x: convert(x.shape[0]), marks=ROWS)  # noqa: B023 - asked at once


def test_lengths_that_are_not_known_are_refused() -> None:
    for marks, examples in ((ROWS, True), (None, False)):
        with pytest.raises(RefusedError, match="length"):
            asked(len, marks=marks, examples=examples)


@pytest.mark.parametrize("name", ["data", "real", "imag"])
def test_memory_is_not_assigned(name: str) -> None:
    with pytest.raises(RefusedError, match=f"{name}"):
        asked(lambda x: setattr(x, name, torch.ones(2, 3)))


def test_other_attributes_may_be_set_by_the_model() -> None:
    def mark(x: Any) -> Any:
        x.note = "mine"
        return x.note

    assert asked(mark) == "mine"


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "add": lambda y: y.__iadd__(2),
    "sub": lambda y: y.__isub__(2),
    "mul": lambda y: y.__imul__(3),
    "div": lambda y: y.__itruediv__(4),
    "floor_divide": lambda y: y.__ifloordiv__(2),
    "remainder": lambda y: y.__imod__(2),
    "pow": lambda y: y.__ipow__(2),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_operators_in_place_write_to_the_tensor_under_all_its_names(name: str) -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        other = y
        y = IN_PLACE[name](y)
        return y, other

    trace = traced(forward, X)
    assert trace.names[1].startswith(f"{name}_")
    for found, expected in zip(trace(X), forward(None, X), strict=True):
        assert torch.equal(found, expected)


def test_bits_in_place() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        mask = x > 1
        mask &= x < 4
        mask |= x == 5
        return mask

    assert torch.equal(traced(forward, X)(X), forward(None, X))


def test_values_can_be_keys_and_are_told_apart() -> None:
    def keep(x: Any) -> int:
        y = x + 0
        return len({x: 1, y: 2, x * 1: 3})

    assert asked(keep) == 3


def test_facts_of_a_value_that_may_be_anything_are_those_of_a_tensor() -> None:
    trace = traced(lambda s, x: x.reshape(x.shape[0], -1).sum(x.dim() - 1))
    assert torch.equal(trace(X), X.sum(1))
