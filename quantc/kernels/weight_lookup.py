"""Tables that are stored quantized: rows are looked up as they are stored, and only those become float.

fbgemm's kernels for tables of bytes are not used: their rows have an offset, not a zero point, which rounds otherwise;
and they take integers of 4 bits with scales in float16 only.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from quantc.integer.ops.weight_only import BYTES, bags, real_rows
from quantc.kernels.table import Call, NoKernelError, Placement, kernel
from quantc.kernels.weight_stored import StoredWeight, WeightOnly


class Lookup(WeightOnly):
    """Rows of a table, as float32."""

    name: ClassVar[str] = "rows looked up as stored"

    def pack(self) -> Any:
        weight = self.stored
        # torch converts fp8 numbers one by one; in float16 they are exact, and converted eight at a time
        table = weight.w.half() if weight.w.dtype in BYTES else weight.w
        return table, weight.scale, weight.zero_point, weight.axis, weight.group_size is not None

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        table, scale, zero_point, axis, grouped = packed
        return real_rows(torch.embedding(table, inputs[0]), scale, zero_point, inputs[0], axis, grouped)


class BagLookup(Lookup):
    """Sums, means or maxima of rows of a table."""

    name: ClassVar[str] = "bags of rows looked up as stored"

    def __init__(self, weight: StoredWeight, mode: int, include_last_offset: bool, padding_idx: int | None) -> None:
        super().__init__(weight)
        self.mode = mode
        self.include_last_offset = include_last_offset
        self.padding = None if padding_idx is None else padding_idx % len(weight.w)

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        indices, offsets, *sample_weights = inputs
        rows = super().run(packed, indices)
        weights = sample_weights[0] if sample_weights else None
        return bags(rows, indices, offsets, self.mode, weights, self.include_last_offset, self.padding)


def _given(call: Call, *names: str) -> tuple[fx.Node, ...]:
    """The nodes of some arguments, constants too; those that are None are left out."""
    target: Any = call.node.target
    order = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(order, call.node.args, strict=False)), **call.node.kwargs}
    found = [given[name] for name in names if given.get(name) is not None]
    nodes = tuple(value for value in found if isinstance(value, fx.Node))
    if len(nodes) < len(found):
        raise NoKernelError(f"one of {', '.join(names)} is no tensor")
    return nodes


@kernel("x86", "embedding_weight_only")
@kernel("qnnpack", "embedding_weight_only")
def lookup(call: Call) -> Placement:
    return Placement(Lookup(StoredWeight.of(call)), _given(call, "indices"))


@kernel("x86", "embedding_bag_weight_only")
@kernel("qnnpack", "embedding_bag_weight_only")
def bag_lookup(call: Call) -> Placement:
    made = BagLookup(StoredWeight.of(call), call["mode"], call["include_last_offset"], call["padding_idx"])
    return Placement(made, _given(call, "indices", "offsets", "per_sample_weights"))
