"""Static checks of a backend's roles and rules, without models."""

from __future__ import annotations

from quantc.annotate.quantizer import LIKE, ON_DEMAND, PASS, Backend
from quantc.errors import QuantcError
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.formats import Offer, PerChannel, Role, Timing
from quantc.spec.spec import name_of
from quantc.testing.conformance import Check, Fault, Ledger


def check_table(backend: Backend, ledger: Ledger) -> None:
    """Rows of the backend as a whole, and those of rules as written."""
    ledger.add("", Check.JSON, _json(backend))
    ledger.add("", Check.SPECS, _specs(backend))
    ledger.add("", Check.MODES, _modes(backend))
    ledger.add("", Check.ROLES, _roles(backend))
    for rule in backend.table:
        ledger.add(rule.name, Check.SUPPORTS, _supports(rule))
        ledger.add(rule.name, Check.SHARING, _sharing(rule), where="as written")


def _json(backend: Backend) -> list[Fault]:
    try:
        again = RuleTable.from_json(backend.table.to_json())
    except QuantcError as error:
        return [Fault(f"the table has no JSON form: {error.what}", error.advice or "", error.where or "")]
    if again == backend.table:
        return []
    return [Fault("the table differs when it is read back from JSON", "register its conditions with @predicate")]


def _specs(backend: Backend) -> list[Fault]:
    faults: list[Fault] = []
    for role in backend.roles:
        spec = backend.outcome(role).spec
        where = f"role {role!r}, {name_of(spec)}"
        reason = backend.why_not(spec)
        if reason is not None:
            faults.append(Fault(f"the backend does not take its own role {role!r}: {reason}", _TAKES, where))
        if spec.role is Role.ACT and isinstance(spec.granularity, PerChannel) and spec.timing is Timing.STATIC:
            faults.append(Fault(f"role {role!r} gives activations a scale for each channel", _ONE_SCALE, where))
        if spec.role is Role.BIAS and spec.dtype.bits < 32:
            faults.append(Fault(f"role {role!r} gives biases {spec.dtype.bits} bits", "use INT32_BIAS", where))
    return faults


_TAKES = "list its spec in the backend's `takes`, or change the role"
_ONE_SCALE = "a sum over channels has no common scale then; use a per-tensor spec"


def _modes(backend: Backend) -> list[Fault] | None:
    """Modes request what their names say, the backend supports it, and some rule takes it."""
    faults: list[Fault] = []
    able = {
        Timing.DYNAMIC: any(rule.dynamic is Offer.YES for rule in backend.table),
        Timing.WEIGHT_ONLY: any(_has_weight(backend, rule) for rule in backend.table),
    }
    for mode, spec in backend.modes.items():
        where = f"mode {mode!r}, {name_of(spec)}"
        if mode not in (*able,):
            faults.append(Fault(f"unknown mode {mode!r}", f"call it {' or '.join(able)}", where))
            continue
        if spec.timing.value != mode:
            what = f"mode {mode!r} asks for a spec whose timing is {spec.timing.value}"
            faults.append(Fault(what, f"write spec.but(timing={mode!r})", where))
            continue
        reason = backend.why_not(spec)
        if reason is not None:
            faults.append(Fault(f"the backend does not take what its mode {mode!r} asks for: {reason}", _TAKES, where))
        if not able[spec.timing]:
            faults.append(Fault(f"no rule comes to anything in mode {mode!r}", _NOBODY[spec.timing], where))
    return faults if backend.modes else None


_NOBODY = {
    Timing.DYNAMIC: "give rules dynamic=Offer.YES, or leave the mode out",
    Timing.WEIGHT_ONLY: "give operands of rules a role for weights, or leave the mode out",
}


def _has_weight(backend: Backend, rule: Rule) -> bool:
    own = (backend.outcome(role) for role in rule.roles.values() if role in backend.roles)
    return any(outcome.spec.role is Role.WEIGHT for outcome in own)


def _roles(backend: Backend) -> list[Fault]:
    used = {role.removesuffix(ON_DEMAND) for rule in backend.table for role in rule.roles.values()}
    advice = "give it to a name in a rule, or take it out of `roles`"
    return [Fault(f"no rule uses the role {role!r}", advice) for role in backend.roles if role not in used]


def _supports(rule: Rule) -> list[Fault]:
    if rule.supports:
        return []
    return [Fault("the rule says nothing of where it can be carried out", 'give it levels: supports={"qdq"}')]


def _sharing(rule: Rule) -> list[Fault] | None:
    """An output like an operand of any form, though another operand is the one passed on."""
    out = rule.roles.get("out", "")
    passed_on = [name for name, role in rule.roles.items() if role == PASS]
    if not out.startswith(LIKE) or not passed_on:
        return None
    other = out.removeprefix(LIKE)
    if other in passed_on:
        return []
    what = f"the rule passes on {', '.join(passed_on)}, and `out` is to be like {other}"
    return [Fault(what, f'give out the role "like {passed_on[0]}"')]
