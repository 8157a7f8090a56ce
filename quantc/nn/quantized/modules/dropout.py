"""Dropout of quantized tensors: none."""

from typing import Any, Self

from torch import Tensor, nn


class Dropout(nn.Dropout):
    """Identity: dropout does nothing to quantized tensors."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return input

    def _get_name(self) -> str:
        return "QuantizedDropout"

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Self:
        return cls(mod.p, mod.inplace)


__all__ = ["Dropout"]
