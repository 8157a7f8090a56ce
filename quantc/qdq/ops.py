"""The quantize and dequantize ops of the Q/DQ form, and their insertion into a program."""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem
from typing import Any, Protocol

import torch
from torch import fx
from torch._ops import OpOverload

from quantc.errors import SpecError
from quantc.ir.program import Program
from quantc.ir.types import TensorType, TupleType, tensor_type
from quantc.qdq import choose_qparams as run_time
from quantc.qdq import float_ops as float_formats
from quantc.qdq.registration import decomposed_ops
from quantc.spec.formats import DType, PerChannel, PerGroup, PerTensor, PerToken, Scheme
from quantc.spec.granularity import normal_axis
from quantc.spec.numerics import QParams, middle
from quantc.spec.spec import QuantSpec, name_of

aten = torch.ops.aten


def is_quantize(node: fx.Node) -> bool:
    return _is_decomposed(node, "quantize") or node.target is float_formats.QUANTIZE


def is_dequantize(node: fx.Node) -> bool:
    return _is_decomposed(node, "dequantize") or node.target is float_formats.DEQUANTIZE


def is_layout(node: fx.Node) -> bool:
    """True if a node restores the shape of a weight that was dequantized as a matrix."""
    if node.target not in (aten.reshape.default, aten.permute.default):
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and ("dequantize_per_channel_group" in str(source.target) or is_layout(source))


def belongs_to_qdq(node: fx.Node) -> bool:
    """True if a node belongs to the quantization of tensors and is no op of the model."""
    if is_quantize(node) or is_dequantize(node) or is_choice(node) or is_layout(node) or is_stored_weight(node):
        return True
    source = node.args[0] if node.args else None
    return node.target is getitem and isinstance(source, fx.Node) and is_choice(source)


def is_stored_weight(node: fx.Node) -> bool:
    """True if a node dequantizes a stored weight in one step, which kernels do once, ahead of time."""
    target = node.target
    return isinstance(target, OpOverload) and target._schema.name == "quantc::stored_weight"


def is_choice(node: fx.Node) -> bool:
    """True if a node computes the qparams of a tensor at run time."""
    target = node.target
    if target is run_time.CHOOSE:
        return True
    return isinstance(target, OpOverload) and target._schema.name.startswith("quantized_decomposed::choose_qparams")


def _is_decomposed(node: fx.Node, verb: str) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "quantized_decomposed":
        return False
    return target._schema.name.startswith(f"quantized_decomposed::{verb}_per")


class Scales(Protocol):
    """The quantization of a group, as nodes in the graphs that use it."""

    @property
    def spec(self) -> QuantSpec:
        """The spec of the group."""
        ...

    def quantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        """Insert a node that quantizes `value`."""
        ...

    def dequantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        """Insert a node that dequantizes `value`."""
        ...


@dataclass
class KnownScales:
    """Static qparams: numbers, or constants created once a graph."""

    program: Program
    hint: str
    qparams: QParams
    spec: QuantSpec

    def __post_init__(self) -> None:
        self._constants: dict[fx.Graph, tuple[fx.Node, fx.Node]] = {}

    @property
    def _suffix(self) -> str:
        """The suffix of the op names for this granularity."""
        return "per_tensor" if isinstance(self.spec.granularity, PerTensor) else "per_channel"

    def _arguments(self, before: fx.Node) -> tuple[Any, ...]:
        """The arguments after the tensor: scale, zero point, axis, range and dtype."""
        ends = (self.spec.qmin, self.spec.qmax, self.spec.dtype.storage)
        share = self.spec.granularity
        if isinstance(share, PerTensor):
            return (*self.qparams.one, *ends)
        if not isinstance(share, PerChannel):
            raise SpecError(
                f"{name_of(self.spec)} has no static Q/DQ form",
                advice="use per-tensor, per-channel or per-group specs in static quantization",
            )
        return (*self._scales(before), share.axis, *ends)

    def _scales(self, before: fx.Node) -> tuple[fx.Node, fx.Node]:
        if before.graph not in self._constants:
            scale = self.program.constant(f"{self.hint}_scale", self.qparams.scale.clone(), before=before)
            zero_point = self.program.constant(
                f"{self.hint}_zero_point", self.qparams.zero_point.clone(), before=before
            )
            self._constants[before.graph] = (scale, zero_point)
        return self._constants[before.graph]

    def quantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        target = getattr(decomposed_ops(), f"quantize_{self._suffix}").default
        made = _with_dtype(value, self.spec.dtype.storage)
        return self.program.emit(target, (value, *self._arguments(before)), before=before, like=value, value=made)

    def dequantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        target = getattr(decomposed_ops(), f"dequantize_{self._suffix}").default
        made = _with_dtype(value, torch.float32)
        return self.program.emit(target, (value, *self._arguments(before)), before=before, like=value, value=made)


