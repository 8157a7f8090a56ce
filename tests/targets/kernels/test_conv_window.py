"""Views of what convolutions hand on: it lies channels last, and everything that reads it must not see that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import quantc as qc
from quantc.targets.kernels.kernel_agreement import kernel_agreement

SIDE = 6
CLOSE = 0.02
"""How far whole models may be apart, as part of their norm: a few roundings, where a wrong order has it all wrong."""


class Behind(nn.Module):
    """A convolution with an activation, something that moves its result, and a product of whatever shape that has."""

    def __init__(self, move: Callable[[Tensor], Tensor], channels: int, side: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.move = move
        moved = move(torch.zeros(2, channels, side, side))
        makers: dict[int, Any] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
        self.is_image = moved.dim() in makers
        self.last = makers[moved.dim()](moved.shape[1], 5, 1) if self.is_image else nn.Linear(moved.shape[-1], 5)

    def forward(self, x: Tensor) -> Any:
        made: Any = self.last(self.move(self.conv(x).relu()))
        return made


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: x.flatten(1),
    "reshape": lambda x: x.reshape(x.shape[0], -1, 2),
    "view": lambda x: x.contiguous().view(x.shape[0], -1),
    "transpose": lambda x: x.flatten(2).transpose(1, 2),
    "permute": lambda x: x.permute(0, 3, 1, 2),
    "channels behind": lambda x: x.permute(0, 2, 3, 1).flatten(1),
    "unfold": lambda x: x.unfold(2, 2, 2).flatten(1),
    "pixel_unshuffle": lambda x: functional.pixel_unshuffle(x, 2),
    "pixel_shuffle": lambda x: functional.pixel_shuffle(functional.pixel_unshuffle(x, 2), 2),
    "channel_shuffle": lambda x: functional.channel_shuffle(torch.cat([x, x], 1), 2),
    "chunk": lambda x: torch.cat(x.chunk(2, 2)[::-1], 1),
    "split": lambda x: torch.stack(torch.split(x, 3, 3)[:2], 2),
    "cat": lambda x: torch.cat([x, x.transpose(2, 3)], 1),
    "cat of others": lambda x: torch.cat([x, functional.max_pool2d(x, 3, 1, 1)], 1),
    "stack": lambda x: torch.stack([x, x.flip(2)], 2),
    "squeeze": lambda x: functional.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1),
    "squeeze one": lambda x: x.mean((2, 3), keepdim=True).squeeze(3).squeeze(2),
    "mean": lambda x: x.mean((2, 3)),
    "mean of rows": lambda x: x.mean(3).flatten(1),
    "sum": lambda x: x.sum((2, 3)),
    "amax": lambda x: x.amax((2, 3)),
    "max_pool2d": lambda x: functional.max_pool2d(x, 2),
    "max_pool2d with indices": lambda x: functional.max_pool2d(x, 2, return_indices=True)[0],
    "max_pool1d": lambda x: functional.max_pool1d(x.flatten(2), 3, 2),
    "max_pool3d": lambda x: functional.max_pool3d(torch.stack([x, x.flip(2)], 2), 2).flatten(2),
    "adaptive_max_pool2d": lambda x: functional.adaptive_max_pool2d(x, 2),
    "avg_pool2d": lambda x: functional.avg_pool2d(x, 3, 2, 1),
    "avg_pool2d, ceil": lambda x: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avg_pool1d": lambda x: functional.avg_pool1d(x.flatten(2), 3, 2),
    "avg_pool3d": lambda x: functional.avg_pool3d(torch.stack([x, x.flip(2)], 2), 2).flatten(2),
    "adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(x, 4),
    "upsample": lambda x: functional.interpolate(x, scale_factor=2),
    "pad": lambda x: functional.pad(x, (1, 2, 0, 1)),
    "reflect": lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicate": lambda x: functional.pad(x, (1, 1, 1, 1), mode="replicate"),
    "circular": lambda x: functional.pad(x, (1, 1, 1, 1), mode="circular"),
    "roll": lambda x: x.roll(1, 2).flip(3),
    "slice": lambda x: x[:, :, 1::2, :-1],
    "select": lambda x: x[:, :, 1].flatten(1),
    "index_select": lambda x: x.index_select(2, torch.tensor([2, 0, 1])),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "add": lambda x: x + x.flip(2),
    "sub": lambda x: (x - x.flip(3)).relu(),
    "mul": lambda x: x * x.transpose(2, 3),
    "gate": lambda x: x * x.mean((2, 3), keepdim=True),
    "clamp": lambda x: x.clamp(0.1, 0.4),
}
SMALLEST = {"flatten", "view", "channels behind", "cat", "squeeze", "squeeze one", "mean", "sum", "amax", "upsample",
            "pad", "add", "sub", "mul", "gate", "clamp", "transpose", "permute", "repeat", "stack"}  # fmt: skip
"""What can be done to images of one pixel."""


def lowered(model: nn.Module, x: Tensor, **options: Any) -> qc.Lowered:
    prepared = qc.prepare(qc.capture(model.eval(), (x,), **options), "x86")
    qc.calibrate(prepared, [(x,)])
    return qc.lower(qc.convert(prepared, reduce_range="weights"), "x86")


def check(module: qc.Lowered, x: Tensor) -> None:
    found, expected = module(x), module.program(x)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert expected.is_contiguous()
    assert float((found - expected).norm()) <= CLOSE * float(expected.norm()) + 1e-6
    gaps = kernel_agreement(module, x)
    assert all(gap.steps <= 1 and gap.relative <= 2e-6 for gap in gaps), "\n".join(map(str, gaps))
    turned = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(module(turned), found)


@pytest.mark.parametrize("name", MOVES)
def test_what_a_convolution_hands_on(name: str) -> None:
    torch.manual_seed(0)
    for channels, batch in ((40, 3), (1, 1)) if "pool" in name else ((8, 3), (1, 1)):
        model = Behind(MOVES[name], channels, SIDE)
        x = torch.randn(batch, 3, SIDE, SIDE)
        check(lowered(model, x), x)


@pytest.mark.parametrize("name", sorted(SMALLEST))
def test_images_of_one_pixel(name: str) -> None:
    """Their strides say nothing about the order they lie in."""
    torch.manual_seed(0)
    for channels, batch in ((8, 1), (1, 3)) if name in ("flatten", "cat", "gate") else ((8, 1),):
        model = Behind(MOVES[name], channels, 1)
        x = torch.randn(batch, 3, 1, 1)
        check(lowered(model, x), x)


@pytest.mark.parametrize("name", ["flatten", "gate", "avg_pool2d, ceil", "max_pool2d", "cat of others", "add"])
def test_batches_of_other_sizes(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, SIDE, SIDE)
    sizes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    module = lowered(Behind(MOVES[name], 8, SIDE), x, dynamic_shapes=sizes)
    for batch in (1, 2, 7):
        check(module, torch.randn(batch, 3, SIDE, SIDE))


class ThreeAxes(nn.Module):
    """The same in space."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 40, 3, padding=1)
        self.move = move
        self.last = nn.Linear(move(torch.zeros(1, 40, 4, 4, 4)).flatten(1).shape[1], 3)

    def forward(self, x: Tensor) -> Any:
        made: Any = self.last(self.move(self.conv(x).relu()).flatten(1))
        return made


