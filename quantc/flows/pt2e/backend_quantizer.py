"""Quantizers of this flow that are made of a backend's table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, ClassVar, Self

from torch import fx, nn

from quantc.annotate.annotator import Annotator
from quantc.annotate.quantizer import Backend, TableQuantizer
from quantc.capture.model_copies import Tensors
from quantc.config.config import QuantConfig
from quantc.config.config_rule import ConfigRule
from quantc.config.selectors import AnySelector, ByAll, ByModule, ByNode, ByOp
from quantc.errors import AnnotationError, ConfigError, suggest
from quantc.flows.foreign_observers import spec_of
from quantc.flows.pt2e.annotations import Observed, read_annotations, show
from quantc.flows.pt2e.exported_program import Correspondence, program_of
from quantc.flows.pt2e.graph_modules import PATH
from quantc.flows.pt2e.group_observers import plain_observer
from quantc.flows.pt2e.left_float import why_left_float
from quantc.flows.pt2e.module_stacks import paths_of_type
from quantc.flows.pt2e.quantizer import (
    Q_ANNOTATION_KEY,
    EdgeOrNode,
    FixedQParamsQuantizationSpec,
    OperatorConfig,
    QuantizationAnnotation,
    QuantizationConfig,
    QuantizationSpec,
    QuantizationSpecBase,
    Quantizer,
    SharedQuantizationSpec,
)
from quantc.ir.decisions import FLOAT, Fixed, Quantize, SameAs, TensorOutcome
from quantc.ir.dialect import BY_NAME, target_name
from quantc.ir.plan import Plan
from quantc.ir.program import Program
from quantc.ir.sites import Site
from quantc.pipeline.pipeline import Pipeline
from quantc.spec.formats import PerChannel, PerTensor, Role, Timing
from quantc.spec.spec import QuantSpec

OTHER_NAMES = {
    "hardtanh": "clamp", "relu6": "clamp", "clip": "clamp", "view": "reshape", "flatten": "reshape", "mm": "matmul",
    "bmm": "matmul", "concat": "cat", "convolution": "conv2d",
}  # fmt: skip
"""Ops that go by another name in the dialect."""


class BackendQuantizer(Quantizer):
    """Annotates an exported graph as the table of `backend` has it, with the specs that the user's configs give.

    A config by module name counts before one by module type, that before one by operator, and that before the global
    one. None leaves float what it is for."""

    backend: ClassVar[Backend]

    def __init__(self) -> None:
        self.global_config: QuantizationConfig | None = None
        self.operator_type_config: dict[Any, QuantizationConfig | None] = {}
        self.module_type_config: dict[type[nn.Module], QuantizationConfig | None] = {}
        self.module_name_config: dict[str, QuantizationConfig | None] = {}
        self.filter_fn: Callable[[fx.Node], bool] | None = None
        self.left_float: dict[str, str] = {}
        """The reason for each float op of the last graph, by node; by path and node for ops in graphs that it calls."""

    @staticmethod
    def known_configs() -> list[QuantizationConfig]:
        """The configs that every operator of the table can have, for `get_supported_operators`."""
        return []

    # -- configuring -------------------------------------------------------------------------------------------

    def set_global(self, quantization_config: QuantizationConfig | None) -> Self:
        """For every operator of the table."""
        self.global_config = quantization_config
        return self

    def set_operator_type(self, operator_type: Any, quantization_config: QuantizationConfig | None) -> Self:
        """For the operators of a kind: an ATen op, an overload of one, or a function such as `torch.add`."""
        _op_of(operator_type)
        self.operator_type_config[operator_type] = quantization_config
        return self

    def set_module_type(self, module_type: type[nn.Module], quantization_config: QuantizationConfig | None) -> Self:
        """For all that is in modules of a class."""
        self.module_type_config[module_type] = quantization_config
        return self

    def set_module_name(self, module_name: str, quantization_config: QuantizationConfig | None) -> Self:
        """For all that is in a module."""
        self.module_name_config[module_name] = quantization_config
        return self

    def set_filter_function(self, filter_fn: Callable[[fx.Node], bool] | None) -> Self:
        """Quantize only the nodes of the exported graph for which a function is true."""
        self.filter_fn = filter_fn
        return self

    # -- annotating --------------------------------------------------------------------------------------------

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        program = self._program(model)
        chosen = list(self._configs(model))
        config = _quant_config(chosen, [*self._skipped_nodes(model)])
        resolution = config.resolve(program)
        table = TableQuantizer(self.backend)
        program.plan = Plan(quantizer=table, config=config)
        table.annotate(Annotator(program, resolution))
        by_select = {str(select): configs for select, configs in chosen}

        def config_of(node: fx.Node) -> QuantizationConfig | None:
            setting = resolution.setting(node)
            return by_select.get(str(setting.rule.select)) if setting is not None else None

        graphs = Correspondence(program, model)
        unplaced = _Writer(graphs, config_of).write()
        kept = self.left_float if PATH in model.meta else {}  # the body of a loop comes after the graph around it
        self.left_float = kept | why_left_float(graphs, unplaced)
        return model

    def _program(self, model: fx.GraphModule) -> Program:
        program = program_of(model, Tensors.SHARED)
        return Pipeline.parse("strip-dropout,fuse{arithmetic=keep},fold-constants,eliminate-dead").run(program)

    def _skipped_nodes(self, model: fx.GraphModule) -> Iterator[str]:
        """The nodes that another quantizer has annotated, and those that the filter leaves out."""
        for node in model.graph.nodes:
            is_left_out = self.filter_fn is not None and node.op == "call_function" and not self.filter_fn(node)
            if Q_ANNOTATION_KEY in node.meta or is_left_out:
                yield node.name

    def _configs(self, model: fx.GraphModule) -> Iterator[tuple[AnySelector, QuantizationConfig | None]]:
        """The configs that were set, as selectors, the most specific last."""
        given = (self.operator_type_config, self.module_type_config, self.module_name_config)
        if self.global_config is None and not any(given):
            raise ConfigError(
                f"{type(self).__name__} has no config, so it would quantize nothing",
                where="set_global, set_operator_type, set_module_type, set_module_name",
                advice="write quantizer.set_global(get_symmetric_quantization_config())",
            )
        yield ByAll(), self.global_config
        yield from ((ByOp(op=_op_of(operator)), config) for operator, config in self.operator_type_config.items())
        for kind, config in self.module_type_config.items():
            yield from ((ByModule(path=path), config) for path in paths_of_type(model.graph, kind))
        yield from ((ByModule(path=name), config) for name, config in self.module_name_config.items())

    def validate(self, model: fx.GraphModule) -> None:
        """Every spec in the graph that this quantizer could have given must be one that the backend can run."""
        annotations = read_annotations(model.graph)
        reasons: dict[tuple[int, tuple[Role, ...]], str | None] = {}
        for place, wanted in annotations.wanted.items():
            if not isinstance(wanted, Observed):
                continue
            node = place[0] if isinstance(place, tuple) else place
            # a constant may be a weight, or the other operand of a product or a sum
            roles = (Role.WEIGHT, Role.ACT) if node.op == "get_attr" else (Role.ACT,)
            key = (id(wanted.spec), roles)
            if key not in reasons:
                reasons[key] = self._why_not(wanted.spec, roles)
            reason = reasons[key]
            if reason is not None:
                raise AnnotationError(
                    f"backend {self.backend.name!r} cannot run {wanted.spec}: {reason}",
                    where=show(place),
                    advice="choose another config, or None for float",
                )

    def _why_not(self, spec: Any, roles: tuple[Role, ...]) -> str | None:
        """The reason why a tensor cannot have a spec in any of its roles; None if it can."""
        reasons = [self.backend.why_not(_spec_of(spec, role)) for role in roles]
        return None if None in reasons else reasons[0]

    @classmethod
    def get_supported_operators(cls) -> list[OperatorConfig]:
        """The ops of every rule of the table, with each config they can have."""
        patterns = [
            [BY_NAME[name].target for name in sorted(names)]
            for rule in cls.backend.table
            if (names := {target_name(target) for target in rule.compiled.targets} & set(BY_NAME))
        ]
        return [OperatorConfig(config, patterns) for config in cls.known_configs()]

    @classmethod
    def get_supported_quantization_configs(cls) -> list[QuantizationConfig]:
        """The configs that operators can have."""
        return cls.known_configs()

    @classmethod
    def get_supported_operator_for_quantization_config(
        cls, quantization_config: QuantizationConfig | None
    ) -> list[Any]:
        """The ops that can have a config; all of them for None."""
        rows = cls.get_supported_operators()
        return next((row.operators for row in rows if quantization_config in (None, row.config)), [])


def _op_of(operator: Any) -> str:
    """The name of an operator in the dialect."""
    packet = getattr(operator, "overloadpacket", operator)
    name = str(getattr(packet, "__name__", packet)).rpartition(".")[2].removesuffix("_")
    name = OTHER_NAMES.get(name, name)
    if name not in BY_NAME:
        raise ConfigError(
            f"{operator} is no operator of the dialect",
            where="set_operator_type",
            advice=suggest(name, BY_NAME, noun="operators"),
        )
    return name


# -- configs as the engine has them ------------------------------------------------------------------------------


def _quant_config(chosen: list[tuple[AnySelector, QuantizationConfig | None]], float_nodes: list[str]) -> QuantConfig:
    """The rules of a config of the engine."""
    rules = [
        ConfigRule.model_validate({"select": select, "use": use, "role": role})
        for select, config in chosen
        for use, role in _uses(config)
    ]
    left = [{"select": ByNode(node=name), "use": FLOAT, "role": None} for name in float_nodes]
    rules += [ConfigRule.model_validate(rule) for rule in left]
    return QuantConfig(rules=tuple(rules))


def _uses(config: QuantizationConfig | None) -> Iterator[tuple[Any, Role | None]]:
    if config is None or (config.input_activation is None and config.weight is None):
        yield FLOAT, None
        return
    if config.input_activation is not None:
        yield Quantize(_spec_of(config.input_activation, Role.ACT)), Role.ACT
    if config.weight is not None:
        spec = _spec_of(config.weight, Role.WEIGHT)
        timing = Timing.WEIGHT_ONLY if config.input_activation is None else spec.timing
        yield Quantize(spec.but(timing=timing)), Role.WEIGHT


def _spec_of(spec: Any, role: Role) -> QuantSpec:
    return spec_of(plain_observer(spec), role)


# -- outcomes as annotations -------------------------------------------------------------------------------------


class _Writer:
    """Writes the outcomes of a Program as annotations of the exported graph."""

    def __init__(
        self, correspondence: Correspondence, config_of: Callable[[fx.Node], QuantizationConfig | None]
    ) -> None:
        self.graphs = correspondence
        self.plan = correspondence.program.plan
        self.config_of = config_of
        self.annotations: dict[fx.Node, QuantizationAnnotation] = {}

    @cached_property
    def _nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.graphs.program.graph.nodes}

    def write(self) -> set[fx.Node]:
        """Write them; the nodes of the Program that a rule took and that the exported graph has no place for."""
        unplaced: set[fx.Node] = set()
        places = {site: self._place(site, outcome) for site, outcome in self.plan.outcomes.items() if not site.graph}
        for site, outcome in self.plan.outcomes.items():
            place = places.get(site)
            if place is None and not site.graph:
                unplaced.add(self._nodes[site.node])
            spec = None if place is None else self._spec(site, outcome, places)
            if place is None or spec is None:
                continue
            reader = place[1] if isinstance(place, tuple) else place
            annotation = self.annotations.setdefault(reader, QuantizationAnnotation(_annotated=True))
            if isinstance(place, tuple):
                annotation.input_qspec_map[place[0]] = spec
            else:
                annotation.output_qspec = spec
        for node, annotation in self.annotations.items():
            node.meta[Q_ANNOTATION_KEY] = annotation
        for node in self.plan.claims:
            exported = self.graphs.node(node)
            if exported is not None:
                exported.meta.setdefault(Q_ANNOTATION_KEY, QuantizationAnnotation(_annotated=True))
        return unplaced

    def _place(self, site: Site, outcome: TensorOutcome) -> EdgeOrNode | None:
        node = self._nodes[site.node]
        if site.operand is None:
            return self.graphs.result(node)
        by_channel = isinstance(outcome, Quantize) and not isinstance(outcome.spec.granularity, PerTensor)
        return self.graphs.edge(node, site.operand, by_channel=by_channel)

    def _spec(
        self, site: Site, outcome: TensorOutcome, places: dict[Site, EdgeOrNode | None]
    ) -> QuantizationSpecBase | None:
        if isinstance(outcome, SameAs):
            other = places.get(outcome.site)
            return None if other is None or other == places[site] else SharedQuantizationSpec(other)
        if isinstance(outcome, Fixed):
            spec, storage = outcome.spec, outcome.spec.dtype.storage
            return FixedQParamsQuantizationSpec(storage, outcome.scale, outcome.zero_point, spec.qmin, spec.qmax)
        config = self.config_of(self._nodes[site.node])
        if not isinstance(outcome, Quantize) or config is None:
            return None
        if outcome.spec.role is Role.ACT:
            return config.output_activation if site.operand is None else config.input_activation
        return _along(config.weight, outcome.spec)


def _along(weight: QuantizationSpec | None, spec: QuantSpec) -> QuantizationSpec | None:
    """The spec of a weight whose channels lie where the op has them."""
    if weight is None or not isinstance(spec.granularity, PerChannel):
        return weight
    return dataclasses.replace(weight, ch_axis=spec.granularity.axis)
