"""Ops as modules: each has a place for an observer, and a grid once it is converted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantc.errors import QuantcError
from quantc.nn import functional_ops
from quantc.nn.quantized_module import QuantizedModule
from quantc.nn.quantized_tensor import QuantizedTensor

METHODS = ("add", "add_scalar", "mul", "mul_scalar", "cat", "add_relu", "matmul")


class _Functional(nn.Module):
    def forward(self, x: Any) -> Any:
        raise QuantcError(
            f"{type(self).__name__} is not called itself",
            advice=f"call one of its methods: {', '.join(METHODS)}",
        )


class FXFloatFunctional(_Functional):
    """Ops on floats, without observers."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self._result(torch.add(x, y))

    def add_scalar(self, x: Tensor, y: float) -> Tensor:
        return torch.add(x, y)

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        return self._result(torch.mul(x, y))

    def mul_scalar(self, x: Tensor, y: float) -> Tensor:
        return torch.mul(x, y)

    def cat(self, x: list[Tensor], dim: int = 0) -> Tensor:
        return self._result(torch.cat(x, dim))

    def add_relu(self, x: Tensor, y: Tensor) -> Tensor:
        return self._result(functional.relu(torch.add(x, y)))

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        return self._result(torch.matmul(x, y))

    def _result(self, made: Tensor) -> Tensor:
        return made


class FloatFunctional(FXFloatFunctional):
    """Ops on floats, whose results an observer sees once the model is prepared.

    Addition of and multiplication by a number need no observer: they shift or scale the grid of the input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.activation_post_process: nn.Module = nn.Identity()

    def _result(self, made: Tensor) -> Tensor:
        seen: Tensor = self.activation_post_process(made)
        return seen


class QFunctional(QuantizedModule, _Functional):
    """The same ops on quantized tensors."""

    _FLOAT_MODULE: ClassVar[Any] = FloatFunctional
    forward = _Functional.forward

    def __init__(self) -> None:
        super().__init__()
        self.activation_post_process: nn.Module = nn.Identity()

    def add(self, x: Tensor, y: Tensor) -> QuantizedTensor:
        return self._observe(functional_ops.bytewise("add", x, y, self.grid))

    def add_relu(self, x: Tensor, y: Tensor) -> QuantizedTensor:
        return self._observe(functional_ops.bytewise("add relu", x, y, self.grid))

    def mul(self, x: Tensor, y: Tensor) -> QuantizedTensor:
        return self._observe(functional_ops.bytewise("mul", x, y, self.grid))

    def cat(self, x: Sequence[Tensor], dim: int = 0) -> QuantizedTensor:
        return self._observe(functional_ops.cat_on_grid(x, dim, self.grid))

    def matmul(self, x: Tensor, y: Tensor) -> QuantizedTensor:
        return self._observe(functional_ops.in_float(torch.matmul, x, y, grid=self.grid, what="matmul"))

    def add_scalar(self, x: Tensor, y: float) -> QuantizedTensor:
        return functional_ops.plus_scalar(x, y)

    def mul_scalar(self, x: Tensor, y: float) -> QuantizedTensor:
        return functional_ops.times_scalar(x, y)

    def _observe(self, made: QuantizedTensor) -> QuantizedTensor:
        seen: QuantizedTensor = self.activation_post_process(made)
        return seen

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Self:
        made = cls()
        made.put_on_grid(mod.activation_post_process)
        return made

    def extra_repr(self) -> str:
        return self.grid_text()

    def _get_name(self) -> str:
        return "QFunctional"


__all__ = ["FXFloatFunctional", "FloatFunctional", "QFunctional"]
