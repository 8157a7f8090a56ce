"""Attributes of traced tensors: facts where they are known, nodes where they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.capture.export.dimensions import DynamicDim
from tests.support.symbolic_traces import traced

X = torch.arange(6.0).reshape(2, 3)


def facts(x: Any) -> dict[str, Any]:
    names = ("dtype", "ndim", "device", "layout", "is_cuda", "itemsize", "requires_grad", "is_sparse", "is_nested")
    return {name: getattr(x, name) for name in names}


def test_facts_are_those_of_the_example() -> None:
    found: list[dict[str, Any]] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        found.append(facts(x))
        return x + 0

    trace = traced(forward, X)
    assert found[0] == facts(X)
    assert trace.names == ["add.Tensor"]  # none of them is in the graph


@pytest.mark.parametrize("name", ["T", "mT", "H", "mH"])
def test_transposes_are_ops(name: str) -> None:
    trace = traced(lambda s, x: getattr(x, name) * 1, X)
    assert len(trace.names) == 2
    assert torch.equal(trace(X), getattr(X, name))


def test_parts_of_complex_numbers_and_data_are_ops() -> None:
    z = torch.complex(X, X + 1)
    trace = traced(lambda s, z: z.real + z.imag, z)
    assert torch.equal(trace(z), 2 * X + 1)
    assert traced(lambda s, x: x.data + 1, X).names == ["detach.default", "add.Tensor"]


def test_shapes_are_torch_s_where_sizes_are_fixed_and_tuples_where_some_are_open() -> None:
    kinds: list[type] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        kinds.append(type(x.shape))
        return x.reshape(x.shape[1], -1)

    traced(forward, X)
    trace = traced(forward, X, marks={(0, 0): DynamicDim("rows", 2, None)})
    assert kinds == [torch.Size, tuple]
    assert trace(torch.ones(5, 3)).shape == (3, 5)


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: x.sum(x.ndim - 1),
        lambda s, x: torch.zeros(1).to(x.dtype),
        lambda s, x: x.reshape(x.shape),
        lambda s, x: x * x.itemsize,
    ],
    ids=["ndim", "dtype", "shape", "itemsize"],
)
def test_facts_without_an_example_are_asked_when_the_program_runs(forward: Callable[..., Any]) -> None:
    trace = traced(forward)
    assert any("getattr" in name for name in trace.names)
    for given in (X, X.double(), torch.ones(2, 2, 2)):
        found, expected = trace(given), forward(None, given)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_without_an_example_an_input_is_where_the_model_is() -> None:
    found: list[Any] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        found.extend([x.device, x.requires_grad, x.is_nested])
        return self.fc(x)  # type: ignore[no-any-return]

    traced(forward, fc=lambda: nn.Linear(3, 3))
    assert found == [torch.device("cpu"), False, False]


def test_attributes_that_no_tensor_has_are_an_error_of_the_model() -> None:
    with pytest.raises(AttributeError, match="'shaep'"):
        traced(lambda s, x: x.shaep, X)
    assert traced(lambda s, x: x * (2 if hasattr(x, "shaep") else 3), X).calls == ["mul.Tensor(x, 3)"]


def test_facts_of_parameters_are_known_without_an_example() -> None:
    trace = traced(lambda s, x: x.view(-1, s.fc.weight.shape[1]), fc=lambda: nn.Linear(3, 2))
    assert trace(X.reshape(-1)).shape == (2, 3)
    assert not any("getattr" in name for name in trace.names)
