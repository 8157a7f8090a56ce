"""Computation of each group's scale and zero point from the plan's statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from quantc.calibration.underflow import COARSE, coarse_channels, coarse_groups
from quantc.errors import CalibrationError, DataError, QuantcError, SpecError
from quantc.integer.proof.range_reduction import RangeReduction, Reduction
from quantc.ir.decisions import Derived, Fixed, Quantize
from quantc.ir.plan import Group, Source, spec_of
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.ir.sites import Site
from quantc.ir.types import is_empty
from quantc.observe.observation_registry import start
from quantc.observe.trained import Trained
from quantc.spec.numerics import QParams, fit_weight_scale, scale_product, to_significant_bits, why_not_scale
from quantc.spec.observation import Observation
from quantc.spec.spec import QuantSpec
from quantc.support.finite_tensors import check_scales


def find_qparams(program: Program, reduce_range: RangeReduction = "auto") -> tuple[dict[str, QParams], list[str]]:
    """Qparams of every group by name, and notes on them.

    With `reduce_range` they exclude overflow of sums of two products. Groups whose activations get a narrower range
    have it in the plan from then on.
    """
    places = Places(program)
    found = own_qparams(program, places)
    of_site: dict[Site, str] = {site: group.name for group in program.plan.groups for site in group.places}
    notes = [f"{COARSE}{told}" for told in (*coarse_groups(program), *_coarse_weights(program, places, found))]
    notes += _reduce_ranges(program, places, found, reduce_range)
    for group in program.plan.groups:
        if isinstance(group.outcome, Derived):
            parents = [of_site[site] for site in group.outcome.sites]
            _refuse_groups(program, group, [found[parent] for parent in parents], places)
            notes += _make_room(program, group, parents, found, places)
            found[group.name] = scale_product(*(found[parent] for parent in parents))
    for group in program.plan.groups:
        if group.name in found:
            check_scales(found[group.name].scale, group.name, program.describe(places.value(group.places[0])))
    return found, notes


def own_qparams(program: Program, places: Places) -> dict[str, QParams]:
    """Qparams of the groups that statistics, constants or the plan itself decide, before any range is reduced."""
    return {
        group.name: _qparams(program, group, places)
        for group in program.plan.groups
        if group.source not in (Source.DERIVED, Source.RUN_TIME)
    }


def _reduce_ranges(program: Program, places: Places, found: dict[str, QParams], what: RangeReduction) -> list[str]:
    """Reduce ranges where requested and needed; return notes."""
    reduction = Reduction(program, places, found)
    reduction.run(what)
    groups = [
        replace(group, outcome=Quantize(reduction.specs[group.name])) if group.name in reduction.specs else group
        for group in program.plan.groups
    ]
    program.plan.groups = tuple(groups)
    for group in groups:
        if group.name in reduction.specs and group.source is not Source.RUN_TIME:
            found[group.name] = _qparams(program, group, places)
    return reduction.notes


def _coarse_weights(program: Program, places: Places, found: dict[str, QParams]) -> Iterator[str]:
    """Notes on weights whose scale the smallest allowed one clamps."""
    for group in program.plan.groups:
        if group.source is not Source.CONSTANTS or not isinstance(group.outcome, Quantize):
            continue
        spec = group.outcome.spec
        if not bool((found[group.name].scale <= torch.tensor(spec.eps)).any()):
            continue
        weight = program.tensor(places.node(group.values[0]))
        told = None if weight is None else coarse_channels(spec, weight)
        if told is not None:
            yield f"{program.describe(places.value(group.places[0]))}: {told}"


def _qparams(program: Program, group: Group, places: Places) -> QParams:
    found = _found(program, group, places)
    if isinstance(group.outcome, Quantize) and (reason := why_not_scale(found.scale, group.outcome.spec)) is not None:
        raise SpecError(
            f"{group.name}: {reason}",
            where=f"observe={group.outcome.spec.observe}",
            advice="fix another scale, or find the range with minmax or another observation that rounds scales as the spec says",
        )
    return found


def _found(program: Program, group: Group, places: Places) -> QParams:
    if isinstance(group.outcome, Fixed):
        scale = torch.tensor(group.outcome.scale, dtype=torch.float32)
        return QParams(scale, torch.tensor(group.outcome.zero_point))
    if not isinstance(group.outcome, Quantize):
        raise QuantcError(f"group {group.name} has no qparams of its own", advice="derive them from its parents")
    where = f"{group.name} ({program.describe(places.value(group.places[0]))})"
    known = program.plan.statistics.get(group.name)
    if isinstance(known, Trained):
        return known.qparams(group.outcome.spec, where=where)
    observation = _observe(program, group, places, group.outcome.spec, where)
    return observation.qparams(group.outcome.spec, where=where)


def _observe(program: Program, group: Group, places: Places, spec: QuantSpec, where: str) -> Observation:
    """Statistics of a group's tensors: from calibration, and from constants."""
    constants = {
        str(node.target): tensor
        for site in group.values
        if (node := places.node(site)).op == "get_attr" and (tensor := program.tensor(node)) is not None
    }
    total = program.plan.statistics.get(group.name) if group.source is Source.DATA else None
    if group.source is Source.DATA and (total is None or not total.seen):
        if not all(is_empty(places.node(site)) for site in group.values):
            raise _unobserved_error(program, group, where)
        total = start(spec)
        total.update(torch.zeros(1), where=where)  # whatever the scale, there is nothing to round
    if total is not None or any(constant.numel() for constant in constants.values()):
        # an empty cache does not contribute to a range that others have
        constants = {name: constant for name, constant in constants.items() if constant.numel()}
    if constants:
        own = start(spec)
        for name, constant in constants.items():
            if constant.numel() == 0:
                raise DataError(f"{name} is empty, and has no range", where=where, advice="leave it float")
            own.update(constant.detach(), where=where)
        total = own if total is None else total.merge(own)
    if total is None:
        raise CalibrationError(f"{group.name} has nothing to observe", where=where, advice="capture the model again")
    return total


