"""Tables that are stored quantized: rows are looked up as they are stored, and only those become float.

fbgemm's kernels for tables of bytes are not used: their rows have an offset, not a zero point, which rounds otherwise;
and they take integers of 4 bits with scales in float16 only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from quantc.integer.ops.weight_only import BYTES, bags
from quantc.kernels.table import Call, NoKernelError, Placement, kernel
from quantc.kernels.weight_stored import StoredWeight, WeightOnly


@dataclass(frozen=True, eq=False)
class Table:
    """A table in a format that torch converts fast, and its scales and zero points as float32."""

    rows: Tensor
    scale: Tensor | None
    zero_point: Tensor | None
    are_of_rows: bool
    """Whether each row has numbers of its own, which are looked up like the row: one, or one for each group."""

    @staticmethod
    def of(weight: StoredWeight) -> Table:
        # torch converts fp8 numbers one by one; in float16 they are exact, and converted eight at a time
        rows = weight.w.half() if weight.w.dtype in BYTES else weight.w
        are_of_rows = weight.axis == 0 or weight.group_size is not None
        parts = (None if part is None else part.float() for part in (weight.scale, weight.zero_point))
        scale, zero_point = (
            part.reshape(len(rows), -1) if part is not None and are_of_rows else part for part in parts
        )
        return Table(rows, scale, zero_point, are_of_rows)

    def look_up(self, indices: Tensor) -> Tensor:
        """Rows as float32. What is changed in place is new."""
        found = torch.embedding(self.rows, indices).float()
        if self.scale is None:
            return found
        groups = self.scale.shape[-1] if self.are_of_rows else 1
        split = found if groups == 1 else found.view(*found.shape[:-1], groups, found.shape[-1] // groups)
        if self.zero_point is not None:
            split.sub_(self._beside(self.zero_point, indices, groups))
        split.mul_(self._beside(self.scale, indices, groups))
        return found

    def _beside(self, values: Tensor, indices: Tensor, groups: int) -> Tensor:
        if not self.are_of_rows:
            return values
        found = torch.embedding(values, indices)
        return found if groups == 1 else found.unsqueeze(-1)


class Lookup(WeightOnly):
    """Rows of a table, as float32."""

    name: ClassVar[str] = "rows looked up as stored"

    def pack(self) -> Any:
        return Table.of(self.stored)

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return packed.look_up(inputs[0])


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
