"""Quantized constants, dequantized by DequantizeLinear."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from quantc.ir.dialect import short_name
from quantc.ir.program import Program
from quantc.qdq import float_ops as float_formats
from quantc.spec.granularity import normal_axis
from quantc.targets.onnx.dtypes import INT8, UINT8, integer_type
from quantc.targets.onnx.graph_builder import GraphBuilder


@dataclass(frozen=True, eq=False)
class QuantizedInitializer:
    """Levels and qparams of a constant. Scales are per tensor, per index of `axis`, or, with a `group`, one per that
    many elements of `axis`.
    """

    name: str
    levels: Tensor
    scale: Tensor | None
    zero_point: Tensor | None
    axis: int | None = None
    group: int | None = None
    kind: int | None = None
    """The type of the levels; None for narrower floats, which are cast."""

    @property
    def is_bytes(self) -> bool:
        """True if integer kernels multiply it directly: 8-bit, with one scale for the whole or per column."""
        return self.kind in (INT8, UINT8) and self.group is None and self.axis in (None, 1)

    def transposed(self) -> QuantizedInitializer:
        """The transposed matrix: ONNX matmuls have output channels last."""
        turned = None if self.axis is None else 1 - self.axis
        scale, zero_point = self.scale, self.zero_point
        if self.group is not None:
            scale = None if scale is None else scale.t()
            zero_point = None if zero_point is None else zero_point.t()
        return replace(
            self,
            name=f"{self.name}_transposed",
            levels=self.levels.t(),
            scale=scale,
            zero_point=zero_point,
            axis=turned,
        )

    def write(self, writer: GraphBuilder) -> str:
        """Name of the dequantized value."""
        levels = writer.constant(self.levels, self.name, self.kind)
        if self.kind is None:
            return self._from_floats(writer, levels)
        scale, zero_point = self.constants(writer)
        inputs = (levels, scale) if not zero_point else (levels, scale, zero_point)
        return writer.emit("DequantizeLinear", *inputs, axis=self.axis, block_size=self.group)

    def write_folded(self, writer: GraphBuilder) -> str:
        """Like `write`, in ops that runtimes constant-fold as they load the model."""
        if self.kind is None or self.group is not None or self.scale is None:
            return self.write(writer)
        wide = writer.cast(writer.constant(self.levels, self.name, self.kind), torch.float32)
        if self.zero_point is not None and bool(self.zero_point.any()):
            wide = writer.emit("Sub", wide, self._along(writer, self.zero_point.float(), "zero_point"))
        return writer.emit("Mul", wide, self._along(writer, self.scale, "scale"))

    def _along(self, writer: GraphBuilder, values: Tensor, what: str) -> str:
        """Per-index values, shaped to broadcast along the axis."""
        shape = [1] * self.levels.dim()
        if self.axis is not None:
            shape[self.axis] = -1
        return writer.constant(values.reshape(shape), f"{self.name}_{what}")

    def constants(self, writer: GraphBuilder) -> tuple[str, str]:
        """Names of scale and zero point; an empty name if the zero point is omitted."""
        if self.scale is None:
            return "", ""
        scale = writer.constant(self.scale, f"{self.name}_scale")
        if self.zero_point is None:
            return scale, ""
        zero_point = self.zero_point.to(self.levels.dtype)
        return scale, writer.constant(zero_point, f"{self.name}_zero_point", self.kind)

    def _from_floats(self, writer: GraphBuilder, levels: str) -> str:
        wide = writer.cast(levels, torch.float32)
        if self.scale is None:
            return wide
        return writer.emit("Mul", wide, self._along(writer, self.scale, "scale"))


def initializer_of(program: Program, node: Any) -> QuantizedInitializer | None:
    """The constant that a dequantize op reads; None if `node` is not such an op."""
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    levels = program.tensor(node.args[0])
    maker = READERS.get(_name(node))
    if levels is None or maker is None:
        return None
    return maker(program, node, levels)


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return short_name(target) if isinstance(target, torch._ops.OpOverload) else ""


def _tensor(program: Program, node: Any) -> Tensor | None:
    return program.tensor(node) if isinstance(node, fx.Node) else None


def _title(node: Any) -> str:
    return str(node.args[0].target)


def _per_tensor(program: Program, node: fx.Node, levels: Tensor) -> QuantizedInitializer | None:
    scale, zero_point, qmin, qmax, storage = node.args[1:6]
    if not isinstance(scale, float | int):
        return None
    kind = integer_type(int(qmin), int(qmax), storage)  # type: ignore[arg-type]
    return QuantizedInitializer(_title(node), levels, torch.tensor(float(scale)), torch.tensor(zero_point), kind=kind)


def _per_channel(program: Program, node: fx.Node, levels: Tensor) -> QuantizedInitializer | None:
    scale, zero_point = _tensor(program, node.args[1]), _tensor(program, node.args[2])
    axis, qmin, qmax, storage = node.args[3:7]
    kind = integer_type(int(qmin), int(qmax), storage)  # type: ignore[arg-type]
    axis = normal_axis(int(axis), levels.dim())  # type: ignore[arg-type]
    return QuantizedInitializer(_title(node), levels, scale, zero_point, axis, kind=kind)


def _per_group(program: Program, node: fx.Node, levels: Tensor) -> QuantizedInitializer | None:
    scale, zero_point = _tensor(program, node.args[1]), _tensor(program, node.args[2])
    qmin, qmax, storage, size = node.args[3:7]
    kind = integer_type(int(qmin), int(qmax), storage)  # type: ignore[arg-type]
    return QuantizedInitializer(_title(node), levels, scale, zero_point, 1, int(size), kind)  # type: ignore[arg-type]


def _narrow_float(program: Program, node: fx.Node, levels: Tensor) -> QuantizedInitializer | None:
    axis = node.args[2]
    return QuantizedInitializer(
        _title(node), levels, _tensor(program, node.args[1]), None, axis if isinstance(axis, int) else None
    )


READERS = {
    "dequantize_per_tensor": _per_tensor,
    "dequantize_per_channel": _per_channel,
    "dequantize_per_channel_group": _per_group,
    short_name(float_formats.DEQUANTIZE): _narrow_float,
}
"""By the name of the op."""
