"""The driver of passes that fit weights: what a pass proposes for a layer is kept where it lowers the error on the half of
the batches that it was not fitted to, output by output where the scales allow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from quantc.integer.proof.range_reduction import RangeReduction
from quantc.ir.judgment import Judgment
from quantc.ir.program import Program, Stage
from quantc.ir.site_index import Places
from quantc.ir.sites import Site
from quantc.observe.module import behind, observer_nodes
from quantc.observe.trained import Trained
from quantc.pipeline.base_pass import Outcome, Pass, Preserves
from quantc.recover.layers import Layer, layers_of
from quantc.recover.whole_program import Facts, WholeProgram
from quantc.spec.granularity import as_rows
from quantc.spec.numerics import QParams
from quantc.text.digests import digest

Propose = Callable[[Layer], "Proposal | str"]
"""A proposal, or the reason why there is none."""
TELL: ContextVar[Callable[[str], None] | None] = ContextVar("TELL", default=None)
"""Called with the name of each layer before it is fitted."""


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Rounded weights for a layer, with their scales, and a change of its bias."""

    weight: Tensor
    qparams: QParams
    shift: Tensor | None
    """`[groups, outputs]`, relative to the float bias."""
    note: str = ""


CALIBRATED = "calibrate"
"""The name under which the log has new data."""
LEAST_GAIN = 2.0**-10
"""The share of an error that a change must take away to be kept: less is rounding of float32."""


class FittingPass(Pass):
    """A pass that fits weights. Run again before anything else has changed, it does nothing."""

    needs: ClassVar[Stage] = Stage.SHARED
    before: ClassVar[Stage | None] = Stage.QUANTIZED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    statistics: ClassVar[str] = "recover"
    """The statistics that it needs of what layers read, as `qc.calibrate(..., collect=...)` names them."""

    reduce_range: RangeReduction = "auto"
    """The `reduce_range` that the program will be converted with: weights are fitted to the scales of that."""

    @abstractmethod
    def propose(self, layer: Layer) -> Proposal | str:
        """A proposal, or the reason why there is none."""

    def run(self, program: Program) -> Outcome:
        if is_done(program, str(self)):
            return Outcome(False, ("it has run, and nothing has changed since",))
        whole, facts = WholeProgram.of(program, self.reduce_range), Facts.of(program)
        judgments = fit(program, self.propose, self.reduce_range)
        fault = whole.fault() if whole is not None and any(each.fate == "kept" for each in judgments) else None
        if fault is not None:
            facts.restore(program)
            judgments = undone(judgments, fault)
        return Outcome(any(each.fate == "kept" for each in judgments), tuple(map(str, judgments)), tuple(judgments))


def undone(judgments: Sequence[Judgment], reason: str) -> list[Judgment]:
    """The judgments of a pass that is undone as a whole."""
    return [replace(each, fate="undone", reason=reason) if each.fate == "kept" else each for each in judgments]


def is_done(program: Program, name: str) -> bool:
    """True if the pass was the last that fitted, and no data has come since."""
    for entry in reversed(program.log):
        if entry.name == name and entry.judgments:
            return True
        if entry.name == CALIBRATED or (entry.judgments and entry.changed):
            return False
    return False


@torch.no_grad()
def fit(program: Program, propose: Propose, reduce_range: RangeReduction = "auto") -> list[Judgment]:
    """Fit every layer that can be, and say of each what became of it."""
    found = []
    for layer in layers_of(program, reduce_range):
        if not isinstance(layer, Layer):
            found.append(Judgment(layer[0], "refused", reason=layer[1]))
            continue
        if (tell := TELL.get()) is not None:
            tell(layer.name)
        proposal = propose(layer)
        if isinstance(proposal, str):
            found.append(Judgment(layer.name, "refused", reason=proposal))
        else:
            found.append(_judge(program, layer, proposal, propose))
    return found


def _on_all(layer: Layer, propose: Propose, proposal: Proposal, after: Tensor) -> Proposal:
    """The proposal fitted anew to all batches, now that it has proved itself; for outputs that are not better so, as it
    was, with the error `after`."""
    again = propose(replace(layer, objective=layer.objective.of_all()))
    if isinstance(again, str):
        return proposal
    sets = scale_sets(layer)
    old, new = (by_set(each, sets) for each in (after, layer.error(again.weight, again.shift)))
    better = (new <= old) & (by_set((~layer.fits(again.weight, again.qparams)).double(), sets) == 0)
    return mixed(layer, proposal, again, better[sets])


