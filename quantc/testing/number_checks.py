"""Numeric checks: fidelity, fixed ranges, the channel axis, batches of other sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantc.annotate.quantizer import LIKE
from quantc.errors import QuantcError
from quantc.ir.decisions import Fixed
from quantc.ir.dialect import op_name, traits_of
from quantc.ir.op_row import Trait
from quantc.ir.program import Program
from quantc.ir.site_index import outputs_of
from quantc.spec.formats import PerChannel
from quantc.spec.spec import FLOAT32_DIGITS, QuantSpec
from quantc.testing.arguments import BATCH
from quantc.testing.conformance import Fault
from quantc.testing.rule_trial import UNSEEN, Trial, quantize_trial, quantizer_for, run, scale_inputs, sqnr, values_of
from quantc.verbs.prepare import prepare

DB_A_BIT = 2.5
"""SQNR per bit that a sane quantization of well-scaled numbers exceeds: 20 dB for 8 bits, 10 dB for 4."""
HUGE = 1000.0
WIDE = 8.0


def db_for_scales(spec: QuantSpec) -> float:
    """Allowed loss of scales with few significant bits: a power of two is up to twice as large as the scale it stands
    for."""
    return 0.0 if spec.scale_bits >= FLOAT32_DIGITS else 20 * math.log10(1 + 2.0 ** (1 - spec.scale_bits))


def expected_db(trial: Trial) -> float:
    """The SQNR that a rule's models should exceed."""
    specs = [trial.backend.outcome(role).spec for role in trial.rule.roles.values() if role in trial.backend.roles]
    return DB_A_BIT * trial.bits - max((db_for_scales(spec) for spec in specs), default=0.0)


def fidelity(trial: Trial) -> list[Fault] | None:
    """The quantized model is close to the float one on inputs it was not calibrated with."""
    inputs = scale_inputs(trial.inputs, UNSEEN)
    found = sqnr(run(trial.model.program, inputs), run(trial.converted, inputs))
    if found >= expected_db(trial):
        return []
    return [Fault(_loss(found, trial), "look at the ranges, eps and observations of the rule's roles")]


def _loss(found: float, trial: Trial) -> str:
    return f"the SQNR is {found:.1f} dB, and {trial.bits} bits should give {expected_db(trial):.0f}"


def fixed_range(trial: Trial) -> list[Fault] | None:
    """Fixed output qparams cover the op's results for any input."""
    role = trial.rule.roles.get("out", "")
    outcome = trial.backend.outcome(role) if role in trial.backend.roles else None
    if not isinstance(outcome, Fixed) or trial.match is None:
        return None
    made = values_of(trial.prepared, outputs_of(trial.match.root), scale_inputs(trial.inputs, WIDE))
    low, high = min(float(value.min()) for value in made), max(float(value.max()) for value in made)
    spec, step = outcome.spec, outcome.scale
    least, most = ((end - outcome.zero_point) * step for end in (spec.qmin, spec.qmax))
    if least - step <= low and high <= most + step:
        return []
    op = op_name(trial.match.root)
    what = f"{op} yields {low:.3g} to {high:.3g}, and role {role!r} reaches from {least:.3g} to {most:.3g}"
    return [
        Fault(what, f"fix a scale of {(high - low) / (spec.levels - 1):.3g} or more, and a zero point to go with it")
    ]


def ties(trial: Trial) -> list[Fault] | None:
    """An output that shares qparams with one operand keeps its SQNR when the other operands grow."""
    role = trial.rule.roles.get("out", "")
    if not role.startswith(LIKE) or trial.match is None:
        return None
    if all(Trait.PRESERVES_VALUES in traits_of(node) for node in trial.match.nodes):
        return None
    own = role.removeprefix(LIKE)
    others = {slot.value.name for slot in trial.slots if slot.name != own and slot.value.op != "call_function"}
    if not others:
        return None
    prepared = trial.prepared.clone()
    for name in others:
        _grow(prepared, name)
    inputs = _grown(prepared, trial.inputs, others)
    found = sqnr(run(prepared, inputs), run(quantize_trial(prepared.clone(), inputs), inputs))
    if found >= expected_db(trial):
        return []
    what = f"`out` is like {own}; when the other operands grow, the SQNR falls to {found:.1f} dB"
    return [Fault(what, f"give out a role of its own: {op_name(trial.match.root)} does not keep the range of {own}")]


def _grow(program: Program, name: str) -> None:
    tensor = program.tensor(program.node(name))
    if tensor is not None:
        with torch.no_grad():
            tensor.mul_(HUGE)


def _grown(program: Program, inputs: Sequence[Any], names: set[str]) -> list[Any]:
    nodes = program.graph.find_nodes(op="placeholder")
    return [
        value * HUGE if node.name in names and value.is_floating_point() else value
        for node, value in zip(nodes, inputs, strict=True)
    ]


# -- channels ----------------------------------------------------------------------------------------------------


