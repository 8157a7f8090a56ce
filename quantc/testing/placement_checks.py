"""Checks of the position and qparams of quantize and dequantize ops against the table."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from quantc.annotate.match_operands import Slot
from quantc.annotate.quantizer import LIKE, PASS
from quantc.ir.decisions import Fixed, Quantize
from quantc.ir.dialect import WEIGHTED, op_name, traits_of
from quantc.ir.op_row import Trait
from quantc.ir.site_index import Places, outputs_of
from quantc.ir.types import rank_of
from quantc.spec.formats import PerChannel, Role, Scheme, Timing
from quantc.testing.conformance import Fault
from quantc.testing.qdq_formats import Form, argument_names, forms, read_form, yielded_form
from quantc.testing.rule_trial import Trial


def operands(trial: Trial) -> list[Fault] | None:
    """Weights are constants and have the role of weights, biases that of biases."""
    faults: list[Fault] = []
    looked = False
    for slot in trial.slots:
        faults += _copied(slot)
        if slot.role not in trial.backend.roles:
            looked = looked or slot.role.startswith(LIKE)
            continue
        looked = True
        role = trial.backend.outcome(slot.role).spec.role
        argument = argument_names(slot.node)[slot.operand]
        if role is Role.WEIGHT and slot.value.op != "get_attr":
            what = f"{slot.name} has the role of a weight, and the rule takes an activation for it"
            faults.append(Fault(what, f'let the pattern ask for a constant: const("{slot.name}")'))
        if op_name(slot.node) not in WEIGHTED or slot.value.op != "get_attr":
            continue
        if argument == "w" and role is not Role.WEIGHT:
            what = f"{slot.name} is the weight of {op_name(slot.node)} and has a role of kind {role}"
            faults.append(Fault(what, "give it a role whose spec is for weights (role=weight)"))
        if argument == "b" and role is not Role.BIAS:
            what = f"{slot.name} is the bias of {op_name(slot.node)} and has a role of kind {role}"
            faults.append(Fault(what, "give it a role with INT32_BIAS, or none"))
    return faults if looked else None


def _copied(slot: Slot) -> list[Fault]:
    """Weights and biases with the scale of something else."""
    if not slot.role.startswith(LIKE) or op_name(slot.node) not in WEIGHTED:
        return []
    kind = {"w": "weight", "b": "bias"}.get(argument_names(slot.node)[slot.operand])
    if kind is None:
        return []
    what = f"{slot.name} is the {kind} of {op_name(slot.node)}, and has the scale of {slot.role.removeprefix(LIKE)}"
    return [Fault(what, f"give it a role whose spec is for a {kind}; scales of activations are not those of constants")]


def placed(trial: Trial) -> list[Fault] | None:
    """Each operand and output is quantized as its role says."""
    if not trial.rule.roles:
        return None
    quantized = [slot for slot in trial.slots if not _is_bias_in_list(trial, slot)]
    faults = [fault for slot in quantized for fault in _wrong(trial, slot.name, _read(trial, slot))]
    if "out" in trial.rule.roles:
        for node in _outputs(trial):
            faults += _wrong(trial, "out", yielded_form(trial.converted, node))
    return faults


def _is_bias_in_list(trial: Trial, slot: Slot) -> bool:
    """Recurrent ops take weights and biases in one list; those with one axis are biases, and stay float."""
    is_weight = slot.role in trial.backend.roles and trial.backend.outcome(slot.role).spec.role is Role.WEIGHT
    return is_weight and rank_of(slot.value) == 1


def _read(trial: Trial, slot: Slot) -> Form | None:
    return read_form(trial.converted, trial.converted.node(slot.node.name), slot.operand)


def _outputs(trial: Trial) -> Iterator[fx.Node]:
    if trial.match is not None:
        yield from (trial.converted.node(node.name) for node in outputs_of(trial.match.root))


def _wrong(trial: Trial, name: str, form: Form | None) -> Iterator[Fault]:
    """Faults of a name's form, by its role alone; sharing is another check."""
    role = trial.rule.roles[name]
    outcome = trial.backend.outcome(role) if role in trial.backend.roles else None
    spec = outcome.spec if outcome is not None else None
    if spec is not None and (spec.timing is Timing.DYNAMIC or spec.dtype.is_float):
        return
    if form is None:
        advice = "a rule with a `pass` operand follows what it is given: no other role in it is applied"
        if PASS not in trial.rule.roles.values():
            advice = "see that the operand is one of the pattern's own, and that what it is derived from has a role"
        yield Fault(f"{name} has the role {role!r} and stays float", advice)
        return
    if spec is None:
        return
    expected = (spec.dtype.storage, spec.qmin, spec.qmax)
    if (form.dtype, form.qmin, form.qmax) != expected:
        yield Fault(f"{name} is {form}, and its role {role!r} says {spec}", "give it the role it is to have")
    axis = spec.granularity.axis if isinstance(spec.granularity, PerChannel) else None
    if form.axis != axis and spec.role is not Role.BIAS:
        yield Fault(f"{name} has scales along axis {form.axis}, its role {role!r} along {axis}", "correct the axis")
    if isinstance(outcome, Fixed):
        scale = torch.tensor(outcome.scale, dtype=torch.float32)
        if not torch.equal(form.scale.float(), scale) or int(form.zero_point) != outcome.zero_point:
            yield Fault(f"{name} is {form}, and its role {role!r} is {outcome}", "let nothing else tie it")


