"""Normalisation layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Case, floats, tags


class ConvNorm(nn.Module):
    """A convolution followed by the norm under test."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = norm

    def forward(self, x: Tensor) -> Any:
        return F.relu(self.norm(self.conv(x)))


class BatchNorms(nn.Module):
    """One, two and three dimensions; with unusual eps and momentum, and without affine parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.BatchNorm1d(6, eps=1e-2, momentum=0.3)
        self.sequence = nn.BatchNorm1d(3, affine=False)
        self.image = nn.BatchNorm2d(3, momentum=0.05)
        self.volume = nn.BatchNorm3d(3)

    def forward(self, x: Tensor) -> Any:
        y = self.flat(x).view(-1, 3, 2)
        y = self.image(self.sequence(y).unsqueeze(-1))
        return self.volume(y.unsqueeze(-1))


class LayerNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LayerNorm(6)
        self.both = nn.LayerNorm([4, 6], elementwise_affine=False, eps=1e-3)
        self.no_bias = nn.LayerNorm(6, bias=False)
        self.rms = nn.RMSNorm(6)
        self.weight = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x: Tensor) -> Any:
        y = self.rms(self.no_bias(self.both(self.last(x))))
        y = F.layer_norm(y, (6,), self.weight) + F.rms_norm(y, [6], self.weight, eps=1e-4)
        return y + F.layer_norm(x, x.shape[-1:])


class HandWrittenNorms(nn.Module):
    """The same norms as user code spells them out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6) + 0.5)
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Any:
        u = x.mean(-1, keepdim=True)
        s = (x - u).pow(2).mean(-1, keepdim=True)
        layer = self.weight * ((x - u) / torch.sqrt(s + 1e-6)) + self.bias
        rms = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return layer + rms.to(x.dtype)


class FrozenBatchNorm(nn.Module):
    """Detection models' batch norm: four buffers and arithmetic."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        for name in ("weight", "var"):
            self.register_buffer(name, torch.rand(6) + 0.5)
        for name in ("bias", "mean"):
            self.register_buffer(name, torch.randn(6))

    def forward(self, x: Tensor) -> Any:
        scale = self.weight.reshape(1, -1, 1, 1) * (self.var.reshape(1, -1, 1, 1) + 1e-5).rsqrt()
        shift = self.bias.reshape(1, -1, 1, 1) - self.mean.reshape(1, -1, 1, 1) * scale
        return self.conv(x) * scale + shift


class FunctionalNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Any:
        y = F.group_norm(x, 3, self.weight) + F.instance_norm(x, weight=self.weight, bias=self.weight)
        return y + F.local_response_norm(x, 2) + F.normalize(x, p=1.0, dim=1)


IMAGE = floats(3, 8, 8)

CASES = (
    Case("group_norm", lambda: ConvNorm(nn.GroupNorm(2, 6)), IMAGE, tags=tags("norm", "train")),
    Case("instance_norm", lambda: ConvNorm(nn.InstanceNorm2d(6)), IMAGE, tags=tags("norm")),
    Case("instance_norm_affine", lambda: ConvNorm(nn.InstanceNorm2d(6, affine=True)), IMAGE, tags=tags("norm")),
    Case(
        "instance_norm_tracking",
        lambda: ConvNorm(nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
        IMAGE,
        tags=tags("norm"),
    ),
    Case(
        "batch_norm_no_stats", lambda: ConvNorm(nn.BatchNorm2d(6, track_running_stats=False)), IMAGE, tags=tags("norm")
    ),
    Case("batch_norms", BatchNorms, floats(6), tags=tags("norm", "train")),
    Case("layer_norms", LayerNorms, floats(4, 6), tags=tags("norm")),
    Case("hand_written_norms", HandWrittenNorms, floats(4, 6), tags=tags("norm")),
    Case("frozen_batch_norm", FrozenBatchNorm, IMAGE, tags=tags("norm")),
    Case("functional_norms", FunctionalNorms, floats(6, 5, 5), tags=tags("norm")),
)
