"""Predicted noise, against noise that is measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.calibration.collect import Collect
from quantc.recover.channel_factors import apply, carry
from quantc.recover.channel_groups import ChannelGroups
from quantc.recover.noise_model import noise_model
from tests.support.spread_nets import collected, images, mobile


def test_the_noise_of_weights_is_that_of_the_rounded_layer() -> None:
    """For a layer at the end, the mean square of its output's change: by torch, on the odd batches."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    model, data = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), layer).eval(), [torch.randn(500, 6) for _ in range(4)]
    prepared = collected(model, data)
    model_noise = noise_model(prepared, ChannelGroups.of(prepared))
    one = torch.ones(ChannelGroups.of(prepared).count + 1, dtype=torch.float64)
    found = model_noise.layers[-1].of(one)
    step = layer.weight.detach().abs().max() / 127.5
    change = (layer.weight.detach() / step).round().clamp(-128, 127) * step - layer.weight.detach()
    read = torch.cat([model[:2](x) for x in data[1::2]]).detach()
    fit = torch.cat([model[:2](x) for x in data[::2]]).detach()
    expected = (read @ change.T).square().mean(0).sum() / (fit @ layer.weight.detach().T).square().mean(0).sum()
    torch.testing.assert_close(found, float(expected), rtol=0.05, atol=0)


def test_the_noise_of_a_tensor_is_that_of_uniform_steps() -> None:
    """A tensor on 256 levels, read by one layer: within a tenth of what rounding it adds."""
    torch.manual_seed(0)
    two, data = nn.Linear(16, 4), [torch.randn(500, 6) for _ in range(4)]
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), two).eval()
    prepared = collected(model, data)
    groups = ChannelGroups.of(prepared)
    (found,) = (each for each in noise_model(prepared, groups).tensors if each.node.name != "input_1")
    noise = found.of(torch.ones(groups.count + 1, dtype=torch.float64))
    read = torch.cat([model[:2](x) for x in data[1::2]]).detach()
    step = float(read.max()) / 255
    last = two.weight.detach()
    added = (((read / step).round() * step - read) @ last.T).square().mean(0).sum()
    power = (torch.cat([model[:2](x) for x in data[::2]]).detach() @ last.T).square().mean(0).sum()
    # zeros are rounded to themselves, so there is less noise than that of uniform numbers
    assert 0.4 < float(added / power) / noise < 1.1


def test_noise_is_the_same_in_a_program_that_has_the_factors() -> None:
    """What the statistics of the program without them predict is what those with them do."""
    prepared = collected(mobile(), images(1))
    groups, other = ChannelGroups.of(prepared), prepared.clone()
    powers = torch.randint(-3, 4, (groups.count,), generator=torch.Generator().manual_seed(0))
    factors = torch.cat([torch.exp2(powers.double()), torch.ones(1, dtype=torch.float64)])
    same_groups = ChannelGroups.of(other)
    apply(other, same_groups, factors)
    carry(other, same_groups, factors)
    before, after = noise_model(prepared, groups), noise_model(other, same_groups)
    one = torch.ones_like(factors)
    pairs: list[Any] = [
        *zip(before.layers, after.layers, strict=True),
        *zip(before.tensors, after.tensors, strict=True),
    ]
    for part, same in pairs:
        assert abs(part.of(factors) / same.of(one) - 1) < 1e-4, part.node.name
        assert part.of(one) != part.of(factors) or not bool((factors[part.own] != 1).any())


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.two(torch.relu(self.one(x)))
        return result


def test_what_cannot_be_priced_says_why() -> None:
    data = images(1)
    prepared = collected(Transposed().eval(), data)
    assert "conv_transpose2d" not in str(noise_model(prepared, ChannelGroups.of(prepared)).unknown)
    prepared.plan.collected = {}
    less = Collect(statistics="recover", without=("conv_transpose2d",))
    qc.calibrate(prepared, data, collect=less, progress="silent")
    same = qc.recover(prepared, "equalize", batches=data, progress="silent")
    assert not same.log[-1].changed
    assert "nothing is known of the rows that conv_transpose2d" in str(same.recovery())
