"""Checks of a rule's techniques: dynamic and weight-only quantization.

Each is requested by op names, with every kind of spec that the backend supports for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from quantc.annotate.config_requests import ACROSS_ROWS
from quantc.annotate.match_operands import Slot
from quantc.annotate.quantizer import LIKE, Backend
from quantc.config.config import QuantConfig
from quantc.errors import AnnotationError
from quantc.ir.plan import Source
from quantc.ir.program import Program
from quantc.ir.site_index import Places, operand_nodes
from quantc.qdq.ops import is_quantize
from quantc.spec.formats import DType, Offer, PerGroup, PerToken, Role, Timing
from quantc.spec.spec import QuantSpec, name_of
from quantc.testing.conformance import Fault
from quantc.testing.number_checks import DB_A_BIT
from quantc.testing.rule_trial import Trial, calibrate_trial, quantizer_for, run, scale_inputs, sqnr, values_of
from quantc.verbs.convert import convert
from quantc.verbs.prepare import prepare

FACTORS = (1.0, 64.0, 1 / 16)
"""Scales of the inputs: run-time scales follow them."""
ELSEWHERE = 0.5
"""Fraction of the SQNR an op must keep on inputs larger or smaller than those it was made for."""
MIN_BITS = 4
"""With fewer the SQNR says little."""
GROUP = 4
ORDER = 1e-5
"""Allowed effect of the order of sums in float32, relative to the largest result: it depends on a weight's strides."""


def specs_of(backend: Backend, role: Role, timing: Timing) -> list[QuantSpec]:
    """One spec of each dtype, and one of each granularity, that a backend supports for a role and technique."""
    found: dict[QuantSpec, None] = {}
    for capability in backend.capabilities:
        if capability.role is not role or timing not in capability.timings:
            continue
        pairs = [(dtype, capability.granularities[0]) for dtype in capability.dtypes]
        pairs += [(capability.dtypes[0], share) for share in capability.granularities[1:]]
        for dtype, share in pairs:
            given = {"qmin": capability.qmin, "qmax": capability.qmax}
            bounds = {name: bound for name, bound in given.items() if bound is not None and dtype.bits <= 8}
            # fp16 has no scale, so none for each channel
            plain = share if dtype is not DType.FP16 else "per-tensor"
            granularity = PerGroup(size=GROUP) if share == "per-group" else plain
            spec = {"dtype": dtype, "scheme": capability.schemes[0], "role": role, "timing": timing}
            made = QuantSpec.model_validate({**spec, "granularity": granularity, **bounds})
            found[made.but(eps=max(made.eps, capability.min_eps))] = None
    return list(found)


def dynamic(trial: Trial) -> list[Fault] | None:
    """A dynamic rule reads its operands with qparams found at run time."""
    if trial.rule.dynamic is Offer.NO:
        return None
    specs = specs_of(trial.subject.given, Role.ACT, Timing.DYNAMIC)
    alike = [name for name, role in trial.rule.roles.items() if role.startswith(LIKE)]
    if alike:
        return [Fault(f"the rule is dynamic, and {alike[0]} is to share a scale: each tensor gets its own", _ALIKE)]
    if not specs:
        return [Fault("the rule is dynamic, and the backend takes no spec with run-time scales", _TAKES)]
    faults = [fault for spec in specs for fault in _asked(trial, spec)]
    return list(dict.fromkeys(faults))


