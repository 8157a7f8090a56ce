"""Gram matrix between what a layer reads in the quantized and in the float model."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor

from quantc.observe.gram import Gram
from quantc.spec.statistic import Change


class CrossGram(Gram):
    """The Gram of both tensors side by side. Each row is one of the quantized model, then one of the float model."""

    __slots__ = ()

    statistics: ClassVar[str] = "cross-gram"

    def update_pair(self, quantized: Tensor, floats: Tensor, *, batch: int = 0, where: str = "") -> None:
        """Add the rows of one batch of both models, `[groups, rows, channels]`."""
        self.update(torch.cat([quantized, floats], dim=2), batch=batch, where=where)

    def of_quantized(self) -> Tensor:
        """Σ x̂ᵀx̂, `[groups, channels, channels]`."""
        half = self.mean().shape[1] // 2
        return self.matrix()[:, :half, :half]

    def across(self) -> Tensor:
        """Σ x̂ᵀx, `[groups, channels, channels]`."""
        half = self.mean().shape[1] // 2
        return self.matrix()[:, :half, half:]

    def carried(self, by: Change) -> Self | None:
        """None: a change of the weights changes what the quantized model gives."""