def _unobserved_error(program: Program, group: Group, where: str) -> CalibrationError:
    """Calibration saw nothing of a group: it was not run, or it never entered the branch or loop this is in."""
    path, statistics = group.places[0].graph, program.plan.statistics
    seen = {other.places[0].graph for other in program.plan.groups if _has_seen(statistics.get(other.name))}
    if path and path not in seen and program.plan.batches:
        return CalibrationError(
            f"no batch entered {path}, so {group.name} was never observed",
            where=where,
            advice=f'calibrate with a batch that takes it, or leave it float: config.set_node("{path}/*", FLOAT)',
        )
    return CalibrationError(
        f"{group.name} was never observed",
        where=where,
        advice="call qc.calibrate(prepared, batches) with a batch that reaches it, before qc.convert",
    )


def _has_seen(observation: Observation | None) -> bool:
    return observation is not None and observation.seen > 0


def _refuse_groups(program: Program, group: Group, parents: list[QParams], places: Places) -> None:
    """A bias has a scale for each channel: one for each group of a channel's weights would be several."""
    if any(parent.scale.dim() > 1 for parent in parents):
        raise SpecError(
            f"{group.name} would have a scale for each group of its weight, and a bias is one number a channel",
            where=program.describe(places.value(group.places[0])),
            advice="leave the bias float where weights are per group: the integer form adds it as it is",
        )


def _make_room(
    program: Program, group: Group, parents: list[str], found: dict[str, QParams], places: Places
) -> list[str]:
    """Raise the weight's scales where a bias would not fit its 32-bit accumulator. Says where that was needed."""
    node: fx.Node = places.value(group.places[0])
    bias = program.tensor(node)
    if bias is None or len(parents) != 2:
        return []
    x, weight = found[parents[0]], found[parents[1]]
    fitted = fit_weight_scale(bias.detach(), x.scale, weight.scale.expand(bias.shape))
    raised = fitted > weight.scale
    if not bool(raised.any()):
        return []
    scale = fitted if weight.scale.dim() else fitted.max()
    specs = {each.name: spec_of(each, weight) for each in program.plan.groups if each.name == parents[1]}
    scale = to_significant_bits(scale, specs[parents[1]].scale_bits, up=True)
    found[parents[1]] = QParams(scale, weight.zero_point)
    return [f"{program.describe(node)}: {int(raised.sum())} weight scales raised so that the bias fits 32 bits"]