def named(trial: Trial) -> list[Fault] | None:
    """A rule whose static form a config has to name takes the ops that are named, and no others."""
    backend = trial.subject.given
    if backend.table[trial.rule.name].static is not Offer.NAMED:
        return None
    config = QuantConfig()
    for slot in trial.slots:
        if slot.role in backend.roles:
            config = config.set_node(slot.node.name, backend.outcome(slot.role))
    if not config.rules:
        return [Fault("a config has to name the rule, and nothing that it reads has a spec to ask for", _NOTHING)]
    quantizer = quantizer_for(backend, trial.rule)
    faults: list[Fault] = []
    for given, is_named in ((QuantConfig(), False), (config, True)):
        prepared = prepare(trial.model.program, quantizer, config=given, allow_empty=True)
        is_taken = any(claim.rule == trial.rule.name for claim in prepared.plan.claims.rows.values())
        if is_taken != is_named:
            told = (
                "is named in a config, and the rule does not take it"
                if is_named
                else "is taken, although no config names it"
            )
            faults.append(Fault(f"{', '.join(trial.model.claimed)} {told}", _NOTHING))
    return faults


def weight_only(trial: Trial) -> list[Fault] | None:
    """A rule with a weight stores it in every format that the backend supports, and computes in float."""
    if not list(_weights(trial)):
        return None
    specs = specs_of(trial.subject.given, Role.WEIGHT, Timing.WEIGHT_ONLY)
    if not specs:
        return None
    faults = [fault for spec in specs for fault in _asked(trial, spec)]
    return list(dict.fromkeys(faults))


_NOTHING = "leave `static` out of the rule, or give what it reads roles of the backend"
_TAKES = "list a capability with timings=(Timing.DYNAMIC,) in the backend's `takes`, or leave `dynamic` out of the rule"
_ALIKE = "leave `dynamic` out of the rule, or give each name a role of its own"
_NOT_DYNAMIC = "leave `dynamic` out of the rule: it has no activation of its own to find the scale of"
_LEAVE_OUT = "leave the spec out of the backend's `takes`, or correct the rule"


def _weights(trial: Trial) -> Iterator[Slot]:
    for slot in trial.slots:
        if _role(trial, slot) is Role.WEIGHT and slot.value.op == "get_attr":
            yield slot


def _role(trial: Trial, slot: Slot) -> Role | None:
    """Role of an operand; None for one that follows others."""
    return trial.backend.outcome(slot.role).spec.role if slot.role in trial.backend.roles else None


def _asked(trial: Trial, spec: QuantSpec) -> list[Fault]:
    """Faults when a spec is requested for every op of the rule that reads something."""
    names = dict.fromkeys(slot.node.name for slot in trial.slots if _role(trial, slot) is spec.role)
    if not names or _cannot(trial, spec):
        return (
            []
            if names
            else [Fault("the rule is dynamic, and reads no activation that it asks for quantized", _NOT_DYNAMIC)]
        )
    try:
        prepared = _prepared(trial, spec, names)
    except AnnotationError as error:
        advice = _NOT_DYNAMIC if spec.timing is Timing.DYNAMIC else _LEAVE_OUT
        return [Fault(f"{name_of(spec)}: {error.what}", advice, error.where or "")]
    claims = prepared.plan.claims.rows.items()
    own = [claim for node, claim in claims if claim.rule == trial.rule.name or node.name in names]
    if spec.timing is Timing.DYNAMIC:  # the rule itself says that it is; a weight may be stored by a smaller one
        own = [claim for claim in own if claim.rule == trial.rule.name]
    if spec.timing not in [claim.timing for claim in own]:
        return [Fault(f"{name_of(spec)} was asked for, and the rule does not take it so", _LEAVE_OUT)]
    return _waiting(prepared, spec) + _numbers(trial, prepared, spec)


def asked_for(trial: Trial, spec: QuantSpec) -> Program | None:
    """The model prepared with a spec for every op of the rule that reads something; None if the rule takes no such spec."""
    names = dict.fromkeys(slot.node.name for slot in trial.slots if _role(trial, slot) is spec.role)
    if not names or _cannot(trial, spec):
        return None
    try:
        prepared = _prepared(trial, spec, names)
    except AnnotationError:
        return None
    timings = {claim.timing for claim in prepared.plan.claims.rows.values() if claim.rule == trial.rule.name}
    return prepared if spec.timing in timings else None


