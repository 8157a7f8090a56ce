"""Tensors of torch's quantized dtypes, in and out; and the entries of torch.ao's state dicts, taken apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantc.errors import LoadError
from quantc.nn.quantized_tensor import QuantizedTensor, quantize_per_tensor
from quantc.nn.torch_tensors import (
    PACKED,
    PACKED_TABLE,
    entry_apart,
    from_torch_tensor,
    plain_state,
    to_torch_tensor,
    weight_apart,
)

SCALES, ZEROS = torch.tensor([0.5, 0.25]), torch.tensor([3, -2])
NUMBERS = torch.tensor([[0.5, -1.0, 2.0], [0.25, 1.0, -0.5]])


def parts(name: str, weight: QuantizedTensor) -> dict[str, Any]:
    """What a module makes of a weight, here its integers alone."""
    return {name: weight.int_repr().tolist()}


MAKERS: dict[str, Callable[[], Tensor]] = {
    "unsigned": lambda: torch.quantize_per_tensor(NUMBERS, 0.25, 7, torch.quint8),
    "signed": lambda: torch.quantize_per_tensor(NUMBERS, 0.25, -7, torch.qint8),
    "by channel": lambda: torch.quantize_per_channel(NUMBERS, SCALES, ZEROS, 0, torch.qint8),
    "float zero points": lambda: torch.quantize_per_channel(NUMBERS, SCALES, ZEROS.float(), 0, torch.quint8),
}


@pytest.mark.parametrize("name", MAKERS)
def test_torchs_tensors_come_in_and_go_out_again(name: str) -> None:
    theirs = MAKERS[name]()
    ours = from_torch_tensor(theirs)
    assert torch.equal(ours.dequantize(), theirs.dequantize())
    back = to_torch_tensor(ours)
    assert back.dtype is theirs.dtype
    assert back.qscheme() == theirs.qscheme()
    assert torch.equal(back.int_repr(), theirs.int_repr())
    assert torch.equal(back.dequantize(), theirs.dequantize())


def test_levels_of_four_bits_are_found_again() -> None:
    """Such a tensor has no integers to show."""
    levels = torch.tensor([[0, 15, 7], [3, 8, 1]])
    scales, zeros = torch.tensor([0.1, 0.3]), torch.tensor([2.0, 5.0])
    numbers = (levels - zeros[:, None]) * scales[:, None]
    theirs = torch.quantize_per_channel(numbers, scales, zeros, 0, torch.quint4x2)
    assert from_torch_tensor(theirs).int_repr().tolist() == levels.tolist()


def test_a_tensor_of_quantc_is_itself() -> None:
    q = quantize_per_tensor(NUMBERS, 0.5, 1)
    assert from_torch_tensor(q) is q


def test_a_plain_state_is_left_as_it_is() -> None:
    state = {"weight": torch.ones(2), "scale": torch.tensor(0.5), "zero_point": torch.tensor(3)}
    assert plain_state(state, lambda *_: {"weight": None}, has_grid=True) is state


def test_a_state_of_torchs_is_taken_apart_by_name() -> None:
    weight = torch.quantize_per_tensor(NUMBERS, 0.25, 0, torch.qint8)
    state = {"scale": torch.tensor(0.5), "zero_point": torch.tensor(3), "bias": None, "weight": weight}

    def take_apart(name: str, value: Any) -> dict[str, Any]:
        return {name: value if value is None else f"the parts of {name}"}

    assert plain_state(state, take_apart, has_grid=True) == {
        "scale": state["scale"],
        "zero_point": state["zero_point"],
        "weight": "the parts of weight",
    }
    assert plain_state(state, take_apart, has_grid=False) == {"weight": "the parts of weight"}


def test_entries_by_the_names_that_torch_gives_them() -> None:
    weight, bias = torch.quantize_per_tensor(NUMBERS, 0.25, 0, torch.qint8), torch.tensor([1.0, 2.0])
    levels = weight.int_repr().tolist()
    taken = entry_apart(PACKED, (weight, bias), parts, "Linear")
    assert taken["weight"] == levels
    assert torch.equal(taken["bias"], bias)
    assert entry_apart("_packed_params.weight", weight, parts, "Linear") == {"weight": levels, "bias": None}
    assert entry_apart(PACKED_TABLE, weight, parts, "Embedding") == {"weight": levels}
    assert entry_apart("weight", weight, parts, "Conv2d") == {"weight": levels}
    assert entry_apart("_packed_params.bias", bias, parts, "Linear")["bias"] is bias
    assert entry_apart("_packed_params.dtype", torch.qint8, parts, "Linear") == {}


def test_a_weight_without_a_scale_is_one_of_float16() -> None:
    taken = weight_apart("weight_ih", NUMBERS, torch.ones(2, dtype=torch.float64), parts)
    assert taken["weight_ih"].dtype is torch.float16
    assert taken["bias_ih"].dtype is torch.float32
    assert torch.equal(taken["weight_ih"].float(), NUMBERS)


def test_an_entry_that_no_quantized_module_has_is_refused() -> None:
    with pytest.raises(LoadError, match="_packed_secret") as caught:
        entry_apart("_packed_secret", object(), parts, "Linear")
    assert "Linear" in str(caught.value.where)
