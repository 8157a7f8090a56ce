"""An eager model in the graph engine: what its observers have seen and its qconfigs say becomes the plan of a Program."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from quantc.annotate.annotator import Annotator
from quantc.annotate.quantizer import Backend, Quantizer, finishing_passes, quantizer_of
from quantc.flows.eager import checks
from quantc.flows.eager.attach_observers import (
    FUNCTIONALS,
    OBSERVER,
    observer_of,
    register_activation_post_process_hook,
)
from quantc.flows.eager.faults import EagerError, NothingQuantizedError, as_error
from quantc.flows.eager.fuse_modules import set_module
from quantc.flows.eager.layer_runs import ledger_of, unwatch
from quantc.flows.eager.mappings import get_default_static_quant_module_mappings
from quantc.flows.eager.propagate import qconfig_of
from quantc.flows.foreign_observers import ObservedBy, spec_of
from quantc.ir.decisions import Quantize
from quantc.ir.plan import Group, Source
from quantc.ir.program import LogEntry, Program, Stage
from quantc.ir.site_index import Places
from quantc.nn.qat_module import Trained
from quantc.nn.stubs import DeQuantStub
from quantc.observe.trained import Trained as TrainedScales
from quantc.patterns.explain_match import Explanation
from quantc.pipeline.pipeline import Pass
from quantc.spec.formats import Role
from quantc.spec.observation import Observation
from quantc.spec.spec import QuantSpec
from quantc.verbs.capture import Method, capture
from quantc.verbs.prepare import prepare as prepare_program

OUTSIDE = "it is outside of the stubs, where the eager model computes in float"
END = ""
"""The mark of a DeQuantStub."""


@torch.library.custom_op("quantc_eager::mark", mutates_args=())
def mark(x: Tensor, path: str) -> Tensor:
    """Stands in a captured graph where an observer stood in the model."""
    return x.clone()


@mark.register_fake
def _(x: Tensor, path: str) -> Tensor:
    return torch.empty_like(x)


class Mark(nn.Module):
    """In the place of an observer, while the model is captured."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: Any) -> Any:
        return mark(x, self.path) if isinstance(x, Tensor) else x


@dataclass(frozen=True)
class EagerQuantizer:
    """Annotates what lies between the stubs of an eager model, as a backend has it."""

    inner: Quantizer
    outside: frozenset[str]
    """The nodes that compute in float, by name."""

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def backend(self) -> Any:
        return getattr(self.inner, "backend", self.inner)

    def transforms(self) -> tuple[Pass, ...]:
        return self.inner.transforms()

    def finishing(self) -> tuple[Pass, ...]:
        return finishing_passes(self.inner)

    def annotate(self, annotator: Annotator) -> None:
        for node in annotator.program.graph.nodes:
            if node.name in self.outside and node.op == "call_function":
                annotator.left_out.setdefault(node, OUTSIDE)
        self.inner.annotate(annotator)

    def validate(self, program: Program) -> None:
        self.inner.validate(program)

    def supported_operators(self) -> tuple[str, ...]:
        return self.inner.supported_operators()

    def explain(self, program: Program, node: str) -> Explanation:
        return self.inner.explain(program, node)


