"""Check of rules that claim the integer form: they lower to it, stay in it, and agree with Q/DQ."""

from __future__ import annotations

from torch import fx

from quantc.inspect.agreement import Agreement, AgreementRow, agreement
from quantc.integer.region_check import stray_floats
from quantc.integer.semantics import SEMANTICS
from quantc.ir.program import Program
from quantc.ir.types import tensor_type
from quantc.qdq.ops import is_dequantize
from quantc.testing.conformance import Fault
from quantc.testing.rule_trial import Trial, calibrate_trial
from quantc.verbs.convert import convert

INTEGER = "integer"
MAX_STEPS = 1
"""Allowed distance from Q/DQ in steps, both computed from the same integers; twice that for ops that approximate."""
MIN_EQUAL = 0.999
"""Fraction of a result that must be equal, of the elements that are not near a tie."""
NEAREST = ("half-even", "half-up", "half-away")
"""Roundings that differ from that of Q/DQ at ties alone."""
FLOAT_ERROR = 1e-4
"""Allowed float error, relative to the largest value: Q/DQ sums in float32."""


def integer_form(trial: Trial) -> list[Fault] | None:
    """The rule's ops become integer arithmetic, without floats inside, within a step of Q/DQ."""
    if INTEGER not in trial.rule.supports:
        return None
    calibrated = calibrate_trial(trial.prepared.clone(), trial.inputs)
    integer = convert(calibrated, to="integer")
    integer.verify()
    left = _left_float(trial, integer)
    if left:
        return left
    strays = [Fault(f"a float is left inside the integers: {stray}", _CLAIM) for stray in stray_floats(integer)]
    return strays + _apart(trial, agreement(trial.converted, _to_nearest(calibrated) or integer, [tuple(trial.inputs)]))


def _to_nearest(calibrated: Program) -> Program | None:
    """The integer form with results rounded to the nearest and saturated, as Q/DQ has them; None if its targets do so."""
    known = calibrated.plan.arithmetic
    if all(each.saturate and each.rounding in NEAREST for each in known.values()):
        return None
    copy = calibrated.clone()
    change = {"rounding": "half-even", "saturate": True}
    copy.plan.arithmetic.update({name: each.model_copy(update=change) for name, each in known.items()})
    return convert(copy, to="integer")


_CLAIM = 'leave "integer" out of the rule\'s `supports`, or add its ops to the table of the integer form'


def _left_float(trial: Trial, integer: Program) -> list[Fault]:
    """The nodes of the rule that stay in float though they need not; a fault too if all of them do."""
    plan = integer.plan
    mine = [node for node, claim in plan.claims.rows.items() if claim.rule == trial.rule.name]
    if not mine:
        return [Fault("the rule claims the integer form, and nothing it takes gets there", _CLAIM)]
    all_float = all(node in plan.left_float for node in mine)
    excused = set[str]() if all_float else reading_floats(trial)
    return [
        Fault(f"the rule claims the integer form, and {node.name} stays in float: {plan.left_float[node]}", _CLAIM)
        for node in mine
        if node in plan.left_float and node.name not in excused
    ]


def reading_floats(trial: Trial) -> set[str]:
    """Nodes of the rule's matches that read a float from outside, as the table has it, and those after them."""
    program = trial.converted
    mine = {node for node, claim in program.plan.claims.rows.items() if claim.rule == trial.rule.name}
    found: set[fx.Node] = set()
    for node in program.nodes():
        if node not in mine:
            continue
        outside = [operand for operand in node.all_input_nodes if operand not in mine]
        if any(_is_float(program, operand) for operand in outside) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return {node.name for node in found}


def _is_float(program: Program, node: fx.Node) -> bool:
    kind = tensor_type(node)
    is_known = is_dequantize(node) or program.tensor(node) is not None
    return kind is not None and kind.dtype.is_floating_point and not is_known


def _apart(trial: Trial, found: Agreement) -> list[Fault]:
    """Faults of the rule's results against those of Q/DQ."""
    rows = [row for row in found.rows if row.rule == trial.rule.name]
    return [Fault(f"{row.node} {why}", _SEMANTICS) for row in rows for why in _reasons(row)]


_SEMANTICS = "correct what the table of the integer form says of the op"


def _reasons(row: AgreementRow) -> list[str]:
    approximates = row.op in SEMANTICS and bool(SEMANTICS[row.op].deviation)
    if row.float_error is not None and row.float_error > FLOAT_ERROR:
        return [f"is off by {row.float_error:.2g} of its largest value"]
    if row.worst > MAX_STEPS * (2 if approximates else 1):
        return [f"is {row.worst} steps from Q/DQ"]
    if not approximates and row.clear_differ > max(1, (1 - MIN_EQUAL) * row.clear):
        return [f"differs from Q/DQ on {row.clear_differ} of {row.clear} elements that are not near a tie"]
    return []
