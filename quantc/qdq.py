"""The quantize and dequantize ops of the Q/DQ form, and how a program is given them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from quantc.decomposed import decomposed_ops
from quantc.errors import SpecError
from quantc.formats import PerChannel, PerGroup, PerTensor
from quantc.numerics import QParams
from quantc.program import Program
from quantc.spec import QuantSpec, name_of
from quantc.types import TensorType, tensor_type


def is_quantize(node: fx.Node) -> bool:
    return _is_decomposed(node, "quantize")


def is_dequantize(node: fx.Node) -> bool:
    return _is_decomposed(node, "dequantize")


def _is_decomposed(node: fx.Node, verb: str) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "quantized_decomposed":
        return False
    return target._schema.name.startswith(f"quantized_decomposed::{verb}_per")


@dataclass
class Scales:
    """The scales and zero points of a group in the graphs that use them: numbers, or constants made once a graph."""

    program: Program
    hint: str
    qparams: QParams
    spec: QuantSpec

    def __post_init__(self) -> None:
        self._constants: dict[fx.Graph, tuple[fx.Node, fx.Node]] = {}

    @property
    def _suffix(self) -> str:
        """How the ops of this sharing are called."""
        if isinstance(self.spec.granularity, PerTensor):
            return "per_tensor"
        return "per_channel_group" if isinstance(self.spec.granularity, PerGroup) else "per_channel"

    def _arguments(self, before: fx.Node) -> tuple[Any, ...]:
        """Everything but the tensor: scale, zero point, axis, range and dtype."""
        ends = (self.spec.qmin, self.spec.qmax, self.spec.dtype.storage)
        share = self.spec.granularity
        if isinstance(share, PerTensor):
            return (*self.qparams.one, *ends)
        if not isinstance(share, PerChannel | PerGroup):
            raise SpecError(
                f"{name_of(self.spec)} has no static Q/DQ form",
                advice="use per-tensor, per-channel or per-group specs in static quantization",
            )
        if before.graph not in self._constants:
            scale = self.program.constant(f"{self.hint}_scale", self.qparams.scale.clone(), before=before)
            zero_point = self.program.constant(
                f"{self.hint}_zero_point", self.qparams.zero_point.clone(), before=before
            )
            self._constants[before.graph] = (scale, zero_point)
        scales = self._constants[before.graph]
        return (*scales, *ends, share.size) if isinstance(share, PerGroup) else (*scales, share.axis, *ends)

    def quantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        """A node that quantizes `value`."""
        self._check_groups(value)
        target = getattr(decomposed_ops(), f"quantize_{self._suffix}").default
        made = _retyped(value, self.spec.dtype.storage)
        return self.program.emit(target, (value, *self._arguments(before)), before=before, like=value, value=made)

    def dequantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        """A node that gives back what a quantized `value` stands for."""
        target = getattr(decomposed_ops(), f"dequantize_{self._suffix}").default
        made = _retyped(value, torch.float32)
        arguments = self._arguments(before)
        if isinstance(self.spec.granularity, PerGroup):
            arguments = (*arguments, torch.float32)
        return self.program.emit(target, (value, *arguments), before=before, like=value, value=made)

    def _check_groups(self, value: fx.Node) -> None:
        """torch's ops take groups along the rows of a matrix, and no others."""
        share, kind = self.spec.granularity, tensor_type(value)
        if not isinstance(share, PerGroup) or (kind is not None and kind.rank == 2 and share.axis in (1, -1)):
            return
        raise SpecError(
            f"groups along axis {share.axis} of {kind or 'a tensor of unknown shape'} have no static Q/DQ form",
            where=self.program.describe(value),
            advice="use groups along axis 1 of the weight of a linear layer, and per-channel specs elsewhere",
        )


def _retyped(node: fx.Node, dtype: torch.dtype) -> TensorType | None:
    kind = tensor_type(node)
    return None if kind is None else TensorType(dtype, kind.shape)