def to_program(
    prepared: nn.Module,
    example_inputs: tuple[Any, ...],
    backend: str | Backend | Quantizer = "x86",
    *,
    method: Method = "auto",
    example_kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Program:
    """A calibrated Program of a model that `prepare` gave observers and that has run on data.

    What lies between the stubs is quantized as the backend has it, with the specs of the qconfigs and the scales of the
    observers; all else stays float. `qc.convert` and `qc.lower` take it from there. The model is not changed.
    """
    _check(prepared)
    observers = {path: found for path, layer in checks.layers(prepared) if (found := observer_of(layer)) is not None}
    program = capture(
        _with_marks(prepared), example_inputs, method, example_kwargs=example_kwargs, dynamic_shapes=dynamic_shapes
    )
    program.name = type(prepared).__name__
    seen, outside = _take_marks_out(program)
    quantizer = EagerQuantizer(quantizer_of(backend), outside)
    result = prepare_program(program, quantizer)
    return _Handover(result, prepared, observers, seen).run()


def _check(prepared: nn.Module) -> None:
    if not any(observer_of(layer) is not None for _, layer in checks.layers(prepared)):
        raise NothingQuantizedError(
            "the model has no observers", where=type(prepared).__name__, advice="call prepare, and run it on data"
        )
    faults = list(checks.not_observed(prepared, get_default_static_quant_module_mappings(), ledger_of(prepared)))
    faults = faults or list(checks.in_training(prepared, "a Program of it is for inference"))
    if faults:
        raise as_error(faults, can_accept=False)
    for path, layer in checks.layers(prepared):
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and observer_of(layer) is not None:
            raise EagerError(
                "a batch norm is folded into the layer before it, so what was observed between them is of no use",
                where=path,
                advice="fuse the two with fuse_modules before prepare",
            )


def _with_marks(prepared: nn.Module) -> nn.Module:
    """A copy with marks in place of observers and of DeQuantStubs."""
    twin = copy.deepcopy(prepared)
    unwatch(twin)
    for path, layer in list(checks.layers(twin)):
        if isinstance(layer, DeQuantStub):
            set_module(twin, path, Mark(END))
        elif isinstance(layer, Trained):
            plain = layer.to_float()
            plain.add_module(OBSERVER, Mark(path))
            register_activation_post_process_hook(plain)
            set_module(twin, path, plain)
        elif observer_of(layer) is not None or isinstance(layer, FUNCTIONALS):
            layer._modules[OBSERVER] = Mark(path) if observer_of(layer) is not None else nn.Identity()
    return twin


def _take_marks_out(program: Program) -> tuple[dict[str, str], frozenset[str]]:
    """Remove the marks; return the layer path by name of the node it observed, and the names of the nodes outside the stubs."""
    seen: dict[str, str] = {}
    inside: set[fx.Node] = set()
    outside: set[str] = set()
    for node in list(program.graph.nodes):
        if node.target is torch.ops.quantc_eager.mark.default:
            value, path = node.args
            if path != END:
                seen[value.name] = path
                inside.add(node)
        elif any(source in inside for source in node.all_input_nodes):
            inside.add(node)
        else:
            outside.add(node.name)
    for node in reversed(list(program.graph.nodes)):
        if node.target is torch.ops.quantc_eager.mark.default:
            program.forward(node, node.args[0])
    return seen, frozenset(outside)


def _trained_scales(layer: Trained, spec: QuantSpec) -> TrainedScales:
    """The scales of a weight from its fake quantizer, after it has observed the final weight, as in `convert`."""
    weight, _ = layer.learned()
    observer = ObservedBy.of(copy.deepcopy(layer.weight_fake_quant))
    observer.update(weight)
    return TrainedScales(spec.granularity, observer.qparams(spec))


@dataclass
class _Handover:
    """Hand the statistics of a model's observers over to the groups of a plan."""

    program: Program
    model: nn.Module
    observers: dict[str, nn.Module]
    seen: dict[str, str]

    def run(self) -> Program:
        plan, places = self.program.plan, Places(self.program)
        groups: list[Group] = []
        notes: list[str] = []
        for group in plan.groups:
            if group.source is Source.CONSTANTS and isinstance(group.outcome, Quantize):
                groups.append(self._weight(group, places))
            elif group.source is Source.DATA and isinstance(group.outcome, Quantize):
                path = self._observer_for(group, places)
                found: Observation = ObservedBy.of(self.observers[path])
                groups.append(replace(group, outcome=Quantize(spec_of(self.observers[path]))))
                plan.statistics[group.name] = found
                notes.append(f"{group.name}: as {path} observed it")
            else:
                groups.append(group)
        plan.groups = tuple(groups)
        of_site = {site: group for group in groups for site in group.places}
        for site, outcome in plan.outcomes.items():
            known = of_site.get(site)
            if isinstance(outcome, Quantize) and known is not None and isinstance(known.outcome, Quantize):
                plan.outcomes[site] = known.outcome
        if plan.quantizer is not None:
            plan.quantizer.validate(self.program)
        plan.batches = max(1, getattr(ledger_of(self.model), "runs", 1))
        self.program.stage = Stage.CALIBRATED
        self.program.log.append(LogEntry("eager observers", 0.0, True, tuple(notes)))
        return self.program

    def _weight(self, group: Group, places: Places) -> Group:
        """Weights are quantized as the qconfig of their layer says; the engine's spec stands where it says nothing."""
        for site in group.places:
            origin = self.program.origins.get(places.node(site))
            layer = self._layer(origin.module_path if origin is not None else "")
            if layer is None or qconfig_of(layer) is None:
                continue
            spec = spec_of(qconfig_of(layer).weight, Role.WEIGHT)
            if isinstance(layer, Trained):
                self.program.plan.statistics[group.name] = _trained_scales(layer, spec)
            return replace(group, outcome=Quantize(spec))
        return group

    def _layer(self, path: str) -> nn.Module | None:
        """The innermost module of the model around a path: what a layer was made of has none of its own."""
        while path:
            try:
                return self.model.get_submodule(path)
            except AttributeError:
                path = path.rpartition(".")[0]
        return None

    def _observer_for(self, group: Group, places: Places) -> str:
        """The path of the observer of a group: of its last observed value, whose range covers the values joined into it; or of its
        producer, since layers without a scale of their own keep that of their input."""
        values = dict.fromkeys(places.node(site) for site in group.values)
        for value in reversed(list(values)):
            if value.name in self.seen:
                return self.seen[value.name]
        node: fx.Node | None = next(iter(values))
        while node is not None and node.name not in self.seen:
            node = next((source for source in node.all_input_nodes if source.op != "get_attr"), None)
        if node is None:
            raise EagerError(
                "no observer of the eager model saw this tensor, and the engine would quantize it",
                where=self.program.describe(next(iter(values))),
                advice="put it between the stubs, or use FloatFunctional for what is computed without modules",
            )
        return self.seen[node.name]


__all__ = ["EagerQuantizer", "to_program"]
