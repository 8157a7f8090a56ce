"""The quantization plan as data, so that a prepared program can be saved, calibrated further and converted.

Nodes and sites are written by name: `conv2d`, `true_graph_0/conv2d`, `conv2d:out0`, `true_graph_0/conv2d:in1`. Repeated
decisions (`uses`) are written once and referenced by number. A quantizer is a rule table and code, so only its name is
written: that of a backend, which is looked up among the installed ones when the file is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, SerializerFunctionWrapHandler, model_serializer
from torch import fx

from quantc.annotate.quantizer import Quantizer, Quantizers, TableQuantizer, instruction_sets_of, quantizer_of
from quantc.config.config import QuantConfig
from quantc.errors import LoadError, PluginError, UnknownNameError
from quantc.ir.decisions import Derived, Fixed, Quantize, TensorOutcome
from quantc.ir.plan import AbsentQuantizer, Claim, Group, Part, Plan, Source
from quantc.ir.program import Program
from quantc.ir.sites import NodeTable, Site
from quantc.observe.observation_registry import OBSERVATIONS
from quantc.observe.store import HalvesRecord, SiteRecord, Withheld
from quantc.pipeline.registry import BACKENDS
from quantc.spec.arithmetic import Arithmetic
from quantc.spec.formats import Timing
from quantc.spec.instruction_sets import INSTRUCTION_SETS
from quantc.spec.numerics import QParams
from quantc.store.file_versions import ADVICE
from quantc.text.digests import is_digest

_SITE = re.compile(r"(?:(?P<graph>.+)/)?(?P<node>[^/:]+):(?P<place>out|in)(?P<index>\d{1,9})", re.ASCII)


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ClaimData(_Data):
    quantizer: str
    rule: str
    root: str
    part: Part
    timing: Timing = Timing.STATIC


class GroupData(_Data):
    name: str
    use: NonNegativeInt
    values: list[str]
    places: list[str]
    source: Source


class QuantizerData(_Data):
    """The quantizer that annotated the program. `backends` are those to look up, in order of precedence; empty if it is not a backend."""

    name: str
    backends: list[str]


ADDED = ("arithmetic", "collected", "fitted", "fitted_to", "made_for")
"""Fields that came later, and are written where they say something."""


class PlanData(_Data):
    """A plan without its tensors, which are stored under `statistics/<group>/<name>` and `qparams/<group>/<name>`."""

    quantizer: QuantizerData | None
    config: QuantConfig | None
    claims: dict[str, ClaimData]
    left_float: dict[str, str]
    lowered: dict[str, str] = {}
    made_for: dict[str, str] = {}
    uses: list[TensorOutcome]
    outcomes: dict[str, NonNegativeInt]
    groups: list[GroupData]
    statistics: dict[str, SiteRecord]
    batches: NonNegativeInt
    qparams: list[str]
    instruction_sets: dict[str, str] | None = None
    """Files from before it was written leave it to the quantizer."""
    arithmetic: dict[str, Arithmetic] = {}
    collected: dict[str, HalvesRecord] = {}
    fitted: list[str] = []
    """Sites; their tensors are stored under `fitted/<site>/value`."""
    fitted_to: dict[str, str] = {}
    """By site: the digest of the constant that it was fitted to."""

    @model_serializer(mode="wrap")
    def _without_empty(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what there is none of: earlier versions read such files."""
        data: dict[str, Any] = dump(self)
        return {name: value for name, value in data.items() if name not in ADDED or value}


# -- writing ---------------------------------------------------------------------------------------------------


class TakesTensors(Protocol):
    def add(self, name: str, tensor: torch.Tensor) -> None: ...


class GivesTensors(Protocol):
    def take(self, name: str) -> torch.Tensor: ...


def nodes_of(program: Program) -> dict[str, fx.Node]:
    """Every node by its name, with its path if it is in a nested graph."""
    return {
        f"{path}/{node.name}" if path else node.name: node for path, graph in program.graphs() for node in graph.nodes
    }


