"""Tables of embeddings that are stored in bytes, or two numbers to a byte: rows are looked up as they are stored, and become
float32."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantc.errors import SpecError
from quantc.nn.kernel_ops import Run
from quantc.nn.observed_weights import TABLE_DTYPES, check_weight_dtype, observed_weight
from quantc.nn.quantized_module import QuantizedModule
from quantc.nn.quantized_tensor import QuantizedTensor
from quantc.nn.torch_tensors import State, from_torch_tensor
from quantc.spec.torch_dtypes import FLOAT_QPARAMS, PLAIN
from quantc.targets.kernels.embedding import BagLookup, ByteTable
from quantc.targets.kernels.stored_weight import StoredWeight

MODES = {"sum": 0, "mean": 1, "max": 2}
"""Reductions of a bag, in torch's numbering."""


def pairs(levels: Tensor) -> Tensor:
    """Rows of levels of 4 bits, two to a byte, the first in the lower bits; an odd row is filled up with a zero."""
    levels = functional.pad(levels, (0, levels.shape[-1] % 2))
    return levels[..., ::2] | (levels[..., 1::2] << 4)


def levels_of(packed: Tensor, width: int) -> Tensor:
    """The rows that `pairs` packed, `width` levels each."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., :width].contiguous()


class Embedding(QuantizedModule):
    """Rows of a table, each with its scale and its zero point, which is a float. With `dtype=torch.quint4x2` levels have 4
    bits, and two of them are stored in a byte."""

    held: tuple[str, ...] = ("weight", "weight_scale", "weight_zero_point")
    has_grid: ClassVar[bool] = False
    _FLOAT_MODULE: ClassVar[Any] = nn.Embedding

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *unused: Any,
        _weight: QuantizedTensor | None = None,
        dtype: torch.dtype = torch.quint8,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.dtype = dtype
        if dtype not in TABLE_DTYPES:
            raise SpecError(f"a table has no {dtype}", advice=f"take one of {', '.join(map(str, TABLE_DTYPES))}")
        if _weight is None:
            levels = torch.zeros(num_embeddings, embedding_dim, dtype=PLAIN.get(dtype, dtype))
            _weight = QuantizedTensor(levels, torch.ones(num_embeddings), torch.zeros(num_embeddings), 0)
        self.set_weight(_weight)

    def set_weight(self, w: QuantizedTensor) -> None:
        if w.shape != (self.num_embeddings, self.embedding_dim) or w.axis_of != 0:
            raise SpecError(
                f"the table has {self.num_embeddings} rows of {self.embedding_dim}, each with a scale, and was given "
                f"{tuple(w.shape)} with scales along {w.axis_of}",
            )
        self.hold("weight", self._pack(w.data_of.contiguous()))
        self.hold("weight_scale", w.q_per_channel_scales().float())
        self.hold("weight_zero_point", w.q_per_channel_zero_points().float())

    def _pack(self, levels: Tensor) -> Tensor:
        """Levels as they are stored."""
        if not self.is_packed:
            return levels
        if int(levels.max()) > 15:
            raise SpecError(f"a level is {int(levels.max())}, and those of 4 bits are 0..15", where=type(self).__name__)
        return pairs(levels)

    @property
    def is_packed(self) -> bool:
        """True if two levels are packed in a byte."""
        return self.dtype is torch.quint4x2

    def levels(self, rows: Tensor | None = None) -> Tensor:
        """The levels of some rows, or of all."""
        stored = self.tensor("weight") if rows is None else self.tensor("weight")[rows]
        return levels_of(stored, self.embedding_dim) if self.is_packed else stored

    def weight(self) -> QuantizedTensor:
        return QuantizedTensor(self.levels(), self.tensor("weight_scale"), self.tensor("weight_zero_point"), 0)

    def table(self, rows: Tensor | None = None) -> ByteTable:
        """Rows, or all, as fbgemm reads them: behind each its scale, and the number that level 0 stands for."""
        scale, zero_point = self.tensor("weight_scale"), self.tensor("weight_zero_point")
        if rows is not None:
            scale, zero_point = scale[rows], zero_point[rows]
        lowest = -zero_point * scale
        behind = (item.reshape(-1, 1).contiguous().view(torch.uint8) for item in (scale, lowest))
        return ByteTable(torch.cat([self.levels(rows), *behind], 1), 1, None)

    def few(self, indices: Tensor) -> tuple[ByteTable, Tensor]:
        """A table that has the rows of some indices, and where they are in it: of a packed one, only these are unpacked."""
        if not self.is_packed:
            made: Any = self.kernels.made("table", self.table)  # type: ignore[arg-type]
            return made, indices
        flat = indices.reshape(-1)
        return self.table(flat), torch.arange(len(flat), dtype=indices.dtype).view(indices.shape)

    def forward(self, indices: Tensor) -> Tensor:
        table, places = self.few(indices)
        return table.look_up(places)

    def load(self, state: dict[str, Any]) -> None:
        weight: Any = state.get("weight")
        is_apart = weight is not None and weight.shape[-1:] == (self.embedding_dim,) and self.embedding_dim > 1
        super().load({**state, "weight": self._pack(weight)} if is_apart and weight is not None else state)

    def why_not_load(self, state: dict[str, Any]) -> list[str]:
        """Levels of 4 bits may be one to a byte, as torch.ao's are unpacked."""
        weight = state.get("weight")
        is_apart = weight is not None and weight.shape == (self.num_embeddings, self.embedding_dim)
        known = {name: value for name, value in state.items() if name != "weight"} if is_apart else state
        return super().why_not_load(known)

    def weight_parts(self, name: str, weight: QuantizedTensor) -> State:
        parts = super().weight_parts(name, weight)
        return {**parts, f"{name}_scale": parts[f"{name}_scale"].float()}

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Self:
        observer = _table_observer(mod, cls.__name__)
        made = cls._like(mod, observer.dtype)
        made.set_weight(observed_weight(mod.weight, observer, True))
        return made

    @classmethod
    def from_reference(cls, ref: Any) -> Self:
        weight = ref.get_quantized_weight()
        made = cls._like(ref, weight.dtype)
        made.set_weight(from_torch_tensor(weight))
        return made

    @classmethod
    def _like(cls, mod: Any, dtype: torch.dtype) -> Self:
        return cls(mod.num_embeddings, mod.embedding_dim, mod.padding_idx, dtype=dtype)

    def extra_repr(self) -> str:
        kind = self.dtype if self.is_packed else self.tensor("weight").dtype
        return f"{self.num_embeddings}, {self.embedding_dim}, dtype={kind}, qscheme={FLOAT_QPARAMS}"