def zero(trial: Trial) -> list[Fault] | None:
    """Zero is exact, zero points are in range, and symmetric means that zero is in the middle."""
    faults: list[Fault] = []
    for node, form in forms(trial.converted):
        if int(form.zero_point.min()) < form.qmin or int(form.zero_point.max()) > form.qmax:
            faults.append(Fault(f"the zero point of {node.name} lies outside {form.qmin}..{form.qmax}", "correct it"))
        if not bool((form.scale > 0).all() & form.scale.isfinite().all()):
            faults.append(Fault(f"the scale of {node.name} is not a positive number", "correct it"))
    for role in dict.fromkeys(trial.rule.roles.values()):
        if role in trial.backend.roles:
            faults += _not_symmetric(role, trial.backend.outcome(role))
    return faults


def _not_symmetric(role: str, outcome: Quantize | Fixed) -> Iterator[Fault]:
    spec = outcome.spec
    if not isinstance(outcome, Fixed) or spec.scheme is not Scheme.SYMMETRIC:
        return
    middles = (0,) if spec.dtype.is_signed else ((spec.qmin + spec.qmax) // 2, (spec.qmin + spec.qmax + 1) // 2)
    if outcome.zero_point not in middles:
        what = f"role {role!r} is symmetric, and its zero point is {outcome.zero_point}"
        yield Fault(what, f"make the zero point {middles[-1]}, or the scheme affine")


# -- sharing -----------------------------------------------------------------------------------------------------


def sharing(trial: Trial) -> list[Fault] | None:
    """Tensors declared alike have exactly one scale, and value-preserving ops keep it."""
    roles = trial.rule.roles
    alike = [role.removeprefix(LIKE) for role in roles.values() if role.startswith(LIKE)]
    only_moves = trial.match is not None and all(_moves(node) for node in trial.match.nodes)
    if only_moves and "out" in roles:
        names = {slot.name for slot in trial.slots if slot.value.op != "get_attr"}
        what = f"{op_name(trial.match.root) if trial.match else ''} only moves values, and requantizes them"
        return _apart(trial, names | {"out"}, what, "like")
    faults: list[Fault] = []
    for name in dict.fromkeys(alike):
        if any(slot.value.op == "get_attr" for slot in trial.slots if slot.name == name):
            what = f"something is like {name}, which is a constant: scales of weights are not those of activations"
            faults.append(Fault(what, "let it be like an operand that comes from outside"))
        names = {name, *(other for other, role in roles.items() if role == f"{LIKE}{name}")}
        faults += _apart(trial, names, f"{' and '.join(sorted(names))} are to be alike, and have several scales", "")
    return faults if alike else None


def _moves(node: fx.Node) -> bool:
    return Trait.PRESERVES_VALUES in traits_of(node) or node.target is operator.getitem


def _apart(trial: Trial, names: set[str], what: str, kind: str) -> list[Fault]:
    """A fault if the tensors of some names are not in one group, or do not have one scale."""
    places = Places(trial.prepared)
    group_of = {site: group.name for group in trial.prepared.plan.groups for site in group.places}
    sites = [places.use(slot.node, slot.operand) for slot in trial.slots if slot.name in names]
    found = [_read(trial, slot) for slot in trial.slots if slot.name in names]
    if "out" in names and trial.match is not None:
        sites += [places.out(node) for node in outputs_of(trial.match.root)]
        found += [yielded_form(trial.converted, node) for node in _outputs(trial)]
    groups = {group_of.get(site) for site in sites}
    first = found[0] if found else None
    if len(groups) <= 1 and first is not None and all(form is not None and form.equals(first) for form in found):
        return []
    shown = "; ".join(str(form) if form is not None else "float" for form in found)
    operand = next((slot.name for slot in trial.slots if slot.name in names), "x")
    advice = f'give out the role "like {operand}"' if kind else "tie them, or give each a role of its own"
    return [Fault(f"{what}: {shown}", advice)]


def bias(trial: Trial) -> list[Fault] | None:
    """A quantized bias is int32 with zero point 0, on the product of input scale and weight scale."""
    by_role = {trial.backend.outcome(role).spec.role: name for name, role in _own_roles(trial)}
    if Role.BIAS not in by_role:
        return None
    name = by_role[Role.BIAS]
    found = {slot.name: form for slot in trial.slots if (form := _read(trial, slot)) is not None}
    if name not in found:
        return None if trial.match is None or trial.match[name] is None else []
    form = found[name]
    faults: list[Fault] = []
    if form.dtype is not torch.int32 or bool(form.zero_point.any()):
        faults.append(Fault(f"{name} is {form}, not int32 with zero point 0", "use INT32_BIAS for its role"))
    x, w = found.get(by_role.get(Role.ACT, "")), found.get(by_role.get(Role.WEIGHT, ""))
    if x is not None and w is not None:
        product = x.scale.double() * w.scale.double()
        if product.shape != form.scale.shape or not torch.allclose(form.scale.double(), product, rtol=1e-6, atol=0):
            what = f"the scale of {name} is not the product of the scales of input and weight"
            faults.append(Fault(what, "give one operand a role for activations and one a role for weights"))
    return faults


def _own_roles(trial: Trial) -> list[tuple[str, str]]:
    return [(name, role) for name, role in trial.rule.roles.items() if role in trial.backend.roles and name != "out"]