def channels(trial: Trial) -> list[Fault] | None:
    """A channel a thousand times as large as the others does not cost them their precision.

    The outputs that a channel affects are found by running the float model, not from knowledge of the op.
    """
    weights = {
        slot.value.name: (slot.name, granularity.axis)
        for slot in trial.slots
        if slot.value.op == "get_attr" and slot.role in trial.backend.roles
        if isinstance(granularity := trial.backend.outcome(slot.role).spec.granularity, PerChannel)
    }
    if not weights:
        return None
    quantizer = quantizer_for(trial.subject.without_outputs, trial.rule)
    plain = prepare(trial.model.program, quantizer, allow_empty=True)
    faults: list[Fault] = []
    for name, (operand, axis) in weights.items():
        faults += _wrong_axis(trial, plain, name, operand, axis)
    return faults


def _wrong_axis(trial: Trial, prepared: Program, name: str, operand: str, axis: int) -> list[Fault]:
    weight = prepared.tensor(prepared.node(name))
    if weight is None:
        return []
    spared = {other: _spared(prepared, name, other, trial.inputs) for other in range(weight.dim())}
    possible = [other for other, masks in spared.items() if any(bool(mask.any()) for mask in masks)]
    if not possible:
        return []  # every output depends on every channel: nothing can be told apart
    if axis not in possible:
        what = f"{operand} has its scales along axis {axis}, each of which goes into every output"
        return [Fault(what, f"the output channels lie along axis {' or '.join(map(str, possible))}")]
    loud = _with_huge_channel(prepared, name, axis)
    found = sqnr(run(loud, trial.inputs), run(quantize_trial(loud.clone(), trial.inputs), trial.inputs), spared[axis])
    if found >= expected_db(trial):
        return []
    what = f"with one channel of {operand} along axis {axis} {HUGE:.0f} times as large, the others have {found:.1f} dB"
    quiet = sqnr(
        run(prepared, trial.inputs), run(quantize_trial(prepared.clone(), trial.inputs), trial.inputs), spared[axis]
    )
    if quiet < expected_db(trial):
        return [Fault(f"{what}, and {quiet:.1f} dB without that", _NOT_THE_AXIS)]
    return [Fault(what, "correct the axis of the role's spec")]


_NOT_THE_AXIS = "the axis is right; scale_bits, eps, range or observation of the role's spec cost the precision"


def _with_huge_channel(prepared: Program, name: str, axis: int) -> Program:
    loud = prepared.clone()
    weight = loud.tensor(loud.node(name))
    if weight is not None:
        with torch.no_grad():
            weight.select(axis, 0).mul_(HUGE)
    return loud


def _spared(prepared: Program, name: str, axis: int, inputs: Sequence[Any]) -> list[Tensor]:
    """Masks of the outputs that ignore a change of the first channel along an axis: whole slices, not chance
    elements."""
    loud = _with_huge_channel(prepared, name, axis)
    pairs = zip(run(prepared, inputs), run(loud, inputs), strict=True)
    return [_whole_slices(before == after) for before, after in pairs]


def _whole_slices(same: Tensor) -> Tensor:
    """The elements in a slice, along any axis, that is true throughout."""
    whole = torch.zeros_like(same)
    for axis in range(same.dim()):
        others = [other for other in range(same.dim()) if other != axis]
        whole |= same.all(dim=others, keepdim=True) if others else same
    return whole


# -- other inputs ------------------------------------------------------------------------------------------------


def batches(trial: Trial) -> list[Fault] | None:
    """The quantized model runs on batches of other sizes, and on an empty one, where the float model does."""
    if not trial.model.claimed:
        return None  # the batch axis of a given model is unknown
    faults: list[Fault] = []
    for size in (1, 3, 0):
        inputs = [_cut(value, size) for value in trial.inputs]
        try:
            expected = run(trial.model.program, inputs)
        except QuantcError:
            continue  # the op itself does not run on such a batch
        faults += _on_batch(trial, inputs, expected, size)
    return faults


def _cut(value: Tensor, size: int) -> Tensor:
    """A smaller batch; the states of recurrent ops do not have it on their first axis."""
    axis = next((axis for axis, length in enumerate(value.shape) if length == BATCH), None)
    return value if axis is None else value.narrow(axis, 0, size)


def _on_batch(trial: Trial, inputs: list[Tensor], expected: list[Tensor], size: int) -> list[Fault]:
    try:
        found = run(trial.converted, inputs)
    except QuantcError as error:
        return [
            Fault(f"a batch of {size}: {error.what.splitlines()[0]}", "let no constant depend on the size of the batch")
        ]
    if [value.shape for value in found] != [value.shape for value in expected]:
        return [Fault(f"a batch of {size} gives other shapes", "let no constant depend on the size of the batch")]
    if size and sqnr(expected, found) < expected_db(trial):
        return [Fault(f"on a batch of {size}: {_loss(sqnr(expected, found), trial)}", "see fidelity")]
    return []