class EmbeddingBag(Embedding):
    """Sums, means or maxima of rows."""

    _FLOAT_MODULE: ClassVar[Any] = nn.EmbeddingBag

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "sum",
        sparse: bool = False,
        _weight: QuantizedTensor | None = None,
        include_last_offset: bool = False,
        dtype: torch.dtype = torch.quint8,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, _weight=_weight, dtype=dtype)
        if mode not in MODES:
            raise SpecError(f"a bag has no mode {mode!r}", advice=f"take one of {', '.join(MODES)}")
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self, indices: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        if offsets is None:
            rows, each = indices.shape  # bags of one size
            offsets = torch.arange(0, rows * each + int(self.include_last_offset), each, dtype=indices.dtype)
            indices = indices.reshape(-1)
            per_sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        if self.mode == "max" or self.padding_idx is not None:
            given = (indices, offsets) if per_sample_weights is None else (indices, offsets, per_sample_weights)
            found: Tensor = self.kernels.made("bags", self._bags)(*given)
            return found
        table, places = self.few(indices)
        made = table.sum_up(places, offsets, per_sample_weights, self.include_last_offset)
        if self.mode == "sum":
            return made
        ends = offsets if self.include_last_offset else functional.pad(offsets, (0, 1), value=indices.numel())
        return made.div_(ends.diff().clamp_(min=1).unsqueeze(1))

    def _bags(self) -> Run:
        """Maxima, and bags without the rows of `padding_idx`."""
        stored = StoredWeight(self.levels(), self.tensor("weight_scale"), self.tensor("weight_zero_point"), 0, None)
        return BagLookup(stored, MODES[self.mode], self.include_last_offset, self.padding_idx).forward

    @classmethod
    def _like(cls, mod: Any, dtype: torch.dtype) -> Self:
        return cls(
            mod.num_embeddings,
            mod.embedding_dim,
            mode=mod.mode,
            include_last_offset=mod.include_last_offset,
            dtype=dtype,
            padding_idx=mod.padding_idx,
        )


def _table_observer(mod: Any, where: str) -> Any:
    """The observer of a table: that of its qconfig, or the usual one where there is none."""
    observer = getattr(mod, "weight_fake_quant", None)
    if observer is None:
        qconfig = getattr(mod, "qconfig", None)
        if qconfig is None or qconfig.weight is None:
            from quantc.nn.qconfig import float_qparams_weight_only_qconfig

            qconfig = float_qparams_weight_only_qconfig
        observer = qconfig.weight()
    check_weight_dtype(observer, TABLE_DTYPES, where)
    if observer.qscheme != FLOAT_QPARAMS:
        raise SpecError(
            f"{where} has a scale and a float zero point for each row, and its observer is for {observer.qscheme}",
            where=where,
            advice="use float_qparams_weight_only_qconfig",
        )
    return observer


__all__ = ["Embedding", "EmbeddingBag"]
