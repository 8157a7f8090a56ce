"""Factors of channels, put into a program: constants absorb them, and what is known of its tensors is carried along."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from quantc.calibration.collect import OF_ROWS, channels_of, key_of
from quantc.calibration.layer_inputs import LayerInput, layer_inputs
from quantc.ir.dialect import row_of
from quantc.ir.plan import Source
from quantc.ir.program import Program, attribute
from quantc.ir.site_index import Places
from quantc.recover.channel_classes import Labels
from quantc.recover.channel_groups import ChannelGroups, Use
from quantc.spec.statistic import Scale


@dataclass(frozen=True, slots=True)
class Applied:
    """What putting factors in has changed."""

    before: dict[str, tuple[fx.Node, Tensor]]
    """Constants as they were, by name."""

    def undo(self, program: Program) -> None:
        for node, tensor in self.before.values():
            put(program, node, tensor)


def put(program: Program, node: fx.Node, value: Tensor) -> None:
    """Give a constant that nothing else reads another value."""
    old = program.tensor(node)
    owner = program.owner(node.graph)
    parent, _, leaf = str(node.target).rpartition(".")
    holder = attribute(owner, parent) if parent else owner
    is_parameter = isinstance(old, nn.Parameter) and not isinstance(value, nn.Parameter)
    setattr(holder, leaf, nn.Parameter(value, requires_grad=False) if is_parameter else value)
    program.touch()


def apply(program: Program, groups: ChannelGroups, factors: Tensor) -> Applied:
    """Let constants absorb factors, one for each class and a last of 1: in float64, rounded once."""
    before: dict[str, tuple[fx.Node, Tensor]] = {}
    for node, change in changes(program, groups, factors).items():
        tensor = program.tensor(node)
        if tensor is None or bool((change == 1).all()):
            continue
        before[str(node.target)] = node, tensor
        put(program, node, (tensor.detach().double() * change).to(tensor.dtype))
    return Applied(before)


def changes(program: Program, groups: ChannelGroups, factors: Tensor) -> dict[fx.Node, Tensor]:
    """What each constant is multiplied by."""
    found: dict[fx.Node, Tensor] = {}
    for use in groups.uses:
        change = _change(use, factors)
        found[use.constant] = found[use.constant] * change if use.constant in found else change
    return found


def _change(use: Use, factors: Tensor) -> Tensor:
    one = torch.ones((), dtype=factors.dtype)
    up = one if use.up is None else factors[torch.from_numpy(use.up)]
    return up if use.down is None else up / factors[torch.from_numpy(use.down)]


def is_changed(labels: Labels | None, factors: Tensor) -> bool:
    """True if a channel of a tensor has a factor."""
    return labels is not None and bool((factors[torch.from_numpy(labels)] != 1).any())


def ranges_to_see(program: Program, groups: ChannelGroups, factors: Tensor) -> list[str]:
    """The groups of the plan, by name, whose ranges factors change: which the data must show again."""
    places = Places(program)
    return [
        group.name
        for group in program.plan.groups
        if group.source is Source.DATA
        and group.name in program.plan.statistics
        and any(is_changed(groups.tensors.get(places.node(site)), factors) for site in group.values)
    ]


def carry(program: Program, groups: ChannelGroups, factors: Tensor) -> list[str]:
    """Carry what was collected over to tensors with factors. Return the keys of what was dropped, as only the data would
    tell."""
    collected, dropped = program.plan.collected, []
    for keys, by in _scales(program, groups, factors):
        for key in keys:
            if (known := collected.get(key)) is None:
                continue
            found = known.carried(by)
            if found is None:
                del collected[key]
                dropped.append(key)
            else:
                collected[key] = found
    return dropped


def _scales(program: Program, groups: ChannelGroups, factors: Tensor) -> Iterator[tuple[list[str], Scale]]:
    """The keys of statistics, and how the channels that they are of are scaled."""
    places, done = Places(program), set()
    for rows in layer_inputs(program):
        labels = groups.tensors.get(rows.value)
        if labels is not None and is_changed(labels, factors):
            kernel = () if rows.window is None else rows.window.kernel
            own = by_channel(labels, rows, factors)
            patches = own.reshape(rows.groups, -1, 1).expand(-1, -1, torch.Size(kernel).numel() if kernel else 1)
            yield [key_of(kind, rows.name) for kind in OF_ROWS], Scale(patches.reshape(rows.groups, rows.width))
            key = key_of("extremes", channels_of(rows.site, rows.axis))
            if key not in done:
                done.add(key)
                yield [key], Scale(own.reshape(1, -1))
        for node in rows.readers:
            row, labels = row_of(node), groups.tensors.get(node)
            if labels is not None and row is not None and is_changed(labels, factors):
                shape = labels.shape[-1 - (row.spatial or 0)]
                own = factors[torch.from_numpy(labels.reshape(shape).copy())]
                yield [key_of("fisher", str(places.out(node)))], Scale(1 / own.reshape(1, -1))


def by_channel(labels: Labels, rows: LayerInput, factors: Tensor) -> Tensor:
    """The factor of each channel that layers read."""
    kernel = 1 if rows.window is None else torch.Size(rows.window.kernel).numel()
    width = rows.groups * rows.width // kernel
    own = factors[torch.from_numpy(labels)]
    lead = [0 if axis != own.dim() + rows.axis else slice(None) for axis in range(own.dim())]
    return own[tuple(lead)].expand(width)