def _judge(program: Program, layer: Layer, proposal: Proposal, propose: Propose) -> Judgment:
    before = layer.error(layer.current, layer.shift)
    after = layer.error(proposal.weight, proposal.shift)
    better = _choice(layer, proposal, before, after)
    power = float(layer.power().sum()) or 1.0
    start = float(before.sum()) / power
    if not bool(better.any()):
        tried = float(after.sum()) / power
        return Judgment(layer.name, "undone", start, tried, "no better on the batches that it was not fitted to")
    now = Proposal(layer.current, layer.qparams, layer.shift)
    kept = mixed(layer, now, _on_all(layer, propose, proposal, after), better)
    _put(program, layer, kept)
    end = float(torch.where(better, after, before).sum()) / power
    notes = (_count(layer, better), proposal.note)
    return Judgment(layer.name, "kept", start, end, ", ".join(text for text in notes if text))


def _count(layer: Layer, better: Tensor) -> str:
    if bool(better.all()):
        return ""
    if layer.input.statistics == "tokens":
        return f"{int(better.any(1).sum())} of {len(better)} rows"
    return f"{int(better.sum())} of {better.numel()} outputs"


def _choice(layer: Layer, proposal: Proposal, before: Tensor, after: Tensor) -> Tensor:
    """The outputs for which the proposal is taken: all or none of those that share a scale which changes."""
    fits = layer.fits(proposal.weight, proposal.qparams)
    steady = before + layer.steadying(layer.current), after + layer.steadying(proposal.weight)
    is_same = proposal.qparams.equals(layer.qparams)
    sets = torch.arange(before.numel()).reshape(before.shape) if is_same else scale_sets(layer)
    old, new, steady_old, steady_new = (by_set(each, sets) for each in (before, after, *steady))
    is_allowed = by_set((~fits).double(), sets) == 0
    better = (new < old * (1 - LEAST_GAIN)) & (steady_new < steady_old) & is_allowed
    return better[sets]


def by_set(values: Tensor, sets: Tensor) -> Tensor:
    """The sum of outputs' values over each set of outputs."""
    return torch.zeros(sets.numel(), dtype=torch.float64).index_add_(0, sets.flatten(), values.double().flatten())


def scale_sets(layer: Layer) -> Tensor:
    """For each output, `[groups, outputs]`, the number of the set that it is in: no two sets share a scale."""
    numbers = layer.numbers(layer.qparams)
    first, last = numbers.amin(2), numbers.amax(2)
    if bool((first == last).all()):
        return first  # one scale each, or one for several
    starts = first.flatten().sort().values
    apart = bool((starts[1:] > last.flatten()[first.flatten().argsort()][:-1]).all())
    return torch.arange(first.numel()).reshape(first.shape) if apart else torch.zeros_like(first)


def _as_weight(layer: Layer, by_output: Tensor) -> Tensor:
    """A number for each output, spread over the weight."""
    return layer.as_weight(by_output.unsqueeze(2).expand(layer.rows(layer.weight).shape))


def mixed(layer: Layer, one: Proposal, other: Proposal, is_other: Tensor) -> Proposal:
    """One proposal for some outputs, `[groups, outputs]`, and the other for the rest."""
    if bool(is_other.all()):
        return other
    mask = _as_weight(layer, is_other)
    qparams = one.qparams
    if not qparams.equals(other.qparams):
        taken = as_rows(mask, layer.spec.granularity)[:, 0].reshape(qparams.scale.shape)
        qparams = QParams(
            torch.where(taken, other.qparams.scale, qparams.scale),
            torch.where(taken, other.qparams.zero_point, qparams.zero_point),
        )
    shift = None
    if one.shift is not None or other.shift is not None:
        zero = torch.zeros(is_other.shape, dtype=torch.float64)
        shifts = [zero if each.shift is None else each.shift for each in (one, other)]
        shift = torch.where(is_other, shifts[1], shifts[0])
    return Proposal(torch.where(mask, other.weight, one.weight), qparams, shift, other.note)


def _put(program: Program, layer: Layer, kept: Proposal) -> None:
    plan = program.plan
    plan.statistics[layer.group.name] = Trained(layer.spec.granularity, kept.qparams)
    for read in layer.reads:
        _note_fitted(program, read.site, kept.weight)
    site = layer.reads[0].bias
    if kept.shift is not None and layer.bias is not None and site is not None:
        bias = (layer.bias.double() + kept.shift.reshape(layer.bias.shape)).to(layer.bias.dtype)
        _note_fitted(program, site, bias)


def _note_fitted(program: Program, site: Site, values: Tensor) -> None:
    """Fitted values, with the digest of the constant that they were fitted to."""
    own = program.tensor(behind(Places(program).value(site), observer_nodes(program)))
    program.plan.fitted[site] = values
    if own is not None and (found := digest(own)) is not None:
        program.plan.fitted_to[site] = found
