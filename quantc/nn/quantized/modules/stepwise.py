"""LSTMs and attention of several quantized steps: what `quantc.nn.quantizable` has becomes these."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from quantc.errors import RefusedError
from quantc.nn import quantizable
from quantc.nn.quantized_tensor import quantize_per_tensor

SWAP_STEPS: list[Callable[[nn.Module], object]] = []
"""The eager flow's `convert`, for the steps of an observed module; empty until that flow is imported."""


class _OfSteps(nn.Module):
    """A module whose steps are quantized modules."""

    _FLOAT_MODULE: ClassVar[Any] = None  # it is made of one that was observed

    @classmethod
    def from_observed(cls, other: nn.Module) -> Self:
        """The quantized form of one that was observed: its steps are swapped, one by one."""
        if type(other) is not cls.__mro__[2] or not SWAP_STEPS:
            raise RefusedError(
                f"{cls.__name__} is made of an observed {cls.__mro__[2].__name__}, and was given {type(other).__name__}",
                where=f"{cls.__name__}.from_observed",
                advice="prepare and calibrate the model first",
            )
        made: Any = copy.deepcopy(other)
        SWAP_STEPS[0](made)
        made.__class__ = cls
        return made.eval()  # type: ignore[no-any-return]

    @classmethod
    def from_float(cls, other: nn.Module, use_precomputed_fake_quant: bool = False) -> Self:
        raise RefusedError(
            f"{cls.__name__} is not made of a float module in one step: its steps are observed first",
            where=f"{cls.__name__}.from_float",
            advice=f"write quantizable.{cls.__name__}.from_float(module), prepare, calibrate and convert",
        )

    def _get_name(self) -> str:
        return f"Quantized{type(self).__name__}"


class LSTM(_OfSteps, quantizable.LSTM):
    """An LSTM on quantized tensors: each step is quantized linear layers, sums and products."""


class MultiheadAttention(_OfSteps, quantizable.MultiheadAttention):
    """Attention whose four projections are on quantized tensors, and in float between them."""

    def show(self, weights: Tensor) -> Tensor:
        """The weights of attention on the grid of 0..1, which is theirs whatever the data."""
        return quantize_per_tensor(weights, 1 / 256, 0)


__all__ = ["LSTM", "MultiheadAttention"]
