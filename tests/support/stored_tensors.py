"""Tensors written and read again, and what their bits are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quantc.store.stored_tensors import TensorReader, TensorWriter


def written(tensor: Tensor) -> tuple[Any, Tensor | None]:
    writer = TensorWriter()
    writer.add("t", tensor)
    return writer.records["t"], writer.stored.get("t")


def again(tensor: Tensor) -> Tensor:
    record, stored = written(tensor)
    reader = TensorReader({"t": record}, {} if stored is None else {"t": stored})
    back = reader.take("t")
    reader.finish()
    return back


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(back: Tensor, tensor: Tensor) -> None:
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert bits(back) == bits(tensor)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int, low: int = 0, high: int = 256) -> Tensor:
    """Any bits at all: NaNs of every kind, infinities, both zeros."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    if dtype is torch.bool:
        return (raw > 127).reshape(shape)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def all_again(tensors: dict[str, Tensor]) -> tuple[TensorWriter, dict[str, Tensor]]:
    writer = TensorWriter()
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    reader = TensorReader(writer.records, writer.stored)
    back = {name: reader.take(name) for name in tensors}
    reader.finish()
    return writer, back