@dataclass
class GroupedScales(KnownScales):
    """Per-group scales of a weight. torch's ops take groups along the rows of a matrix, so other weights are quantized
    as matrices whose rows lie along the group axis, and dequantized back to their shape."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shapes: dict[fx.Node, tuple[int, ...]] = {}

    def _arguments(self, before: fx.Node) -> tuple[Any, ...]:
        return (*self._scales(before), self.spec.qmin, self.spec.qmax, self.spec.dtype.storage, self._share.size)

    @property
    def _share(self) -> PerGroup:
        share = self.spec.granularity
        if not isinstance(share, PerGroup):
            raise SpecError(f"{name_of(self.spec)} has no groups")
        return share

    def _scales(self, before: fx.Node) -> tuple[fx.Node, fx.Node]:
        # scales in the layout of the matrix rows
        if self.qparams.scale.dim() != 2 or self._share.axis not in (1, -1):
            rows = [part.movedim(self._share.axis, -1) for part in (self.qparams.scale, self.qparams.zero_point)]
            scale, zero_point = (part.reshape(-1, part.shape[-1]).contiguous() for part in rows)
            self.qparams = QParams(scale, zero_point)
        return super()._scales(before)

    def quantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        weight = self.program.tensor(value)
        if weight is None:
            raise SpecError(
                f"{value.name} is not a constant, and only weights have groups",
                where=self.program.describe(value),
                advice="use groups for the weights of linear, convolution and embedding layers",
            )
        axis = normal_axis(self._share.axis, weight.dim())
        rows = value
        if axis != 1 or weight.dim() != 2:
            matrix = weight.detach().movedim(axis, -1).reshape(-1, weight.shape[axis]).contiguous()
            rows = self.program.constant(f"{self.hint}_rows", matrix, before=before)
        made = _with_dtype(rows, self.spec.dtype.storage)
        target = decomposed_ops().quantize_per_channel_group.default
        levels = self.program.emit(target, (rows, *self._arguments(before)), before=before, like=value, value=made)
        self._shapes[levels] = tuple(weight.shape)
        return levels

    def dequantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        shape = self._shapes[value]
        axis = normal_axis(self._share.axis, len(shape))
        moved = (*(size for dim, size in enumerate(shape) if dim != axis), shape[axis])
        target = decomposed_ops().dequantize_per_channel_group.default
        made = _with_dtype(value, torch.float32)
        arguments = (value, *self._arguments(before), torch.float32)
        reals = self.program.emit(target, arguments, before=before, like=value, value=made)
        if len(shape) != 2:
            reals = self._emit(aten.reshape.default, (reals, list(moved)), moved, before, value)
        if axis != len(shape) - 1:
            order = [*range(axis), len(shape) - 1, *range(axis, len(shape) - 1)]
            reals = self._emit(aten.permute.default, (reals, order), shape, before, value)
        return reals

    def _emit(
        self, target: OpOverload, args: tuple[Any, ...], shape: tuple[int, ...], before: fx.Node, like: fx.Node
    ) -> fx.Node:
        kind = TensorType(torch.float32, shape)
        return self.program.emit(target, args, before=before, like=like, value=kind)


@dataclass
class FloatScales(KnownScales):
    """Weights in a narrower float format: fp16 without scales, fp8 with."""

    def _ends(self, before: fx.Node) -> tuple[Any, ...]:
        if self.spec.dtype is DType.FP16:
            return None, None
        share = self.spec.granularity
        return self._scales(before)[0], share.axis if isinstance(share, PerChannel) else None

    def quantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        arguments = (value, *self._ends(before), self.spec.dtype.storage)
        made = _with_dtype(value, self.spec.dtype.storage)
        return self.program.emit(float_formats.QUANTIZE, arguments, before=before, like=value, value=made)

    def dequantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        made = _with_dtype(value, torch.float32)
        arguments = (value, *self._ends(before))
        return self.program.emit(float_formats.DEQUANTIZE, arguments, before=before, like=value, value=made)


@dataclass
class RunTimeScales:
    """Dynamic qparams, computed from each tensor at run time."""

    program: Program
    spec: QuantSpec

    def __post_init__(self) -> None:
        self._chosen: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        """By quantized tensor."""

    @property
    def _per_token(self) -> bool:
        return isinstance(self.spec.granularity, PerToken)

    def _choose(self, value: fx.Node, before: fx.Node) -> tuple[fx.Node, fx.Node]:
        spec, kind = self.spec, tensor_type(value)
        if self.uses_torch:
            target = decomposed_ops().choose_qparams.tensor
            arguments: tuple[Any, ...] = (value, spec.qmin, spec.qmax, spec.eps, spec.dtype.storage)
            types = [TensorType(dtype, (1,)) for dtype in (torch.float64, torch.int64)]
        else:
            target = run_time.CHOOSE
            zero_point = middle(spec) if spec.scheme is Scheme.SYMMETRIC else None
            arguments = (value, self._per_token, zero_point, spec.qmin, spec.qmax, spec.eps)
            shape = () if not self._per_token else None if kind is None else (*kind.shape[:-1], 1)
            types = [] if shape is None else [TensorType(dtype, shape) for dtype in (torch.float32, torch.int32)]
        both = TupleType(tuple(types)) if types else None
        choice = self.program.emit(target, arguments, before=before, like=value, value=both)
        items = [
            self.program.emit(
                getitem, (choice, index), before=before, like=value, value=types[index] if types else None
            )
            for index in range(2)
        ]
        return items[0], items[1]

    @property
    def uses_torch(self) -> bool:
        """True if torch has an op that computes these qparams."""
        return not self._per_token and self.spec.scheme is Scheme.AFFINE

    def quantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        chosen = self._choose(value, before)
        ops = decomposed_ops()
        target = ops.quantize_per_token.default if self._per_token else ops.quantize_per_tensor.tensor
        arguments = (value, *chosen, self.spec.qmin, self.spec.qmax, self.spec.dtype.storage)
        made = _with_dtype(value, self.spec.dtype.storage)
        levels = self.program.emit(target, arguments, before=before, like=value, value=made)
        self._chosen[levels] = chosen
        return levels

    def dequantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        ops = decomposed_ops()
        target = ops.dequantize_per_token.default if self._per_token else ops.dequantize_per_tensor.tensor
        arguments: tuple[Any, ...] = (
            value, *self._chosen[value], self.spec.qmin, self.spec.qmax, self.spec.dtype.storage
        )  # fmt: skip
        if self._per_token:
            arguments = (*arguments, torch.float32)
        made = _with_dtype(value, torch.float32)
        return self.program.emit(target, arguments, before=before, like=value, value=made)


def scales_for(program: Program, hint: str, qparams: QParams | None, spec: QuantSpec) -> Scales:
    """The quantization of a group by its spec; dynamic without qparams."""
    if qparams is None:
        return RunTimeScales(program, spec)
    if spec.dtype.is_float:
        return FloatScales(program, hint, qparams, spec)
    kind = GroupedScales if isinstance(spec.granularity, PerGroup) else KnownScales
    return kind(program, hint, qparams, spec)


def _with_dtype(node: fx.Node, dtype: torch.dtype) -> TensorType | None:
    kind = tensor_type(node)
    return None if kind is None else TensorType(dtype, kind.shape)
