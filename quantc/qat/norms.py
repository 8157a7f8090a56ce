"""Batch norms that are folded into the weight before them while they are trained.

In training the weight is multiplied by the norm's folding factor (with the statistics so far), quantized, and divided
again; the norm then works on the batch as it would without quantization. So the rounded weight is the one that the
converted program will hold. Dividing the weight and not the result is the same except for rounding, and costs as many
divisions as there are weights.

In eval mode, and in training once the norm is frozen, weight and bias are folded exactly as by the pass `fuse`, and
nothing is left of the norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantc.qat.freezing import Freezable
from quantc.rewrite.affine_folding import Channels, affine_of_norm, fold_affine


class FoldNorm(Freezable):
    """Weight and bias with the following norm folded in, and the weight's factor if it is to be divided out again."""

    def __init__(self, channels: Channels, eps: float) -> None:
        super().__init__()
        self.channels = channels
        self.eps = eps

    def forward(
        self, w: Tensor, b: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor, var: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self.learns:
            spread = torch.sqrt(var + self.eps)
            factor = torch.reciprocal(spread) if gamma is None else gamma / spread
            # a channel that is switched off has nothing to fold, and could not be divided again
            factor = torch.where(factor == 0, torch.ones_like(factor), factor)
            return w * self.channels.along(w, factor).to(w.dtype), b, factor
        affine = affine_of_norm(gamma, beta, mean, var, self.eps, self.channels.count(w))
        return *fold_affine(w, b, affine, self.channels), None


class UnfoldNorm(nn.Module):
    """A weight divided by `FoldNorm`'s factor."""

    def __init__(self, channels: Channels) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, w: Tensor, factor: Tensor | None) -> Tensor:
        return w if factor is None else w / self.channels.along(w, factor).to(w.dtype)


class LiveNorm(Freezable):
    """A batch norm in training; the identity once it is folded."""

    def __init__(self, eps: float, momentum: float | None) -> None:
        super().__init__()
        self.eps = eps
        self.momentum = momentum

    def forward(
        self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, mean: Tensor, var: Tensor, counter: Tensor | None
    ) -> Tensor:
        if not self.learns:
            return x
        if counter is not None:
            counter.add_(1)
        momentum = self.momentum
        if momentum is None:  # the average of all batches so far
            momentum = 0.0 if counter is None else 1.0 / float(counter)
        return functional.batch_norm(x, mean, var, gamma, beta, True, momentum, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}, momentum={self.momentum}{', frozen' if self.frozen else ''}"
