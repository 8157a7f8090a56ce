"""8-bit activations as lookup tables: sigmoid, tanh, hardswish, leaky relu, gelu and others.

QNNPACK uses such tables too, but torch rebuilds them at each call. Python's `bytes.translate` is the fastest lookup
available: two to three times as fast as torch indexing, and exact.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.ir.types import dtype_of
from quantc.spec.instruction_sets import SIGN_SHIFT
from quantc.targets.kernels.conv_window import FORMATS
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernel

BYTES = (torch.uint8, torch.int8)
IMAGES = {axes + 2: order for axes, order in FORMATS.items()}
"""The other order in memory that tensors may have, by the number of their axes."""


class ByteTranslation(Kernel):
    """Lookup table applied to each byte, in any memory format."""

    name: ClassVar[str] = "bytes translated"
    any_order: ClassVar[bool] = True

    def __init__(self, table: Tensor, x_dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.dtype = table.dtype
        self.first = SIGN_SHIFT if x_dtype is torch.int8 else 0
        """The byte of the least level, which has the first entry."""

    def pack(self) -> Any:
        entries = self.get_buffer("table").roll(self.first)
        return bytes(entries.view(torch.uint8).tolist())

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x = inputs[0]
        if not x.numel():
            return x.new_empty(x.shape, dtype=self.dtype)
        if not x.is_contiguous() and not (x.dim() in IMAGES and x.is_contiguous(memory_format=IMAGES[x.dim()])):
            x = x.contiguous()
        in_memory = x.as_strided((x.numel(),), (1,)).numpy().data
        found = torch.frombuffer(bytearray(in_memory).translate(packed), dtype=self.dtype)
        made = found.as_strided(x.shape, x.stride())
        return made.contiguous() if self.in_order else made


class ChannelLookup(ByteTranslation):
    """Lookup with one table per index of an axis."""

    name: ClassVar[str] = "bytes translated by channel"

    def __init__(self, table: Tensor, x_dtype: torch.dtype, axis: int) -> None:
        super().__init__(table, x_dtype)
        self.axis = axis

    def pack(self) -> Any:
        entries = self.get_buffer("table").roll(self.first, dims=1)
        return [bytes(row) for row in entries.view(torch.uint8).tolist()]

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x = inputs[0]
        if not x.numel():
            return x.new_empty(x.shape, dtype=self.dtype)
        turned = x.transpose(0, self.axis).contiguous()
        rows = turned.view(len(packed), -1).numpy()
        found = bytearray().join(row.tobytes().translate(table) for row, table in zip(rows, packed, strict=True))
        made = torch.frombuffer(found, dtype=self.dtype).view(turned.shape).transpose(0, self.axis)
        return made.contiguous() if self.in_order else made


@kernel("x86", "lookup")
@kernel("qnnpack", "lookup")
def lookup(call: Call) -> Kernel:
    table, dtype = call.tensor("table"), dtype_of(call.node.args[0])
    if dtype not in BYTES or table.dtype not in BYTES:
        raise NoKernelError("the kernel is for bytes")
    return ByteTranslation(table, dtype) if table.dim() == 1 else ChannelLookup(table, dtype, call["axis"])
