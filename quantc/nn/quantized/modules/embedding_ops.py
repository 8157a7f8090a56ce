"""Tables of embeddings that are stored in bytes: rows are looked up as they are stored, and become float32."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantc.errors import SpecError
from quantc.flows.dtypes import FLOAT_QPARAMS, PLAIN
from quantc.kernels.weight_lookup import BagLookup, ByteTable
from quantc.kernels.weight_stored import StoredWeight
from quantc.nn.on_kernels import Run
from quantc.nn.quantized_module import QuantizedModule
from quantc.nn.quantized_tensor import QuantizedTensor
from quantc.nn.weights import TABLE_DTYPES, check_weight_dtype, observed_weight

MODES = {"sum": 0, "mean": 1, "max": 2}
"""What becomes of the rows of a bag, as torch numbers it."""


class Embedding(QuantizedModule):
    """Rows of a table, each with its scale and its zero point, which is a float."""

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
        self.hold("weight", w.data_of.contiguous())
        self.hold("weight_scale", w.q_per_channel_scales().float())
        self.hold("weight_zero_point", w.q_per_channel_zero_points().float())

    def weight(self) -> QuantizedTensor:
        levels, scale, zero_point = (self.tensor(name) for name in self.held)
        return QuantizedTensor(levels, scale, zero_point, 0)

    def table(self) -> ByteTable:
        """As fbgemm reads it: behind each row its scale, and the number that level 0 stands for."""
        levels, scale, zero_point = (self.tensor(name) for name in self.held)
        lowest = -zero_point * scale
        behind = (item.reshape(-1, 1).contiguous().view(torch.uint8) for item in (scale, lowest))
        return ByteTable(torch.cat([levels, *behind], 1), 1, None)

    def forward(self, indices: Tensor) -> Tensor:
        found: Tensor = self.kernels.made("rows", lambda: self.table().look_up)(indices)
        return found

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Self:
        made = cls._like(mod)
        made.set_weight(observed_weight(mod.weight, _table_observer(mod, cls.__name__), True))
        return made

    @classmethod
    def from_reference(cls, ref: Any) -> Self:
        from quantc.nn.torch_state import from_torch_tensor

        made = cls._like(ref)
        made.set_weight(from_torch_tensor(ref.get_quantized_weight()))
        return made

    @classmethod
    def _like(cls, mod: Any) -> Self:
        return cls(mod.num_embeddings, mod.embedding_dim, mod.padding_idx)

    def extra_repr(self) -> str:
        kind = self.weight()
        return f"{self.num_embeddings}, {self.embedding_dim}, dtype={kind.dtype}, qscheme={kind.qscheme()}"


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
        given = (indices, offsets) if per_sample_weights is None else (indices, offsets, per_sample_weights)
        found: Tensor = self.kernels.made("bags", self._bags)(*given)
        return found

    def _bags(self) -> Run:
        mode = MODES[self.mode]
        if self.mode == "max" or self.padding_idx is not None:
            levels, scale, zero_point = (self.tensor(name) for name in self.held)
            stored = StoredWeight(levels, scale, zero_point, 0, None)
            return BagLookup(stored, mode, self.include_last_offset, self.padding_idx).forward
        table = self.table()

        def summed(indices: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
            made = table.sum_up(indices, offsets, weights, self.include_last_offset)
            if self.mode == "sum":
                return made
            ends = offsets if self.include_last_offset else functional.pad(offsets, (0, 1), value=indices.numel())
            return made.div_(ends.diff().clamp_(min=1).unsqueeze(1))

        return summed

    @classmethod
    def _like(cls, mod: Any) -> Self:
        return cls(
            mod.num_embeddings,
            mod.embedding_dim,
            mode=mod.mode,
            include_last_offset=mod.include_last_offset,
            padding_idx=mod.padding_idx,
        )


def _table_observer(mod: Any, where: str) -> Any:
    """The observer of a table: that of its qconfig, or the usual one where there is none."""
    observer = getattr(mod, "weight_fake_quant", None)
    if observer is None:
        qconfig = getattr(mod, "qconfig", None)
        if qconfig is None or qconfig.weight is None:
            from quantc.flows.qconfig import float_qparams_weight_only_qconfig

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
