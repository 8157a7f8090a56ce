"""Refuse config requests that an annotated program does not satisfy, with the reason."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from quantc.annotate.quantizer import TableQuantizer, members_of
from quantc.annotate.reasons import Reasons
from quantc.config.config import QuantConfig
from quantc.config.config_rule import ConfigRule
from quantc.config.resolve import Resolution
from quantc.config.selectors import ByAll
from quantc.errors import AnnotationError
from quantc.ir.decisions import Fixed, Float, Quantize
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.spec.formats import Timing
from quantc.spec.spec import QuantSpec, name_of


def refuse_unmet(program: Program, config: Resolution) -> None:
    """Raise AnnotationError for a dynamic or weight-only rule of the config that takes effect nowhere."""
    claims = program.plan.claims
    for rule, nodes in _places(config).items():
        asked = rule.timing
        if any((claim := claims.get(node)) is not None and claim.timing is asked for node in nodes):
            continue
        if not _is_in_force(rule, nodes, program):
            continue  # where it could have come to something, a later rule says otherwise
        first = next((node for node in nodes if node not in claims), nodes[0])
        raise AnnotationError(
            f"nothing came of the config's rule {rule}: {_why_not(program, first)}",
            where=program.describe(first),
            advice=_ADVICE[asked],
        )


def refuse_unheeded(program: Program, config: Resolution) -> None:
    """Raise AnnotationError if a quantizer without a table silently ignores the config: on each op it claims, some
    tensor of the role of a setting must have the requested spec."""
    by_table = {member.name for member in members_of(program.plan.quantizer) if isinstance(member, TableQuantizer)}
    decided: dict[fx.Node, list[QuantSpec]] = {}
    places = Places(program)
    for site, outcome in program.plan.outcomes.items():
        if isinstance(outcome, Quantize | Fixed):
            decided.setdefault(places.node(site), []).append(outcome.spec)
    for node, claim in program.plan.claims.rows.items():
        if claim.quantizer in by_table:
            continue
        for role, setting in config.nodes.get(node, {}).items():
            found = [spec for spec in decided.get(node, ()) if spec.role is role]
            if found and not any(_is_as_asked(spec, setting.use) for spec in found):
                raise AnnotationError(
                    f"{claim.quantizer} does not heed the config's rule {setting.rule}: "
                    f"it takes {node.name} as {name_of(found[0])}",
                    where=program.describe(node),
                    advice="let its `annotate` look at annotator.config.setting(node), or leave the rule out",
                )


def _is_as_asked(spec: QuantSpec, use: Quantize | Fixed | Float) -> bool:
    if isinstance(use, Float):
        return False
    return spec.but(granularity=use.spec.granularity) == use.spec


def _places(config: Resolution) -> dict[ConfigRule, list[fx.Node]]:
    """The nodes where each dynamic or weight-only rule is in effect; without rules for everything."""
    settings = [(node, setting) for node, roles in config.nodes.items() for setting in roles.values()]
    settings += [(consumer, setting) for (_, consumer), setting in config.edges.items()]
    rules: dict[int, ConfigRule] = {}  # a rule is dear to hash, and there is one object of each
    places: dict[int, dict[fx.Node, None]] = {}
    for node, setting in settings:
        rule = rules.setdefault(id(setting.rule), setting.rule)
        if rule.timing is not Timing.STATIC and not isinstance(rule.select, ByAll):
            places.setdefault(id(rule), {})[node] = None
    return {rules[number]: [*nodes] for number, nodes in places.items()}


def _why_not(program: Program, node: fx.Node) -> str:
    claim = program.plan.claims.get(node)
    return Reasons(program)(node).text if claim is None else f"{node.name} is {claim}"


def _is_in_force(rule: ConfigRule, nodes: Iterable[fx.Node], program: Program) -> bool:
    """True if a rule is in effect wherever it matches."""
    alone = QuantConfig(rules=(rule,)).resolve(program)
    return {*alone.nodes, *(consumer for _, consumer in alone.edges)} <= set(nodes)


_ADVICE = {
    Timing.DYNAMIC: "leave the rule out, or give it to ops that can: `quantc backends` shows which are dynamic",
    Timing.WEIGHT_ONLY: "leave the rule out, or give it to ops whose weights are constants",
    Timing.STATIC: "leave the rule out",
}
