"""The quantize and dequantize ops of the Q/DQ form, and how a program is given them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from quantc.decomposed import decomposed_ops
from quantc.errors import SpecError
from quantc.formats import PerChannel, PerTensor
from quantc.numerics import QParams
from quantc.program import Program
from quantc.spec import QuantSpec, name_of
from quantc.types import TensorType, tensor_type

OP_NAMES = ("per_tensor", "per_channel", "per_channel_group", "per_token")


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
    def _is_whole(self) -> bool:
        return isinstance(self.spec.granularity, PerTensor)

    def _arguments(self, before: fx.Node) -> tuple[Any, ...]:
        """Everything but the tensor: scale, zero point, axis, range and dtype."""
        ends = (self.spec.qmin, self.spec.qmax, self.spec.dtype.storage)
        if self._is_whole:
            return (*self.qparams.one, *ends)
        if not isinstance(self.spec.granularity, PerChannel):
            raise SpecError(
                f"{name_of(self.spec)} has no static Q/DQ form yet",
                advice="use per-tensor or per-channel specs in static quantization",
            )
        if before.graph not in self._constants:
            scale = self.program.constant(f"{self.hint}_scale", self.qparams.scale.clone(), before=before)
            zero_point = self.program.constant(
                f"{self.hint}_zero_point", self.qparams.zero_point.clone(), before=before
            )
            self._constants[before.graph] = (scale, zero_point)
        return (*self._constants[before.graph], self.spec.granularity.axis, *ends)

    def quantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        """A node that quantizes `value`."""
        ops = decomposed_ops()
        target = ops.quantize_per_tensor.default if self._is_whole else ops.quantize_per_channel.default
        made = _retyped(value, self.spec.dtype.storage)
        return self.program.emit(target, (value, *self._arguments(before)), before=before, like=value, value=made)

    def dequantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        """A node that gives back what a quantized `value` stands for."""
        ops = decomposed_ops()
        target = ops.dequantize_per_tensor.default if self._is_whole else ops.dequantize_per_channel.default
        made = _retyped(value, torch.float32)
        return self.program.emit(target, (value, *self._arguments(before)), before=before, like=value, value=made)


def _retyped(node: fx.Node, dtype: torch.dtype) -> TensorType | None:
    kind = tensor_type(node)
    return None if kind is None else TensorType(dtype, kind.shape)
