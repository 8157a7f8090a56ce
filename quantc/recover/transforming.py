"""The driver of passes that transform a program without a change of its numbers, so that it quantizes better.

A pass proposes factors for channel groups. Each group is judged by the noise it has on the half of the batches that factors
were not fitted to, and the program's outputs are compared on example inputs and on noise; what is no better, or changes the
numbers, is undone. Statistics go along where they can; ranges that the data must show again are seen again.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, fx

from quantc.calibration.collect import channels_of, key_of
from quantc.calibration.layer_inputs import layer_inputs
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.ir.homogeneity import upper_bound
from quantc.ir.judgment import Judgment
from quantc.ir.program import Program, Stage
from quantc.ir.site_index import Places
from quantc.observe.extremes import Extremes
from quantc.pipeline.base_pass import Outcome, Pass, Preserves
from quantc.pipeline.numeric_guard import why_not_guarded
from quantc.recover.channel_factors import Applied, apply, carry, changes, ranges_to_see
from quantc.recover.channel_groups import ChannelGroup, ChannelGroups
from quantc.recover.equalizing import best_factors
from quantc.recover.fitting import is_done, undone
from quantc.recover.float_check import FloatCheck
from quantc.recover.noise_model import LayerNoise, NoiseModel, TensorNoise, noise_model
from quantc.recover.whole_program import Facts, WholeProgram

SEE_AGAIN: ContextVar[Callable[[Program, Sequence[str]], str] | None] = ContextVar("SEE_AGAIN", default=None)
"""Observes the ranges of some groups of the plan again, and says so."""
NOT_COUNTED = "its rounding adds no noise that can be counted"
LEAST_GAIN = 0.01
"""The share of the noise that factors must take away to be kept."""


class TransformPass(Pass):
    """A pass that moves factors from channels to the constants around them. Run again before anything else has changed, it
    does nothing."""

    needs: ClassVar[Stage] = Stage.SHARED
    before: ClassVar[Stage | None] = Stage.QUANTIZED
    preserves: ClassVar[Preserves] = Preserves.CLOSELY

    factors: Literal["powers-of-two", "any"] = "powers-of-two"
    """The factors allowed: powers of two change no float number, and leave the outputs their bits."""

    bounds: Literal["kept", "seen"] = "kept"
    """Whether factors may cross an op with an upper bound, such as relu6: not at all, or for channels that calibration never
    saw reach it. Then outputs change on data with larger values, as they do where ranges clip; on noise they are not
    compared."""

    reduce_range: RangeReduction = "auto"
    """The `reduce_range` that the program will be converted with."""

    @abstractmethod
    def concerns(self, program: Program, group: ChannelGroup) -> bool:
        """True if a group is one of those that this pass is for."""

    def run(self, program: Program) -> Outcome:
        if is_done(program, str(self)):
            return Outcome(False, ("it has run, and nothing has changed since",))
        work = _Work(program, self)
        work.run()
        notes = (*map(str, work.judgments), *work.notes)
        return Outcome(any(each.fate == "kept" for each in work.judgments), notes, tuple(work.judgments))


@dataclass(eq=False)
class _Work:
    """One run of a pass."""

    program: Program
    asked: TransformPass

    def __post_init__(self) -> None:
        self.judgments: list[Judgment] = []
        self.notes: list[str] = []
        self.known: dict[tuple[LayerNoise | TensorNoise, bytes], float] = {}
        """Noise that was computed, by the factors it depends on."""

    @torch.no_grad()
    def run(self) -> None:
        groups = ChannelGroups.of(self.program, self._largest())
        model = noise_model(self.program, groups)
        chosen = [group for group in groups.groups if self._is_chosen(group, groups, model)]
        if not chosen:
            return
        factors = self._found(model, groups, chosen)
        kept = self._judged(chosen, model, factors)
        if kept:
            self._carry_out(groups, kept, factors)

    def _largest(self) -> dict[fx.Node, Tensor]:
        """The largest value that each channel of what a bounded op yields was seen with, if such ops may be crossed."""
        found: dict[fx.Node, Tensor] = {}
        for rows in layer_inputs(self.program) if self.asked.bounds == "seen" else ():
            seen = self.program.plan.collected.get(key_of("extremes", channels_of(rows.site, rows.axis)))
            extremes = None if seen is None else cast(Extremes, seen.whole())
            if upper_bound(rows.value) is not None and extremes is not None and extremes.high is not None:
                found[rows.value] = extremes.high.reshape(-1)
        return found

    def _is_chosen(self, group: ChannelGroup, groups: ChannelGroups, model: NoiseModel) -> bool:
        if not self.asked.concerns(self.program, group):
            return False
        reason = (group.reason or "no channel can be scaled") if not group.is_movable else model.why_not(group)
        reason = reason or self._why_not_now(group, groups)
        if reason is not None:
            self.judgments.append(Judgment(group.site, "refused", reason=reason))
        return reason is None

    def _why_not_now(self, group: ChannelGroup, groups: ChannelGroups) -> str | None:
        trial = torch.ones(groups.count + 1, dtype=torch.float64)
        trial[torch.from_numpy(group.classes)] = 2.0
        plan, places = self.program.plan, Places(self.program)
        touched = {node for node, change in changes(self.program, groups, trial).items() if bool((change != 1).any())}
        fitted = {places.value(site) for site in plan.fitted}
        if touched & fitted:
            return "its weights were fitted already: transform before fitting"
        if SEE_AGAIN.get() is None and (names := ranges_to_see(self.program, groups, trial)):
            return f"the range of {names[0]} must be seen again, and there are no batches for it"
        return None

    def _found(self, model: NoiseModel, groups: ChannelGroups, chosen: Sequence[ChannelGroup]) -> Tensor:
        movable = torch.cat([torch.from_numpy(group.classes) for group in chosen])
        with torch.enable_grad():
            limits = torch.from_numpy(groups.limits)
            found = best_factors(model, limits, movable)
        if self.asked.factors == "powers-of-two":
            found = torch.minimum(found.round(), limits.log2().floor())
        return torch.cat([torch.exp2(found), torch.ones(1, dtype=torch.float64)])

    def _judged(self, chosen: Sequence[ChannelGroup], model: NoiseModel, factors: Tensor) -> list[ChannelGroup]:
        """The groups that are better with their factors, by what these were not fitted to. The factors of others become 1,
        and what is left is judged again, as groups meet in layers."""
        found: dict[str, Judgment] = {}
        kept = list(chosen)
        while True:
            left = [group for group in kept if self._is_better(group, model, factors, found)]
            if len(left) == len(kept):
                break
            kept = left
        self.judgments += (found[group.site] for group in chosen)
        return kept

    def _is_better(self, group: ChannelGroup, model: NoiseModel, factors: Tensor, found: dict[str, Judgment]) -> bool:
        classes = torch.from_numpy(group.classes)
        parts, without = model.parts(classes), factors.clone()
        without[classes] = 1.0
        before, after = (
            sum(self._noise(part, each) for part in parts) / len(group.readers) for each in (without, factors)
        )
        is_better = after < before * (1 - LEAST_GAIN)
        if not is_better:
            factors[classes] = 1.0
        worse = "no better on the batches that it was not fitted to" if 0 < before < math.inf else NOT_COUNTED
        why = group.reason if is_better else worse
        found[group.site] = Judgment(group.site, "kept" if is_better else "undone", before, after, why)
        return is_better

    def _noise(self, part: LayerNoise | TensorNoise, factors: Tensor) -> float:
        key = part, factors[part.own].numpy().tobytes()
        if key not in self.known:
            self.known[key] = part.of(factors)
        return self.known[key]

    def _carry_out(self, groups: ChannelGroups, kept: Sequence[ChannelGroup], factors: Tensor) -> None:
        whole, facts = WholeProgram.of(self.program, self.asked.reduce_range), Facts.of(self.program)
        applied = self._apply_guarded(groups, kept, factors)
        names = ranges_to_see(self.program, groups, factors)
        dropped = carry(self.program, groups, factors)
        self.notes += [f"{key} was dropped: only the data would tell it" for key in dropped]
        if names and (see := SEE_AGAIN.get()) is not None:
            self.notes.append(see(self.program, names))
        fault = None if whole is None else whole.fault()
        if fault is not None:
            for each in reversed(applied):
                each.undo(self.program)
            facts.restore(self.program)
            self.judgments = undone(self.judgments, fault)

    def _apply_guarded(self, groups: ChannelGroups, kept: Sequence[ChannelGroup], factors: Tensor) -> list[Applied]:
        """Put factors in. If that changes the outputs, group by group, without those that do."""
        if (reason := why_not_guarded(self.program, None)) is not None:
            self.notes.append(f"outputs were not compared: {reason}")
            return [apply(self.program, groups, factors)]
        check = FloatCheck.of(self.program, on_noise=self.asked.bounds == "kept")
        applied = apply(self.program, groups, factors)
        if check.gap() is None:
            return [applied]
        applied.undo(self.program)
        done: list[Applied] = []
        wanted = factors.clone()
        factors.fill_(1.0)
        for group in kept:
            classes = torch.from_numpy(group.classes)
            alone = torch.ones_like(factors)
            alone[classes] = wanted[classes]
            applied = apply(self.program, groups, alone)
            found = check.gap()
            if found is None:
                factors[classes] = wanted[classes]
                done.append(applied)
                continue
            applied.undo(self.program)
            index = next(i for i, each in enumerate(self.judgments) if each.site == group.site and each.fate == "kept")
            known = self.judgments[index]
            why = f"an output {found}"
            self.judgments[index] = Judgment(group.site, "undone", known.before, known.after, why)
        return done
