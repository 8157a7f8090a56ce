"""Weights as stored: plain tensors of a kernel, and their dequantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantc.integer.ops.weight_only import stored_weight
from quantc.targets.kernels.kernel import Kernel, Work
from quantc.targets.kernels.kernel_table import Call


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """Constants of a weight-only op."""

    w: Tensor
    scale: Tensor | None
    zero_point: Tensor | None
    axis: int | None
    group_size: int | None
    shape: list[int] | None = None
    order: list[int] | None = None
    transposed: bool = False
    """True if the outputs lie on the last axis of a matrix instead of the first."""

    @staticmethod
    def of(call: Call) -> StoredWeight:
        scale, zero_point = (None if call[name] is None else call.tensor(name) for name in ("scale", "zero_point"))
        axis, group_size, shape, order = (call[name] for name in ("axis", "group_size", "shape", "order"))
        weight = (call.tensor("w"), scale, zero_point, axis, group_size, shape, order)
        return StoredWeight(*weight, transposed=bool(call["transposed"]))

    def real(self) -> Tensor:
        """The dequantized float32 weight: contiguous, in new memory."""
        made = self._with_scale(self.scale).contiguous()
        return made.clone() if made is self.w else made

    def levels(self) -> Tensor:
        """Levels minus zero points, without scales, as float32."""
        return self._with_scale(None)

    def _with_scale(self, scale: Tensor | None) -> Tensor:
        return stored_weight(self.w, scale, self.zero_point, self.axis, self.group_size, self.shape, self.order)

    def rows(self, matrix: Tensor) -> Tensor:
        """A matrix of the weight's shape, with one row per output."""
        return matrix.t() if self.transposed else matrix

    @property
    def outputs(self) -> int:
        return self._sizes[1 if self.transposed else 0]

    @property
    def inputs(self) -> int:
        return self._sizes[0 if self.transposed else 1]

    @property
    def _sizes(self) -> list[int]:
        sizes = list(self.w.shape) if self.shape is None else self.shape
        return sizes if self.order is None else [sizes[axis] for axis in self.order]

    @property
    def row_scale(self) -> Tensor | None:
        """Scale of each output; None if there is none, or several per output."""
        if self.scale is None or self.group_size is not None:
            return None
        if not self.scale.dim():
            return self.scale.expand(self.outputs)
        is_by_output = self.axis == (1 if self.transposed else 0) and self.order is None
        return self.scale if is_by_output else None


class WeightOnly(Kernel):
    """Kernel with a stored weight, which its state dict holds unchanged."""

    def __init__(self, weight: StoredWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        for name, tensor in (("w", weight.w), ("scale", weight.scale), ("zero_point", weight.zero_point)):
            self.register_buffer(name, tensor)
        self.register_buffer("bias", bias)
        self._rest: tuple[Any, ...] = (weight.axis, weight.group_size, weight.shape, weight.order, weight.transposed)

    def work(self, *inputs: Tensor) -> Work | None:
        weight = self.stored
        if not inputs or weight.w.dim() != 2:
            return None
        form = f"{str(weight.w.dtype).removeprefix('torch.')}{'' if weight.group_size is None else ' in groups'}"
        rows = inputs[0].numel() // max(weight.inputs, 1)
        return Work(f"linear_weight_only {form}", rows, (weight.inputs, weight.outputs))

    @property
    def stored(self) -> StoredWeight:
        scale, zero_point = self.optional_buffer("scale"), self.optional_buffer("zero_point")
        return StoredWeight(self.get_buffer("w"), scale, zero_point, *self._rest)
