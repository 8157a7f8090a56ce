"""Checks of a quantizer written by hand: what it claims, decides and explains, on example programs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from quantc.annotate.quantizer import Quantizer, members_of
from quantc.errors import InvariantError
from quantc.ir.decisions import Fixed, Quantize
from quantc.ir.dialect import WEIGHTED, op_name
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.spec.formats import Role, Timing
from quantc.targets.target import targets_of
from quantc.testing.conformance import Check, Conformance, Fault, Ledger, raised
from quantc.testing.example_programs import Example, feed, float_programs
from quantc.testing.number_checks import DB_A_BIT, db_for_scales
from quantc.testing.qdq_formats import argument_names, forms
from quantc.testing.rule_trial import UNSEEN, run, scale_inputs, sqnr
from quantc.verbs.convert import convert
from quantc.verbs.prepare import prepare

NOUN = "quantizer"


def check_quantizer(quantizer: Quantizer, examples: Mapping[str, Example]) -> Conformance:
    """Take the example programs, and those given, through prepare, calibrate and convert."""
    ledger = Ledger(quantizer.name, noun=NOUN)
    for label, program in float_programs(examples):
        _check_on(quantizer, program, ledger, label)
    if ("", Check.TAKEN) not in ledger.entries:
        advice = 'give a model that it takes: check_backend(quantizer, examples={"mine": make_model})'
        ledger.add("", Check.TAKEN, [Fault("it claims nothing in any example program", advice)])
    return ledger.conformance(())


def _check_on(quantizer: Quantizer, program: Program, ledger: Ledger, label: str) -> None:
    before = program.dump()
    step = "prepare"
    try:
        prepared = prepare(program, quantizer, allow_empty=True)
        if not prepared.plan.claims.rows:
            return
        ledger.add("", Check.TAKEN, [], where=label)
        again = prepare(program, quantizer, allow_empty=True)
        ledger.add("", Check.REPEATABLE, _repeated(prepared, again), where=label)
        ledger.add("", Check.OPERANDS, _operands(prepared), where=label)
        ledger.add("", Check.EXPLAINS, _explains(quantizer, prepared), where=label)
        step = "calibrate and convert"
        converted = convert(feed(prepared))
        converted.verify()
        ledger.add("", Check.ZERO, _zero(converted), where=label)
        ledger.add("", Check.FIDELITY, _fidelity(program, prepared, converted), where=label)
    except InvariantError as error:
        ledger.add("", Check.INVARIANTS, [raised("", error)], where=label)
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises is what is to be reported
        ledger.add("", Check.RUNS, [raised(step, error)], where=label)
    else:
        ledger.add("", Check.RUNS, [], where=label)
        if any(target.invariants for target in targets_of(converted)):
            ledger.add("", Check.INVARIANTS, [], where=label)
    changed = [Fault("the captured program was changed", "decide through the annotator alone")]
    ledger.add("", Check.UNCHANGED, [] if program.dump() == before else changed, where=label)


def _repeated(first: Program, second: Program) -> list[Fault]:
    if str(first.plan) == str(second.plan):
        return []
    return [Fault("preparing it twice gives two plans", "keep nothing between calls of annotate")]


def _operands(prepared: Program) -> list[Fault]:
    """Weights of products are constants with specs for weights."""
    faults: list[Fault] = []
    places = Places(prepared)
    for site, outcome in prepared.plan.outcomes.items():
        if site.operand is None or not isinstance(outcome, Quantize | Fixed):
            continue
        node = places.node(site)
        value = node.all_input_nodes[site.operand] if site.operand < len(node.all_input_nodes) else None
        role, is_constant = outcome.spec.role, isinstance(value, fx.Node) and value.op == "get_attr"
        if role is Role.WEIGHT and not is_constant and value is not None:
            faults.append(
                Fault(f"{site} is an activation, with the spec of a weight", "give it a spec whose role is act")
            )
        names = argument_names(node)
        name = names[site.operand] if site.operand < len(names) else ""
        if op_name(node) in WEIGHTED and name == "w" and is_constant and role is not Role.WEIGHT:
            faults.append(
                Fault(f"{site} is a weight, with a spec of kind {role}", "give it a spec whose role is weight")
            )
    return faults


def _explains(quantizer: Quantizer, prepared: Program) -> list[Fault]:
    known = set(quantizer.supported_operators())
    faults: list[Fault] = []
    names = {member.name for member in members_of(quantizer)}
    for node, claim in prepared.plan.claims.rows.items():
        if claim.quantizer not in names:
            what = f"{node.name} is claimed in the name of {claim.quantizer!r}"
            faults.append(Fault(what, f"claim it as Claim({quantizer.name!r}, rule, root)"))
        str(quantizer.explain(prepared, node.name))
    roots = {op_name(node) for node, claim in prepared.plan.claims.rows.items() if claim.root == node.name}
    if known and (missing := sorted(roots - known)):
        faults.append(Fault(f"it claims {', '.join(missing)}, and supported_operators() does not list it", "list it"))
    return faults


def _zero(converted: Program) -> list[Fault]:
    faults: list[Fault] = []
    for node, form in forms(converted):
        if int(form.zero_point.min()) < form.qmin or int(form.zero_point.max()) > form.qmax:
            faults.append(Fault(f"the zero point of {node.name} lies outside {form.qmin}..{form.qmax}", "correct it"))
    return faults


def _fidelity(program: Program, prepared: Program, converted: Program) -> list[Fault]:
    specs = [outcome.spec for outcome in prepared.plan.outcomes.values() if isinstance(outcome, Quantize | Fixed)]
    bits = min((spec.dtype.bits for spec in specs if spec.timing is Timing.STATIC), default=8)
    least = DB_A_BIT * bits - max((db_for_scales(spec) for spec in specs), default=0.0)
    inputs = scale_inputs(program.example_inputs or (), UNSEEN)
    found = sqnr(run(program, inputs), run(converted, inputs))
    if found >= least:
        return []
    return [
        Fault(f"the SQNR is {found:.1f} dB, and {bits} bits should give {least:.0f}", "look at the specs it decides on")
    ]
