"""The descent on predicted noise: a known optimum, scale invariance, and limits."""

from __future__ import annotations

import torch
from torch import nn

from quantc.recover.channel_groups import ChannelGroups
from quantc.recover.equalizing import best_factors
from quantc.recover.noise_model import NoiseModel, noise_model
from tests.support.spread_nets import collected


def pair(sizes: torch.Tensor) -> tuple[NoiseModel, ChannelGroups, torch.Tensor]:
    """Two linears whose channels in between have sizes that the second undoes."""
    torch.manual_seed(0)
    one, two = nn.Linear(6, 8), nn.Linear(8, 4)
    model = nn.Sequential(one, nn.ReLU(), two).eval()
    with torch.no_grad():
        one.weight.mul_(sizes.unsqueeze(1))
        one.bias.mul_(sizes)
        two.weight.div_(sizes)
    prepared = collected(model, [torch.randn(64, 6, generator=torch.Generator().manual_seed(i)) for i in range(4)])
    groups = ChannelGroups.of(prepared)
    (movable,) = (group.classes for group in groups.groups if group.is_movable)
    return noise_model(prepared, groups), groups, torch.from_numpy(movable)


def limits(groups: ChannelGroups) -> torch.Tensor:
    return torch.from_numpy(groups.limits)


def test_sizes_that_cancel_are_found() -> None:
    """Whatever the sizes were, what is found takes them away, up to one common factor: the descent is convex."""
    plain = best_factors(*_asked(pair(torch.ones(8))))
    sizes = torch.exp2(torch.tensor([0.0, -6, 3, 1, -2, 5, 0, -1]))
    found = best_factors(*_asked(pair(sizes)))
    apart = found + sizes.log2() - plain
    assert float((apart - apart.mean()).abs().max()) < 0.25


def _asked(
    found: tuple[NoiseModel, ChannelGroups, torch.Tensor],
) -> tuple[NoiseModel, torch.Tensor, torch.Tensor]:
    model, groups, movable = found
    return model, limits(groups), movable


def test_it_is_less_noise_than_there_was() -> None:
    model, groups, movable = pair(torch.exp2(torch.arange(8.0) - 4))
    found = best_factors(model, limits(groups), movable)
    factors = torch.cat([torch.exp2(found), torch.ones(1, dtype=torch.float64)])
    one = torch.ones_like(factors)
    before, after = (sum(part.of(each) for part in model.parts(movable)) for each in (one, factors))
    assert after < before / 8


def test_no_factor_is_above_its_limit_and_what_is_not_movable_is_left() -> None:
    model, groups, movable = pair(torch.exp2(torch.arange(8.0) - 4))
    most = torch.ones(groups.count, dtype=torch.float64)
    assert float(best_factors(model, most, movable).max()) <= 0
    only = best_factors(model, limits(groups), movable[:3])
    assert bool((only[movable[3:]] == 0).all())
    assert bool((best_factors(model, limits(groups), movable[:0]) == 0).all())
