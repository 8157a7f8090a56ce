"""Tensors of torch's quantized dtypes, in and out; and the entries of torch.ao's state dicts, taken apart.

The only place of this package where such tensors are taken apart and made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantc.errors import LoadError
from quantc.nn.quantized_tensor import QuantizedTensor
from quantc.targets.kernels import packing

State = dict[str, Any]
PACKED = "_packed_params._packed_params"
PACKED_TABLE = "_packed_params._packed_weight"
GRID = ("scale", "zero_point")
HALF = torch.float16


def from_torch_tensor(q: Any) -> QuantizedTensor:
    """A tensor of torch's quantized dtypes, or one of quantc's, as quantc's."""
    if isinstance(q, QuantizedTensor):
        return q
    levels = q.dequantize() if q.dtype is torch.quint4x2 else q.int_repr()
    if q.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return QuantizedTensor(levels, q.q_scale(), q.q_zero_point())
    scales, zeros, axis = q.q_per_channel_scales(), q.q_per_channel_zero_points(), q.q_per_channel_axis()
    if q.dtype is torch.quint4x2:  # has no integers to show: they are what its numbers were made of
        shape = [-1 if dim == axis else 1 for dim in range(q.dim())]
        levels = torch.round(levels / scales.reshape(shape) + zeros.reshape(shape)).to(torch.uint8)
    return QuantizedTensor(levels, scales, zeros, axis)


def to_torch_tensor(q: QuantizedTensor) -> Tensor:
    """A quantized tensor as one of torch's quantized dtypes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of them on every use
        if q.axis_of is None:
            return packing.quantized_weight(
                q.data_of, torch.tensor(q.q_scale()).double(), 0, torch.tensor(q.q_zero_point())
            )
        scales, zeros = q.q_per_channel_scales(), q.q_per_channel_zero_points()
        if not zeros.is_floating_point():
            return packing.quantized_weight(q.data_of, scales, q.axis_of, zeros)
        make: Any = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateImportUsage]
        made: Tensor = make(q.data_of, scales.float(), zeros.float(), q.axis_of)
        return made


def plain_state(state: State, take_apart: Callable[[str, Any], State], has_grid: bool) -> State:
    """The state of one module as quantc's has it, from one that may be torch.ao's; names are without a prefix.

    `take_apart` gives the plain tensors of an entry of torch.ao's, for the module that they are for."""
    if not any(_is_torchs(name, value) for name, value in state.items()):
        return state
    known = {name: value for name, value in state.items() if not _is_torchs(name, value)}
    if not has_grid:
        known = {name: value for name, value in known.items() if name not in GRID}
    for name, value in state.items():
        known |= take_apart(name, value) if _is_torchs(name, value) else {}
    return {name: value for name, value in known.items() if value is not None}


def _is_torchs(name: str, value: Any) -> bool:
    is_quantized = isinstance(value, Tensor) and not isinstance(value, QuantizedTensor) and value.is_quantized
    return is_quantized or value is None or name.startswith(("_packed_", "_all_weight_values."))


Parts = Callable[[str, QuantizedTensor], State]
"""The tensors of a weight, under the names that a module holds them by."""


def entry_apart(name: str, value: Any, parts: Parts, where: str) -> State:
    """The plain tensors of one entry. LoadError if a quantized module has none of that name."""
    if name in (PACKED, "_packed_params.weight"):
        weight, bias = value if isinstance(value, tuple) else (value, None)
        return weight_apart("weight", weight, bias, parts)
    if name == "_packed_params.bias":
        return {"bias": value}
    if name == PACKED_TABLE:
        return _parts("weight", value, parts)
    if name.startswith("_packed_weight_"):
        weight, bias = value.__getstate__()[0]
        return weight_apart(name.removeprefix("_packed_"), weight, bias, parts)
    if isinstance(value, Tensor):
        return _parts(name, value, parts)
    if value is None or name.endswith(".dtype"):
        return {}
    raise LoadError(
        f"{name} is not known as part of a quantized module",
        where=f"the state of {where}",
        advice="save it with a version of torch.ao that writes _packed_params, or convert the float model again",
    )


def weight_apart(name: str, weight: Tensor, bias: Tensor | None, parts: Parts) -> State:
    """The plain tensors of a weight and its bias."""
    added = name.replace("weight", "bias", 1)
    return {**_parts(name, weight, parts), added: None if bias is None else bias.detach().float()}


def _parts(name: str, weight: Tensor, parts: Parts) -> State:
    return parts(name, from_torch_tensor(weight)) if weight.is_quantized else {name: weight.detach().to(HALF)}