@pytest.mark.parametrize(
    "move",
    [
        lambda x: functional.max_pool3d(x, 3, 2, 1),
        lambda x: functional.avg_pool3d(x, 2),
        lambda x: functional.adaptive_avg_pool3d(x, (2, 1, 3)),
        lambda x: functional.interpolate(x, scale_factor=2),
        lambda x: x.mean((2, 3, 4)),
        lambda x: x + x.flip(4),
    ],
    ids=["max", "average", "adaptive", "upsample", "mean", "add"],
)
def test_what_a_convolution_in_space_hands_on(move: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 2, 4, 4, 4)
    module = lowered(ThreeAxes(move), x)
    found, expected = module(x), module.program(x)
    assert float((found - expected).norm()) <= CLOSE * float(expected.norm())
    assert all(gap.steps <= 1 for gap in kernel_agreement(module, x))


# -- views that are results ------------------------------------------------------------------------------------------


class Ending(nn.Module):
    """A convolution whose result, seen in another way, is that of the model."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.view = nn.Conv2d(3, 8, 3, padding=1), view

    def forward(self, x: Tensor) -> Tensor:
        return self.view(self.conv(x).relu())


class Turned(nn.Module):
    """A linear layer on another order of the axes than the caller's, like that of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIDE, 7)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x.flatten(1, 2).transpose(0, 1))
        return made.transpose(1, 0)


ENDS: dict[str, Callable[[], nn.Module]] = {
    "image": lambda: Ending(lambda x: x),
    "rows": lambda: Ending(lambda x: x.flatten(2)),
    "tokens": lambda: Ending(lambda x: x.flatten(2).transpose(1, 2)),
    "one row": lambda: Ending(lambda x: x[:, :, 1]),
    "split": lambda: Ending(lambda x: x.reshape(x.shape[0], 2, 4, *x.shape[2:]).transpose(1, 2).flatten(3)),
    "turned": Turned,
}


@pytest.mark.parametrize("target", ["x86", "qnnpack"])
@pytest.mark.parametrize("name", ENDS)
def test_results_have_the_strides_of_the_model(name: str, target: str) -> None:
    torch.manual_seed(0)
    model, x = ENDS[name]().eval(), torch.randn(3, 3, SIDE, SIDE)
    prepared = qc.prepare(qc.capture(model, (x,)), target)
    qc.calibrate(prepared, [(x,)])
    program = qc.convert(prepared, reduce_range="weights")
    module = qc.lower(program, target)
    expected = program(x)
    # of a part, the Q/DQ form makes a tensor of its own, where it is quantized before it is taken out
    assert expected.stride() == model(x).stride() or name == "one row"
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        found = [module(given) for _ in range(3)]  # as it is, as one function, from a recording
        assert [made.stride() for made in found] == [expected.stride()] * 3
        assert float((found[0] - expected).norm()) <= CLOSE * float(expected.norm())
