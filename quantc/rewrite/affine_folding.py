"""Folding of per-channel affine maps `scale[c] * x + shift[c]` into the preceding convolution or linear.

In float64, rounded once. Training folds with the same functions as the pass `fuse`, so that both give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from quantc.ir.dialect import argument, op_name


@dataclass(frozen=True)
class Affine:
    """The per-channel affine map of a folded node: `scale[c] * x + shift[c]`, in float64."""

    scale: Tensor
    shift: Tensor


@dataclass(frozen=True)
class Channels:
    """Layout of a weight's output channels: axis 0; axis 1, and by group, for transposed convolutions."""

    transposed: bool = False
    groups: int = 1

    @staticmethod
    def of(producer: fx.Node) -> Channels:
        """The channel layout of a convolution or linear."""
        if not op_name(producer).startswith("conv_transpose"):
            return Channels()
        return Channels(True, int(argument(producer, "groups")))

    def count(self, weight: Tensor) -> int:
        return weight.shape[1] * self.groups if self.transposed else weight.shape[0]

    def along(self, weight: Tensor, values: Tensor) -> Tensor:
        """One value a channel, broadcast to the weight."""
        if not self.transposed:
            return values.reshape(-1, *[1] * (weight.dim() - 1))
        inputs_a_group = weight.shape[0] // self.groups
        by_group = values.reshape(self.groups, 1, -1).expand(-1, inputs_a_group, -1)
        return by_group.reshape(weight.shape[0], weight.shape[1], *[1] * (weight.dim() - 2))


def affine_of_norm(
    gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None, var: Tensor | None, eps: float, channels: int
) -> Affine:
    """The affine map of a batch norm with fixed statistics."""

    def read(value: Tensor | None, absent: float) -> Tensor:
        return torch.full((channels,), absent, dtype=torch.float64) if value is None else value.double()

    scale = read(gamma, 1.0) / torch.sqrt(read(var, 1.0) + eps)
    return Affine(scale, read(beta, 0.0) - read(mean, 0.0) * scale)


def fold_affine(weight: Tensor, bias: Tensor | None, affine: Affine, channels: Channels) -> tuple[Tensor, Tensor]:
    """Weight and bias with an affine map folded in."""
    new_weight = (weight.double() * channels.along(weight, affine.scale)).to(weight.dtype)
    old_bias = torch.zeros_like(affine.shift) if bias is None else bias.double()
    return new_weight, (old_bias * affine.scale + affine.shift).to(weight.dtype)
