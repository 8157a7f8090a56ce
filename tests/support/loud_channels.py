"""A norm before a gate, two of whose channels are large: what smoothing is for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.streams import HIDDEN, DecomposedRms

LOUD = (3, 8)
FACTOR = 48.0


def batches(seed: int = 0) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 5, HIDDEN, generator=generator),) for _ in range(6)]


class Gate(nn.Module):
    """A norm before a gated pair of linears, and one behind."""

    def __init__(self, norm: nn.Module, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = norm
        self.gate, self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(HIDDEN, 24), nn.Linear(24, 4)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        hidden = F.silu(self.gate(normal)) * self.up(normal)
        out: Tensor = self.down(hidden) + (normal.mean(-1, keepdim=True) if self.twice else 0)
        return out


def loud(model: nn.Module, names: tuple[str, ...] = ("gate", "up")) -> nn.Module:
    """Two channels of the norm's result are large, and their columns are small: the same function as before."""
    with torch.no_grad():
        gain = model.get_parameter("norm.weight")
        one = isinstance(model.get_submodule("norm"), DecomposedRms)
        for channel in LOUD:
            gain[channel] = FACTOR - one
            for name in names:
                model.get_parameter(f"{name}.weight")[:, channel] /= FACTOR
    return model.eval()
