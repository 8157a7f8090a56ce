"""Quantized embedding tables: rows are looked up in their stored format, and only those are dequantized.

fbgemm looks up and dequantizes 8-bit rows in one op: each row is followed by its scale and offset. Where the offset of
a zero point is not representable in float32, scales are applied afterwards, so that rounding does not change. fbgemm's
4-bit kernels are not used: they take float16 scales only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.nn import functional

from quantc.integer.ops.weight_only import BYTES, bags
from quantc.targets.kernels.kernel_table import Call, NoKernelError, Placement, kernel
from quantc.targets.kernels.stored_weight import StoredWeight, WeightOnly


@dataclass(frozen=True, eq=False)
class Table:
    """An embedding table in a dtype that torch converts fast, with scales and zero points in float32."""

    rows: Tensor
    scale: Tensor | None
    zero_point: Tensor | None
    are_of_rows: bool
    """True if each row has its own qparams, looked up with the row: one pair, or one per group."""

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
        """Rows as float32. In-place ops touch new tensors only."""
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


@dataclass(frozen=True, eq=False)
class ByteTable:
    """An embedding table in fbgemm's format: each row, or group of a row, is followed by a scale and an offset."""

    rows: Tensor
    """uint8: the bytes, then two float32."""
    groups: int
    """In how many parts each row is stored."""
    scale: Tensor | None
    """By group: what is multiplied with afterwards; None if the rows have their scales."""

    @staticmethod
    def of(weight: StoredWeight) -> ByteTable:
        scales, offsets = _scales_and_offsets(weight)
        is_exact = _are_exact(scales, offsets)
        numbers = (scales, (scales * offsets).float()) if is_exact else (torch.ones_like(scales), offsets)
        levels = weight.w if weight.w.dtype is torch.uint8 else _shift_by_128(weight.w)
        behind = (item.float().view(torch.uint8) for item in numbers)
        rows = torch.cat([levels.reshape(len(scales), -1), *behind], 1)
        return ByteTable(rows, len(scales) // len(weight.w), None if is_exact else scales.float())

    def stored(self, like: torch.dtype) -> Tensor:
        """The integers in their original dtype."""
        levels = self.rows[:, :-NUMBERS].reshape(len(self.rows) // self.groups, -1)
        return levels if like is torch.uint8 else _shift_by_128(levels).view(torch.int8)

    def look_up(self, indices: Tensor) -> Tensor:
        """Rows as float32."""
        flat = indices.reshape(-1).contiguous()
        if self.groups > 1:
            flat = (flat.unsqueeze(1) * self.groups + _places(self.groups, flat.dtype)).reshape(-1)
        found: Tensor = BYTE_ROWS(self.rows, flat, _places(flat.numel(), flat.dtype))
        if self.scale is not None:
            found.mul_(torch.index_select(self.scale, 0, flat))
        return found.view(*indices.shape, found.shape[1] * self.groups)

    def sum_up(self, indices: Tensor, offsets: Tensor, weights: Tensor | None, include_last_offset: bool) -> Tensor:
        """Sums of bags of rows; one group per row, scales included."""
        bags = (indices.contiguous(), offsets.contiguous())
        each = None if weights is None else weights.contiguous()
        made: Tensor = BYTE_ROWS(self.rows, *bags, False, 0, False, each, None, include_last_offset)
        return made


BYTE_ROWS: Any = torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default
NUMBERS = 8
"""Bytes taken by the scale and offset of a row."""
MAX_PLACES = 4096
"""Up to so many, the places of indices are remembered: to count them takes as long as to look up a row."""


def _scales_and_offsets(weight: StoredWeight) -> tuple[Tensor, Tensor]:
    """Of each row, or group of one, in float64; offsets are in steps, from where the bytes begin."""
    scale = torch.ones(()) if weight.scale is None else weight.scale
    zero_point = torch.zeros(()) if weight.zero_point is None else weight.zero_point
    parts = len(weight.w) * (scale.shape[-1] if weight.group_size is not None else 1)
    scales, zeros = (item.double().reshape(-1, 1).expand(parts, 1).contiguous() for item in (scale, zero_point))
    return scales, torch.iinfo(weight.w.dtype).min - zeros


def _are_exact(scales: Tensor, offsets: Tensor) -> bool:
    """True if float32 represents scale·offset of all rows exactly."""
    products = scales * offsets
    return torch.equal(products.float().double(), products)


def _shift_by_128(levels: Tensor) -> Tensor:
    """The bytes of int8 moved by 128, so that they begin at 0; or back again."""
    return levels.view(torch.uint8) ^ 128


def _places(count: int, dtype: torch.dtype) -> Tensor:
    """0, 1, 2, …: where each bag of one row begins."""
    return _positions(count, dtype) if count <= MAX_PLACES else torch.arange(count, dtype=dtype)


@lru_cache(maxsize=256)
def _positions(count: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(count, dtype=dtype)


class EmbeddingLookup(WeightOnly):
    """Embedding lookup: rows of a table, as float32."""

    name: ClassVar[str] = "rows looked up as stored"

    def pack(self) -> Any:
        return Table.of(self.stored)

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return packed.look_up(inputs[0])


class BagLookup(EmbeddingLookup):
    """Embedding bag: sums, means or maxima of rows of a table."""

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


class ByteLookup(WeightOnly):
    """Embedding lookup in an 8-bit table, as float32, in one op."""

    name: ClassVar[str] = "fbgemm rows of bytes"
    family: ClassVar[str] = "fbgemm"

    def __init__(self, weight: StoredWeight) -> None:
        super().__init__(weight)
        self.dtype = weight.w.dtype

    def pack(self) -> Any:
        return ByteTable.of(self.stored)

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        return {"w": packed.stored(self.dtype)}

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return packed.look_up(inputs[0])


class ByteBagLookup(ByteLookup):
    """Embedding bag over an 8-bit table: sums or means, accumulated in float32 like the float op's, but in another order."""

    name: ClassVar[str] = "fbgemm bags of rows of bytes"

    def __init__(self, weight: StoredWeight, mode: int, include_last_offset: bool) -> None:
        super().__init__(weight)
        self.is_mean = mode == MEAN
        self.include_last_offset = include_last_offset

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        indices, offsets, *weights = inputs
        made = packed.sum_up(indices, offsets, weights[0] if weights else None, self.include_last_offset)
        if not self.is_mean:
            return made
        ends = offsets if self.include_last_offset else functional.pad(offsets, (0, 1), value=indices.numel())
        return made.div_(ends.diff().clamp_(min=1).unsqueeze(1))


SUM, MEAN = 0, 1
"""Torch's numbers of the reductions over the rows of a bag; the third is the maximum."""


def _argument_nodes(call: Call, *names: str) -> tuple[fx.Node, ...]:
    """The nodes of some arguments, constants too; those that are None are left out."""
    target: Any = call.node.target
    order = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(order, call.node.args, strict=False)), **call.node.kwargs}
    found = [given[name] for name in names if given.get(name) is not None]
    nodes = tuple(value for value in found if isinstance(value, fx.Node))
    if len(nodes) < len(found):
        raise NoKernelError(f"one of {', '.join(names)} is no tensor")
    return nodes


def _check_bytes(weight: StoredWeight) -> None:
    if weight.w.dtype not in (torch.int8, torch.uint8) or weight.w.dim() != 2:
        raise NoKernelError("fbgemm looks up rows of bytes")
    if weight.group_size is None and weight.axis not in (None, 0):
        raise NoKernelError("fbgemm takes a scale for each row, not for each column")


@kernel("x86", "embedding_weight_only")
@kernel("qnnpack", "embedding_weight_only")
def byte_lookup(call: Call) -> Placement:
    weight = StoredWeight.of(call)
    _check_bytes(weight)
    return Placement(ByteLookup(weight), _argument_nodes(call, "indices"))


@kernel("x86", "embedding")
@kernel("qnnpack", "embedding")
def integer_lookup(call: Call) -> Placement:
    """Placement of the integer form's embedding lookup."""
    zeros = None if call["w_zero_point"] is None else call.tensor("w_zero_point")
    scale = call.tensor("scale")
    weight = StoredWeight(call.tensor("w"), scale, zeros, 0 if scale.dim() else None, None)
    _check_bytes(weight)
    return Placement(ByteLookup(weight), _argument_nodes(call, "indices"))


@kernel("x86", "embedding_bag_weight_only")
@kernel("qnnpack", "embedding_bag_weight_only")
def byte_bag_lookup(call: Call) -> Placement:
    weight = StoredWeight.of(call)
    _check_bytes(weight)
    if call["mode"] not in (SUM, MEAN) or call["padding_idx"] is not None:
        raise NoKernelError("fbgemm adds up all rows of a bag")
    if weight.group_size is not None or not _are_exact(*_scales_and_offsets(weight)):
        raise NoKernelError("its rows have zero points, or are stored in groups")
    made = ByteBagLookup(weight, call["mode"], call["include_last_offset"])
    return Placement(made, _argument_nodes(call, "indices", "offsets", "per_sample_weights"))


@kernel("x86", "embedding_weight_only")
@kernel("qnnpack", "embedding_weight_only")
def lookup(call: Call) -> Placement:
    return Placement(EmbeddingLookup(StoredWeight.of(call)), _argument_nodes(call, "indices"))


@kernel("x86", "embedding_bag_weight_only")
@kernel("qnnpack", "embedding_bag_weight_only")
def bag_lookup(call: Call) -> Placement:
    made = BagLookup(StoredWeight.of(call), call["mode"], call["include_last_offset"], call["padding_idx"])
    return Placement(made, _argument_nodes(call, "indices", "offsets", "per_sample_weights"))
