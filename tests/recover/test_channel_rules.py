"""Random nets: whatever is found to be movable is, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import quantc as qc
from tests.support.channel_nets import with_factors

Step = Callable[[Tensor], Tensor]
WIDTH = 8


class Net(nn.Module):
    """Steps on images of eight channels; some read an earlier result again."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.kinds = kinds
        self.layers = nn.ModuleList([self._layer(kind) for kind in kinds])
        self.first, self.head = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Linear(WIDTH, 4)

    @staticmethod
    def _layer(kind: str) -> nn.Module:
        layers: dict[str, Callable[[], nn.Module]] = {
            "conv": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            "grouped": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=2, bias=False),
            "depthwise": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
            "transposed": lambda: nn.ConvTranspose2d(WIDTH, WIDTH, 1, groups=4),
            "norm": lambda: nn.GroupNorm(2, WIDTH),
            "batch norm": lambda: nn.BatchNorm2d(WIDTH),
            "prelu": lambda: nn.PReLU(WIDTH),
        }
        return layers.get(kind, nn.Identity)()

    def forward(self, x: Tensor) -> Tensor:
        x = earlier = self.first(x)
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x, earlier = self._step(kind, layer(x), earlier), x
        result: Tensor = self.head(x.mean((2, 3)))
        return result

    @staticmethod
    def _step(kind: str, x: Tensor, earlier: Tensor) -> Tensor:
        steps: dict[str, Callable[[], Tensor]] = {
            "relu": lambda: F.relu(x),
            "relu6": lambda: F.relu6(x),
            "leaky": lambda: F.leaky_relu(x, 0.1),
            "sigmoid": lambda: torch.sigmoid(x),
            "add": lambda: x + earlier,
            "sub": lambda: earlier - 2 * x,
            "mul": lambda: x * earlier,
            "gate": lambda: x * torch.sigmoid(earlier.mean((2, 3), keepdim=True)),
            "max": lambda: torch.maximum(x, earlier),
            "where": lambda: torch.where(earlier > 0, x, torch.zeros(())),
            "pool": lambda: F.max_pool2d(x, 3, 1, 1),
            "average": lambda: F.avg_pool2d(x, 3, 1, 1),
            "cat": lambda: torch.cat([x, earlier], 1)[:, 4 : 4 + WIDTH],
            "shuffle": lambda: F.channel_shuffle(x, 4),
            "flip": lambda: x.flip(1),
            "roll": lambda: torch.roll(x, 1, 1),
            "fold": lambda: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
            "permute": lambda: x.permute(0, 2, 3, 1).reshape(2, 16, WIDTH).transpose(1, 2).reshape(x.shape),
            "transpose": lambda: x.transpose(2, 3),
            "pad": lambda: F.pad(x, (1, 0, 0, 0))[..., :-1],
            "number": lambda: x + 0.5,
            "half": lambda: x / 2,
            "abs": lambda: -x.abs(),
            "stack": lambda: torch.stack([x, earlier], 2).amax(2),
            "heads": lambda: (x.reshape(2, 2, 4, 16).softmax(-1) @ x.reshape(2, 2, 4, 16).mT @ x.reshape(2, 2, 4, 16)
                              ).reshape(x.shape),
        }  # fmt: skip
        return steps[kind]() if kind in steps else x


KINDS = (
    "conv", "grouped", "depthwise", "transposed", "norm", "batch norm", "prelu", "relu", "relu6", "leaky", "sigmoid", "add",
    "sub", "mul", "gate", "max", "where", "pool", "average", "cat", "shuffle", "flip", "roll", "fold", "permute",
    "transpose", "pad", "number", "half", "abs", "stack", "heads",
)  # fmt: skip


def keeps_its_bits(kinds: list[str], seed: int) -> None:
    torch.manual_seed(seed)
    net, x = Net(kinds).eval(), torch.randn(2, 3, 4, 4)
    program = qc.pipelines.inference().run_on_copy(qc.capture(net, (x,), "fx", dynamic_shapes=None))
    other, _ = with_factors(program, seed)
    torch.testing.assert_close(other(x), program(x), rtol=0, atol=0)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from(KINDS), max_size=8), st.integers(0, 100))
def test_random_nets_keep_their_bits(kinds: list[str], seed: int) -> None:
    keeps_its_bits(kinds, seed)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(KINDS), min_size=4, max_size=16), st.integers(0, 10**6))
def test_long_random_nets_keep_their_bits(kinds: list[str], seed: int) -> None:
    keeps_its_bits(kinds, seed)