def _prepared(trial: Trial, spec: QuantSpec, names: Iterable[str]) -> Program:
    config = QuantConfig()
    for name in names:
        config = config.set_node(name, spec)
    quantizer = quantizer_for(trial.backend, trial.rule)
    return prepare(trial.model.program, quantizer, config=config, allow_empty=True)


def _cannot(trial: Trial, spec: QuantSpec) -> bool:
    """True if a spec does not apply to these ops: rows that are summed over, or groups that do not divide their weights."""
    if isinstance(spec.granularity, PerToken):
        from quantc.ir.dialect import op_name

        return any(op_name(slot.node) in ACROSS_ROWS for slot in trial.slots)
    if isinstance(spec.granularity, PerGroup):
        tensors = [trial.prepared.tensor(slot.value) for slot in _weights(trial)]
        return any(size % GROUP for w in tensors if w is not None and w.dim() > 1 for size in w.shape[:2])
    return False


def _waiting(prepared: Program, spec: QuantSpec) -> list[Fault]:
    """Nothing that the ops read may wait for calibration."""
    places = Places(prepared)
    claims = prepared.plan.claims
    waiting = [
        group.name
        for group in prepared.plan.groups
        if group.source is Source.DATA
        for site in group.places
        if (claim := claims.get(places.node(site))) is not None and claim.timing is spec.timing
    ]
    return [Fault(f"{name_of(spec)}: the scale of {waiting[0]} still comes from data", _LEAVE_OUT)] if waiting else []


def _numbers(trial: Trial, prepared: Program, spec: QuantSpec) -> list[Fault]:
    needs_data = any(group.source is Source.DATA for group in prepared.plan.groups)
    converted = convert(calibrate_trial(prepared.clone(), trial.inputs) if needs_data else prepared)
    faults = _far(trial, converted, spec)
    if spec.timing is Timing.WEIGHT_ONLY and not faults:
        faults = _not_float(trial, converted, spec)
    return faults


def _far(trial: Trial, converted: Program, spec: QuantSpec) -> list[Fault]:
    """The program is close to the float one, whatever the size of its inputs."""
    bits = min(trial.bits, int(math.log2(spec.levels))) if not spec.dtype.is_float else min(trial.bits, MIN_BITS)
    if bits < MIN_BITS:
        return []
    for factor in FACTORS if spec.timing is Timing.DYNAMIC else FACTORS[:1]:
        inputs = scale_inputs(trial.inputs, factor)
        least = DB_A_BIT * bits * (1 if factor == 1 else ELSEWHERE)
        found = sqnr(run(trial.model.program, inputs), run(converted, inputs))
        if found < least:
            what = f"{name_of(spec)}: the SQNR is {found:.1f} dB on inputs {factor:g} times as large"
            return [Fault(f"{what}, and {bits} bits should give {least:.0f}", _LEAVE_OUT)]
    return []


def _not_float(trial: Trial, converted: Program, spec: QuantSpec) -> list[Fault]:
    """Faults unless the result is the float program's on the stored weights, up to summation order."""
    if any(is_quantize(node) for node in converted.nodes()):
        return [Fault(f"{name_of(spec)}: activations are quantized too", _LEAVE_OUT)]
    plain = trial.prepared.clone()
    for slot in _weights(trial):
        weight = plain.tensor(plain.node(slot.value.name))
        read = operand_nodes(converted.node(slot.node.name))[slot.operand]
        if weight is not None and read.op == "call_function":
            with torch.no_grad():
                weight.copy_(values_of(converted, [read], trial.inputs)[0])
    pairs = zip(run(plain, trial.inputs), run(converted, trial.inputs), strict=True)
    if all(float((right - found).abs().max()) <= ORDER * float(right.abs().max()) for right, found in pairs):
        return []
    return [Fault(f"{name_of(spec)}: the result is not that of the float op on the stored weight", _LEAVE_OUT)]
