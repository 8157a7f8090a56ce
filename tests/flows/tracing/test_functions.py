"""Which torch functions are looked at, and how: by their names, since one op has many spellings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantc.flows.tracing.functions import (
    Kind,
    gives_back,
    hands_out_memory,
    is_product,
    is_query,
    kind_of,
    mode_argument,
    name_of,
    open_function,
    says_it_writes,
    writes_first,
)

X = torch.arange(6.0).reshape(2, 3)


def get(name: str) -> Any:
    """What reading an attribute of a tensor calls."""
    return getattr(Tensor, name).__get__


def test_functions_methods_and_attributes_have_names() -> None:
    assert name_of(torch.relu) == name_of(Tensor.relu) == "relu"
    assert name_of(get("shape")) == "shape"
    assert name_of(torch.ops.aten.add.Tensor) == "add"


@pytest.mark.parametrize(
    ("func", "kind"),
    [
        (Tensor.size, Kind.QUERY),
        (get("dtype"), Kind.QUERY),
        (get("data"), Kind.MEMORY),
        (Tensor.numpy, Kind.MEMORY),
        (F.linear, Kind.HOOKED),
        (F.gelu, Kind.HOOKED),
        (torch.cat, Kind.COPY),
        (F.dropout2d, Kind.DROPOUT),
        (F.multi_head_attention_forward, Kind.OPENED),
        (torch.sin, Kind.OTHER),
        (get("T"), Kind.OTHER),
    ],
)
def test_every_function_is_of_one_kind(func: Any, kind: Kind) -> None:
    assert kind_of(func, frozenset({"gelu"})) is kind


def test_queries_never_look_at_numbers() -> None:
    meta = X.to("meta")
    for name in ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "element_size"):
        method = getattr(Tensor, name)
        assert is_query(method)
        assert method(meta) == method(X)
    assert not is_query(Tensor.item)
    assert not is_query(get("data"))


@pytest.mark.parametrize("name", ["numpy", "untyped_storage", "data_ptr"])
def test_memory_that_is_handed_out_can_be_written_past_torch(name: str) -> None:
    assert hands_out_memory(getattr(Tensor, name))
    assert not hands_out_memory(Tensor.clone)


@pytest.mark.parametrize(
    ("func", "writes"),
    [
        (torch.relu_, True),
        (Tensor.__iadd__, True),
        (Tensor.unsqueeze_, True),
        (torch.relu, False),
        (Tensor.__add__, False),
        (Tensor.__int__, False),
        (Tensor.__index__, False),
        (Tensor.__invert__, False),
    ],
)
def test_functions_that_write_to_their_first_argument(func: Any, writes: bool) -> None:
    assert writes_first(func) is writes


def test_calls_say_that_they_write() -> None:
    assert says_it_writes(torch.add, {"out": torch.empty(1)})
    assert not says_it_writes(torch.add, {"out": None})
    assert says_it_writes(torch.ops.aten.copy_.default, {})
    assert says_it_writes(torch.ops.aten.copy_, {})
    assert not says_it_writes(torch.ops.aten.relu.default, {})


def test_a_product_multiplies_with_a_parameter() -> None:
    weight = nn.Parameter(torch.eye(3))
    assert is_product(F.linear, (X, weight), {})
    assert is_product(F.linear, (X,), {"weight": weight})
    assert not is_product(F.linear, (X, torch.eye(3)), {})
    assert not is_product(torch.add, (X, weight), {})


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((0.5, False), {}), ((0.5,), {"training": False}), ((0.5, True), {}), ((), {}), ((), {"training": True})],
)
def test_dropout_gives_the_very_tensor_back_as_torch_does(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert gives_back((X, *args), kwargs) == (torch.dropout(X, 0.5, False) is X and F.dropout(X, *args, **kwargs) is X)


def test_the_argument_that_tells_the_mode_is_found_where_it_is() -> None:
    stats = torch.zeros(3), torch.ones(3)
    for args, kwargs, path, value in (
        ((X, 0.5, False), {}, (0, 2), False),
        ((X,), {"training": False}, (1, "training"), False),
        ((X,), {}, (1, "training"), True),
    ):
        found = mode_argument(F.dropout, args, kwargs)
        assert found is not None
        assert (found.path, found.value) == (path, value)
    norm = mode_argument(F.batch_norm, (X, *stats, None, None, True, 0.1), {})
    assert norm is not None
    assert (norm.path, norm.value) == ((0, 5), True)
    assert (0, 6) in norm.follow
    plain = mode_argument(F.batch_norm, (X, *stats), {})
    assert plain is not None
    assert not plain.value
    assert mode_argument(torch.relu, (X,), {}) is None


def test_an_opened_function_computes_the_same_and_calls_its_parts() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2).eval()
    x = torch.randn(3, 1, 4)
    args: tuple[Any, ...] = (
        *(x, x, x, 4, 2, attention.in_proj_weight, attention.in_proj_bias, None, None, False, 0.0),
        *(attention.out_proj.weight, attention.out_proj.bias),
    )
    function: Any = F.multi_head_attention_forward
    for ours, theirs in zip(
        open_function(function)(*args, training=False), function(*args, training=False), strict=True
    ):
        assert torch.equal(ours, theirs)

    class Named(torch.overrides.TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(name_of(func))
            return func(*args, **(kwargs or {}))

    with Named() as seen:
        open_function(function)(*args, training=False)
    assert "linear" in seen.names
    assert "multi_head_attention_forward" not in seen.names