def plan_data(plan: Plan, names: Mapping[fx.Node, str], tensors: TakesTensors) -> PlanData:
    """A plan as data; its tensors are added to `tensors`. `names` are those of the nodes."""
    uses: dict[Any, int] = {}

    def number(outcome: TensorOutcome) -> int:
        return uses.setdefault(outcome, len(uses))

    outcomes = {str(site): number(outcome) for site, outcome in plan.outcomes.items()}
    groups = [
        GroupData(
            name=group.name,
            use=number(group.outcome),
            values=[str(site) for site in group.values],
            places=[str(site) for site in group.places],
            source=group.source,
        )
        for group in plan.groups
    ]
    statistics: dict[str, SiteRecord] = {}
    for name, observation in plan.statistics.items():
        statistics[name], own = SiteRecord.of(observation)
        for key, tensor in own.items():
            tensors.add(f"statistics/{name}/{key}", tensor)
    collected: dict[str, HalvesRecord] = {}
    for name, halves in plan.collected.items():
        collected[name], own = HalvesRecord.of(halves)
        for key, tensor in own.items():
            tensors.add(f"collected/{name}/{key}", tensor)
    for site, tensor in plan.fitted.items():
        tensors.add(f"fitted/{site}/value", tensor)
    for name, qparams in plan.qparams.items():
        tensors.add(f"qparams/{name}/scale", qparams.scale)
        tensors.add(f"qparams/{name}/zero_point", qparams.zero_point)
    return PlanData(
        quantizer=_quantizer_data(plan.quantizer, plan.absent),
        config=plan.config,
        claims={names[node]: _claim_data(claim) for node, claim in plan.claims.rows.items()},
        left_float={names[node]: reason for node, reason in plan.left_float.rows.items()},
        lowered={names[node]: name for node, name in plan.lowered.rows.items()},
        made_for={names[node]: name for node, name in plan.made_for.rows.items()},
        uses=list(uses),
        outcomes=outcomes,
        groups=groups,
        statistics=statistics,
        batches=plan.batches,
        qparams=list(plan.qparams),
        instruction_sets=plan.instruction_sets,
        arithmetic=plan.arithmetic,
        collected=collected,
        fitted=[str(site) for site in plan.fitted],
        fitted_to={str(site): found for site, found in plan.fitted_to.items()},
    )


def _claim_data(claim: Claim) -> ClaimData:
    return ClaimData(quantizer=claim.quantizer, rule=claim.rule, root=claim.root, part=claim.part, timing=claim.timing)


def _quantizer_data(quantizer: Quantizer | None, absent: AbsentQuantizer | None) -> QuantizerData | None:
    if quantizer is None:
        return None if absent is None else QuantizerData(name=absent.name, backends=[*absent.backends])
    members = quantizer.members if type(quantizer) is Quantizers else (quantizer,)
    names = [member.name for member in members if _is_installed(member)]
    return QuantizerData(name=quantizer.name, backends=names if len(names) == len(members) else [])


def _is_installed(quantizer: Quantizer) -> bool:
    """True if it is a backend that can be looked up by name."""
    if type(quantizer) is not TableQuantizer or quantizer.name not in BACKENDS:
        return False
    try:
        return bool(BACKENDS[quantizer.name] == quantizer.backend)
    except PluginError:  # a third-party backend of the same name that cannot be imported
        return False


# -- reading ---------------------------------------------------------------------------------------------------


def plan_of(
    data: PlanData,
    nodes: Mapping[str, fx.Node],
    tensors: GivesTensors,
    *,
    needs_statistics: bool = True,
    quantizers: Mapping[str, Quantizer] | None = None,
) -> tuple[Plan, list[str]]:
    """Plan from data, and notes on it. Unless statistics are needed, those of unavailable observers are dropped;
    `quantizers` are those that are no installed backends. Statistics of tensors without numbers are `Withheld`."""
    uses = data.uses
    outcomes = {
        site_of(text, "outcomes"): _use(uses, index, f"outcomes.{text}") for text, index in data.outcomes.items()
    }
    quantizer, notes = _quantizer(data.quantizer, quantizers or {})
    plan = Plan(
        quantizer=quantizer,
        config=data.config,
        claims=NodeTable({_node(nodes, name, "claims"): Claim(**dict(claim)) for name, claim in data.claims.items()}),
        left_float=NodeTable({_node(nodes, name, "left_float"): why for name, why in data.left_float.items()}),
        lowered=NodeTable({_node(nodes, name, "lowered"): old for name, old in data.lowered.items()}),
        made_for=NodeTable({_node(nodes, name, "made_for"): old for name, old in data.made_for.items()}),
        outcomes=outcomes,
        groups=tuple(_group(uses, index, group) for index, group in enumerate(data.groups)),
        batches=data.batches,
        instruction_sets=_instruction_sets(data.instruction_sets, quantizer),
        arithmetic=data.arithmetic,
        absent=AbsentQuantizer(data.quantizer.name, tuple(data.quantizer.backends))
        if quantizer is None and data.quantizer is not None
        else None,
    )
    for name, record in data.statistics.items():
        where = f"plan.statistics.{name}"
        own = {key: tensors.take(f"statistics/{name}/{key}") for key in dict.fromkeys(record.tensors)}
        if any(tensor.is_meta for tensor in own.values()):
            plan.statistics[name] = Withheld(record, own)
        elif needs_statistics or _is_offered(record.statistics):
            plan.statistics[name] = record.restore(own, where)
        else:
            notes.append(f"the statistics of {name} are left out: no package offers {record.statistics!r} here")
    for name, halves in data.collected.items():
        own = {key: tensors.take(f"collected/{name}/{key}") for key in dict.fromkeys(halves.tensors)}
        if any(tensor.is_meta for tensor in own.values()):
            notes.append(f"what was collected of {name} is left out: it was not given with the text")
        else:
            plan.collected[name] = halves.restore(own, f"plan.collected.{name}")
    for text in dict.fromkeys(data.fitted):
        plan.fitted[site_of(text, "fitted")] = _fitted(text, tensors)
    for text, found in data.fitted_to.items():
        if text not in data.fitted or not is_digest(found):
            raise _refusal("it is no digest of what a fitted tensor was fitted to", f"fitted_to.{text[:60]}")
        plan.fitted_to[site_of(text, "fitted_to")] = found
    for name in dict.fromkeys(data.qparams):
        plan.qparams[name] = _qparams(name, tensors)
    return plan, notes


