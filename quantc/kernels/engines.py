"""The one place where torch's quantized dtypes are used: packing weights for fbgemm and QNNPACK.

torch means to remove these dtypes. Everything else here works on plain int8 tensors.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quantc.errors import MissingDependencyError

_ENGINE = threading.Lock()


@contextmanager
def engine(name: str) -> Iterator[None]:
    """Let torch pack for an engine: it has one for the whole process, which is put back."""
    known = torch.backends.quantized.supported_engines
    if name not in known:
        raise MissingDependencyError(
            f"this build of torch has no quantized engine {name!r}",
            where="qc.lower",
            advice=f"it has {', '.join(known)}: lower for another target, or install a build of torch that has it",
        )
    with _ENGINE, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of quantized dtypes on every use
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = name
        try:
            yield
        finally:
            torch.backends.quantized.engine = before


def quantized_weight(levels: Tensor, scale: Tensor, axis: int = 0) -> Tensor:
    """Integers and their scales as a tensor of torch's quantized dtype; call it with an engine chosen."""
    if not scale.dim():
        return torch._make_per_tensor_quantized_tensor(levels, float(scale), 0)
    zeros = torch.zeros(scale.shape, dtype=torch.int64)
    return torch._make_per_channel_quantized_tensor(levels, scale.double(), zeros, axis)


def packed_linear(name: str, levels: Tensor, scale: Tensor, bias: Tensor | None) -> Any:
    """A linear layer's weight, packed."""
    with engine(name):
        return torch.ops.quantized.linear_prepack(quantized_weight(levels.contiguous(), scale), bias)
