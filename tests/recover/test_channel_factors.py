"""Factors in a program: taken back to the bit, and known to all that is kept of its tensors."""

from __future__ import annotations

import torch

from quantc.recover.channel_factors import apply, changes, is_changed, ranges_to_see
from quantc.recover.channel_groups import ChannelGroups
from tests.support.spread_nets import collected, images, mobile

DATA = images(1, 2)


def test_applied_and_taken_back() -> None:
    program = collected(mobile(), DATA)
    before = {name: value.clone() for name, value in program.root.state_dict().items()}
    groups = ChannelGroups.of(program)
    factors = torch.full((groups.count + 1,), 3.0, dtype=torch.float64)
    factors[-1] = 1
    applied = apply(program, groups, factors)
    after = program.root.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(applied.before)
    applied.undo(program)
    assert all(torch.equal(before[name], value) for name, value in program.root.state_dict().items())


def test_only_what_has_a_factor_must_be_seen_again() -> None:
    program = collected(mobile(), DATA)
    groups = ChannelGroups.of(program)
    one = torch.ones(groups.count + 1, dtype=torch.float64)
    assert ranges_to_see(program, groups, one) == []
    assert all(bool((change == 1).all()) for change in changes(program, groups, one).values())
    moved = one.clone()
    moved[groups.groups[1].classes] = 2.0
    names = ranges_to_see(program, groups, moved)
    assert 0 < len(names) < len(program.plan.statistics)
    places = {str(site): site for group in program.plan.groups for site in group.values}
    touched = {node for node, labels in groups.tensors.items() if is_changed(labels, moved)}
    assert all(any(node.name in name for node in touched) for name in names), places
