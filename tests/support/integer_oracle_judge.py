"""Judges an integer program, match by match, by the oracle; and its fixed form by its float64 form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import quantc as qc
from quantc.calibration.interpreter import Runner
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.qdq.ops import is_quantize
from quantc.spec.arithmetic import EXACT, Arithmetic
from quantc.testing.rule_trial import FACTORS, Trial, scale_inputs
from tests.support.integer_oracle import Oracle, plain
from tests.support.integer_oracle_sums import Reals
from tests.support.integer_oracle_values import Exact, Steps

NEAR_TIE = 1e-3
"""Nearer to a tie than this part of a step, either neighbour may be meant."""
MAX_FLIPS = 1e-3


@dataclass(frozen=True, eq=False)
class Judge:
    """One calibrated program, in its three forms."""

    prepared: Program
    inputs: Sequence[Any]
    rule: str
    arithmetic: Arithmetic = EXACT

    @staticmethod
    def of(trial: Trial, arithmetic: Arithmetic = EXACT) -> Judge:
        """`arithmetic` is that of every op."""
        prepared = trial.prepared.clone()
        if arithmetic != EXACT:
            claims = prepared.plan.claims.rows.values()
            prepared.plan.arithmetic.update(dict.fromkeys((claim.quantizer for claim in claims), arithmetic))
        qc.calibrate(prepared, [tuple(scale_inputs(trial.inputs, factor)) for factor in FACTORS])
        return Judge(prepared, trial.inputs, trial.rule.name, arithmetic)

    @cached_property
    def qdq(self) -> Program:
        return qc.convert(self.prepared)

    @cached_property
    def integer(self) -> Program:
        return qc.convert(self.prepared, to="integer")

    @cached_property
    def fixed(self) -> Program:
        return qc.convert(self.prepared, to="integer", multiplier="fixed")

    # -- what is judged ----------------------------------------------------------------------------------------

    def left_in_float(self, program: Program) -> dict[str, str]:
        """The nodes of the rule that stayed in float, and why."""
        claims, left = program.plan.claims, program.plan.left_float.rows
        return {
            node.name: reason
            for node, reason in left.items()
            if (claim := claims.get(node)) is not None and claim.rule == self.rule
        }

    def integer_nodes(self) -> list[str]:
        """The nodes that the rule's matches have become."""
        claims, left = self.integer.plan.claims.rows, self.integer.plan.left_float
        return [node.name for node, claim in claims.items() if claim.rule == self.rule and node not in left]

    def differences(self, deviations: Mapping[str, float]) -> list[str]:
        """Where the integer program is not what the oracle says, each match fed the program's own integers.

        `deviations` says by op how much of a step the number that is rounded may be off; others may not be off at all.
        """
        ours = lowered_values(self.integer, self.inputs)
        if not ours:
            return ["no value of the integer program stands for one of the Q/DQ program"]
        theirs = Oracle(self.qdq, _left(self.integer), self.arithmetic).run(self.inputs, ours)
        found = []
        for name, value in ours.items():
            allowed = deviations.get(self._op(name))
            if allowed is None:
                found += [f"{name}: {why}" for why in differing(value, plain(theirs[name]))]
            else:
                found += [f"{name}: {why}" for why in self._deviating(name, value, theirs, allowed)]
        return found

    def _deviating(self, name: str, ours: Tensor, theirs: Mapping[str, Any], allowed: float) -> list[str]:
        """What is wrong with integers that are the nearest to numbers which may be off by a part of a step."""
        node = self.qdq.node(name)
        steps = Steps.of(self.qdq, node)
        levels = theirs[node.all_input_nodes[0].name].levels(steps.scale) + steps.zero_point
        off = np.abs(ours.numpy() - np.clip(levels, steps.qmin, steps.qmax))
        wrong = int((off > 0.5 + allowed).sum())
        return [f"{wrong} of {off.size} elements are {off.max():.4g} steps from the number they round"] if wrong else []

    def _op(self, name: str) -> str:
        """The op whose result a node is, or quantizes."""
        node = self.qdq.node(name)
        return op_name(node.all_input_nodes[0] if is_quantize(node) else node)

    def flips(self) -> tuple[int, int]:
        """On how many elements of how many the fixed form differs, far from ties. More than a step is an error."""
        inputs = self.inputs
        ours, theirs = lowered_values(self.fixed, inputs), lowered_values(self.integer, inputs)
        assert list(ours) == list(theirs)
        exact = Oracle(self.qdq, _left(self.integer)).run(inputs, theirs)
        wrong = total = 0
        for name, value in ours.items():
            node = self.qdq.node(name)
            if not is_quantize(node):
                continue
            off = (value.double() - theirs[name].double()).abs().numpy()
            assert off.max(initial=0) <= 1, f"{name} is {off.max()} steps off"
            source = exact[node.all_input_nodes[0].name]
            clear = _clear(source, Steps.of(self.qdq, node), off.shape)
            wrong, total = wrong + int((off[clear] > 0).sum()), total + int(clear.sum())
        return wrong, total


def _left(program: Program) -> set[str]:
    return {node.name for node in program.plan.left_float.rows}


def _clear(source: Any, steps: Steps, shape: tuple[int, ...]) -> Any:
    """Which elements lie away from a tie between two integers."""
    if not isinstance(source, Exact):
        return np.ones(shape, dtype=bool)
    levels: Reals = source.levels(steps.scale)
    return np.abs(levels - np.floor(levels) - 0.5) > NEAR_TIE


def lowered_values(program: Program, inputs: Sequence[Any]) -> dict[str, Tensor]:
    """What an integer program computes, by the name of the node of the Q/DQ program that has the same value."""
    found: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor) -> None:
        found[name] = value.clone()

    Runner(program, {node: partial(keep, name) for node, name in program.plan.lowered.rows.items()}).run(inputs)
    return found


def differing(ours: Tensor, theirs: Tensor) -> list[str]:
    """What is wrong with a tensor that should be another, bit for bit."""
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return [f"it is {ours.dtype} {tuple(ours.shape)}, not {theirs.dtype} {tuple(theirs.shape)}"]
    if torch.equal(ours, theirs):
        return []
    off = (ours.double() - theirs.double()).abs()
    return [f"{int((off > 0).sum())} of {off.numel()} elements differ, by {float(off.max()):.4g} at most"]
