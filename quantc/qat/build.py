"""Construction of fake quantizers from the groups of a plan."""

from __future__ import annotations

import torch
from torch import fx

from quantc.errors import QuantcError, SpecError
from quantc.ir.decisions import Derived, Fixed
from quantc.ir.plan import Group, Source, spec_of
from quantc.ir.program import Program
from quantc.ir.sites import Site
from quantc.ir.types import tensor_type
from quantc.observe.fixed_qparams import FixedQParams
from quantc.observe.minmax import MinMax
from quantc.observe.moving_average import DEFAULT_RATE, MovingAverage
from quantc.observe.observation_registry import start
from quantc.observe.trained import LEARNED, LsqPlus
from quantc.qat.fake import (
    DerivedScale,
    FakeQuantizer,
    FollowedRange,
    GivenScale,
    LearnedScale,
    OwnRange,
    RunTimeScale,
)
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.granularity import shared_shape
from quantc.spec.numerics import QParams
from quantc.spec.spec import QuantSpec, name_of


class Builder:
    """Builds the fake quantizers of a program, each once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.built: dict[str, FakeQuantizer] = {}
        """By the name of the group."""
        self.averaged: dict[str, int] = {}
        """Number of ranges that follow a moving average although their specs request another observer, by that observer."""
        self._groups: dict[Site, Group] = {site: group for group in program.plan.groups for site in group.places}

    def build(self, group: Group, value: fx.Node) -> FakeQuantizer:
        """Fake quantizer of a group; `value` is one of its tensors."""
        if group.name not in self.built:
            self.built[group.name] = self._new(group, value, self.program.describe(value))
        return self.built[group.name]

    def _new(self, group: Group, value: fx.Node, where: str) -> FakeQuantizer:
        if isinstance(group.outcome, Derived):
            return self._derive(group, group.outcome, value, where)
        spec = spec_of(group)
        if isinstance(group.outcome, Fixed):
            scale = torch.tensor(group.outcome.scale, dtype=torch.float32)
            return GivenScale(group.name, spec, where, QParams(scale, torch.tensor(group.outcome.zero_point)))
        if group.source is Source.RUN_TIME:
            return RunTimeScale(group.name, spec, where)
        if spec.observe.name in LEARNED:
            plus = spec.observe.name == LsqPlus.statistics
            return LearnedScale(group.name, spec, where, _shape(value, spec, where), learns_zero_point=plus)
        if group.source is Source.CONSTANTS:
            return OwnRange(group.name, spec, where)
        return self._follow_range(group, spec, value, where)

    def _follow_range(self, group: Group, spec: QuantSpec, value: fx.Node, where: str) -> FakeQuantizer:
        wanted = start(spec)
        if isinstance(wanted, FixedQParams):
            wanted.seen = 1
            return GivenScale(group.name, spec, where, wanted.qparams(spec, where=where))
        rate: float | None = DEFAULT_RATE
        if isinstance(wanted, MovingAverage):
            rate = wanted.rate
        elif type(wanted) is MinMax:
            rate = None
        else:
            self.averaged[str(spec.observe)] = self.averaged.get(str(spec.observe), 0) + 1
        return FollowedRange(group.name, spec, where, _shape(value, spec, where), rate)

    def _derive(self, group: Group, outcome: Derived, value: fx.Node, where: str) -> FakeQuantizer:
        parents = [self.built.get(self._groups[site].name) for site in outcome.sites]
        known = tuple(parent for parent in parents if parent is not None)
        if len(known) < len(parents):
            raise QuantcError(f"{group.name} is derived from what comes after it", where=where)
        by_channel = any(isinstance(parent.spec.granularity, PerChannel) for parent in known)
        spec = spec_of(group).but(granularity=PerChannel(axis=0)) if by_channel else spec_of(group)
        return DerivedScale(group.name, spec, where, known)


def _shape(value: fx.Node, spec: QuantSpec, where: str) -> torch.Size:
    """The shape of the scales of a tensor."""
    share = spec.granularity
    if isinstance(share, PerTensor):
        return torch.Size(())
    kind = tensor_type(value)
    if not isinstance(share, PerChannel) or kind is None:
        raise SpecError(
            f"{name_of(spec)} cannot be trained: it is {share}",
            where=where,
            advice="train with one scale for a tensor, or one for each channel; run-time scales and weights that are not "
            "learned may be of any kind",
        )
    sizes = [size if isinstance(size, int) else -1 for size in kind.shape]
    if sizes[share.axis] < 0:
        raise SpecError(
            f"{name_of(spec)} cannot be trained: {value.name} is {kind}, and its channels are not fixed",
            where=where,
            advice="capture with that size fixed, or use one scale for the tensor",
        )
    return shared_shape(torch.Size(sizes), share, where=where)