def _is_offered(statistics: str) -> bool:
    """True if an observer with such statistics is installed and works."""
    try:
        OBSERVATIONS[statistics]
    except (UnknownNameError, PluginError):
        return False
    return True


def _refusal(what: str, where: str) -> LoadError:
    return LoadError(what, where=f"plan.{where}", advice=ADVICE)


def site_of(text: str, where: str) -> Site:
    """The site of a text such as `conv2d:out0`. LoadError unless it is one."""
    found = _SITE.fullmatch(text)
    if found is None:
        raise _refusal(f"{text[:60]!r} is not a site", where)
    index = int(found["index"])
    graph, node = found["graph"] or "", found["node"]
    return Site(graph, node, out=index) if found["place"] == "out" else Site(graph, node, operand=index)


def _sites(texts: Iterable[str], where: str) -> tuple[Site, ...]:
    return tuple(site_of(text, where) for text in texts)


def _node(nodes: Mapping[str, fx.Node], name: str, where: str) -> fx.Node:
    node = nodes.get(name)
    if node is None:
        raise _refusal(f"unknown node {name[:60]!r}", where)
    return node


def _use(uses: list[TensorOutcome], index: int, where: str) -> TensorOutcome:
    if index >= len(uses):
        raise _refusal(f"no use number {index}", where)
    return uses[index]


def _group(uses: list[TensorOutcome], index: int, data: GroupData) -> Group:
    where = f"groups.{index}"
    outcome = _use(uses, data.use, where)
    if not isinstance(outcome, Quantize | Fixed | Derived):
        raise _refusal(f"no group is {outcome}", f"{where}.use")
    if not data.places:
        raise _refusal("a group has at least one place", f"{where}.places")
    if data.source not in _sources(outcome):
        raise _refusal(f"the scales of {outcome} do not come from {data.source.value!r}", f"{where}.source")
    return Group(data.name, outcome, _sites(data.values, where), _sites(data.places, where), data.source)


def _sources(outcome: Quantize | Fixed | Derived) -> tuple[Source, ...]:
    """The possible sources of a group's scales."""
    if isinstance(outcome, Fixed):
        return (Source.GIVEN,)
    if isinstance(outcome, Derived):
        return (Source.DERIVED,)
    return (Source.RUN_TIME,) if outcome.spec.timing is Timing.DYNAMIC else (Source.CONSTANTS, Source.DATA)


def _instruction_sets(given: dict[str, str] | None, quantizer: Quantizer | None) -> dict[str, str]:
    if given is None:
        return instruction_sets_of(quantizer)
    for member, name in given.items():
        if name and name not in INSTRUCTION_SETS:
            raise _refusal(f"unknown instruction set {name[:60]!r}", f"instruction_sets.{member[:60]}")
    return given


def _fitted(text: str, tensors: GivesTensors) -> torch.Tensor:
    tensor = tensors.take(f"fitted/{text}/value")
    if not tensor.is_floating_point() or not (tensor.is_meta or bool(torch.isfinite(tensor).all())):
        raise _refusal("the tensor does not hold finite floats", f"fitted.{text}")
    return tensor


def _qparams(name: str, tensors: GivesTensors) -> QParams:
    scale, zero_point = tensors.take(f"qparams/{name}/scale"), tensors.take(f"qparams/{name}/zero_point")
    where = f"qparams.{name}"
    if scale.is_meta or zero_point.is_meta:
        return QParams(scale.to("meta"), zero_point.to("meta"))
    if scale.dtype != torch.float32 or not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise _refusal("the tensor 'scale' is not positive float32", where)
    if zero_point.dtype != torch.int64 or zero_point.shape != scale.shape:
        raise _refusal("the tensor 'zero_point' is not int64 of the scale's shape", where)
    return QParams(scale, zero_point)


def _quantizer(data: QuantizerData | None, given: Mapping[str, Quantizer]) -> tuple[Quantizer | None, list[str]]:
    """The quantizer by name. Without it all works but what only it can tell; so its absence is a note, not an error."""
    if data is None:
        return None, []
    if data.name in given:
        return given[data.name], []
    if not data.backends:
        return None, [
            f"{data.name} is not an installed backend, so it cannot be looked up: program.plan.quantizer is None"
        ]
    try:
        return quantizer_of(data.backends[0] if len(data.backends) == 1 else data.backends), []
    except (UnknownNameError, PluginError) as error:
        return None, [f"program.plan.quantizer is None: {error.what}"]
