"""Inputs of a trace: placeholders by name, fakes with the sizes that are open, and limits that a model assumes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.capture.assemble import SymbolNames
from quantc.capture.export.dimensions import DynamicDim
from quantc.capture.symbolic.trace_inputs import TracedInputs
from quantc.errors import CaptureError
from tests.support.symbolic_traces import Trace, traced

X = torch.ones(4, 3)


def marks(low: int = 0, high: int | None = None, *, is_required: bool = True, name: str | None = "rows") -> Any:
    return {(0, 0): DynamicDim(name, low, high, is_required)}


def rows(forward: Any, **options: Any) -> Trace:
    return traced(forward, X, marks=marks(**options))


class Net(nn.Module):
    def forward(self, x: Tensor, pair: Any, *, flag: bool = True, mask: Any = None) -> Tensor:
        return x + pair[0] * pair[1]["k"] if flag else x


def test_each_flat_input_is_a_placeholder_by_its_name_and_numbers_are_themselves() -> None:
    trace = traced(lambda s, x, pair, flag: x + pair[0] * pair[1]["k"] if flag else x, X, (X, {"k": X}), True)
    placeholders = [node.name for node in trace.graph.find_nodes(op="placeholder")]
    assert len(placeholders) == 4
    assert placeholders[0] == "x"
    assert placeholders[3] == "flag"
    assert trace.names == ["mul.Tensor", "add.Tensor"]  # the flag has decided
    assert [type(leaf).__name__ for leaf in trace.inputs.leaves] == ["FakeTensor"] * 3 + ["bool"]


def test_without_examples_the_inputs_are_the_parameters_without_a_default() -> None:
    found = TracedInputs(Net(), None, {}, None, {})
    assert found.names == ["x", "pair"]

    class Star(nn.Module):
        def forward(self, *xs: Tensor) -> Tensor:
            return xs[0]

    with pytest.raises(CaptureError, match=r"\*xs"):
        TracedInputs(Star(), None, {}, None, {})


def test_a_size_that_the_model_fixes_is_refused_if_it_had_to_be_open() -> None:
    fixing = rows(lambda s, x: x.reshape(2, 6))
    with pytest.raises(CaptureError, match="dimension 0 of input 'x'") as caught:
        fixing.inputs.check_still_dynamic()
    assert "rows" in caught.value.what
    rows(lambda s, x: x + 1).inputs.check_still_dynamic()
    rows(lambda s, x: x.reshape(2, 6), is_required=False).inputs.check_still_dynamic()


def test_limits_that_a_trace_assumed_are_found_with_a_size_beyond() -> None:
    def limited(self: Any, x: Tensor) -> Tensor:
        torch._check(x.shape[0] >= 3)  # type: ignore[no-untyped-call]
        return x + 1

    (narrowing,) = rows(limited, low=1).inputs.narrowings()
    assert narrowing.beyond == {(0, 0): 2}
    assert "at least 3" in narrowing.reason
    assert list(rows(limited, low=3).inputs.narrowings()) == []  # the user has said so

    def capped(self: Any, x: Tensor) -> Tensor:
        torch._check(x.shape[0] <= 9)  # type: ignore[no-untyped-call]
        return x + 1

    (narrowing,) = rows(capped).inputs.narrowings()
    assert narrowing.beyond == {(0, 0): 10}


def test_an_assumption_that_matters_is_refused_or_becomes_the_range_of_a_hint() -> None:
    def limited(self: Any, x: Tensor) -> Tensor:
        torch._check(x.shape[0] >= 3)  # type: ignore[no-untyped-call]
        return x + 1

    required, hint = rows(limited, low=1).inputs, rows(limited, low=1, is_required=False).inputs
    with pytest.raises(CaptureError, match="at least 3"):
        required.accept(next(iter(required.narrowings())))
    hint.accept(next(iter(hint.narrowings())))
    assert hint.marks[0, 0].low == 3


def test_symbols_have_the_names_of_the_user_and_their_ranges() -> None:
    found = rows(lambda s, x: x + 1, low=2, high=8).inputs
    ((symbol, name),) = found.given_symbols().items()
    assert name == "rows"
    names = SymbolNames(found.given_symbols())
    names.name(symbol)
    assert found.ranges(names) == {"rows": (2, 8)}
    assert rows(lambda s, x: x + 1, name="2*n").inputs.given_symbols() == {}


def test_dimensions_of_one_name_are_one_size() -> None:
    same = {(0, 0): DynamicDim("n", 2, None), (1, 0): DynamicDim("n", 2, None)}
    trace = traced(lambda s, x, y: x + y, X, X, marks=same)
    first, second = (leaf.shape[0] for leaf in trace.inputs.leaves)
    assert str(first.node.expr) == str(second.node.expr)


def test_a_tensor_in_an_unknown_container_is_refused() -> None:
    class Box:
        def __init__(self) -> None:
            self.inside = X

    with pytest.raises(CaptureError, match="Box"):
        traced(lambda s, x, box: x + box.inside, X, Box())
