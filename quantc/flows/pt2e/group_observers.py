"""Observers for the groups of an annotated graph, and their places in it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from quantc.errors import AnnotationError
from quantc.flows.foreign_observers import inner
from quantc.flows.pt2e.annotations import Annotations, Derived, Fixed, Group, Observed, show
from quantc.flows.pt2e.inplace_writes import writes_of
from quantc.flows.pt2e.module_stacks import modules_around
from quantc.flows.pt2e.quantizer import EdgeOrNode, ObserverOrFakeQuantize
from quantc.nn.fake_quantize import FixedQParamsFakeQuantize
from quantc.nn.observers import FixedQParamsObserver, ObserverBase
from quantc.spec.torch_dtypes import PER_CHANNEL, integer_range

PREFIX = "activation_post_process_"
"""Prefix of observer names in a graph, which other tools look for."""
FROM_NODE = "from_node"
Observers = dict[EdgeOrNode, ObserverOrFakeQuantize]


class DerivedObserverOrFakeQuantize(ObserverBase):
    """Derives qparams from those of other observers by a function."""

    def __init__(
        self,
        dtype: torch.dtype,
        obs_or_fqs: list[ObserverOrFakeQuantize],
        derive_qparams_fn: Callable[[list[ObserverOrFakeQuantize]], tuple[Tensor, Tensor]],
        quant_min: int | None = None,
        quant_max: int | None = None,
        qscheme: torch.qscheme | None = None,
        ch_axis: int | None = None,
    ) -> None:
        super().__init__(dtype)
        self.obs_or_fqs = obs_or_fqs
        self.derive_qparams_fn = derive_qparams_fn
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.qscheme = qscheme
        self.ch_axis = ch_axis

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return self.derive_qparams_fn(self.obs_or_fqs)


# -- making ----------------------------------------------------------------------------------------------------


def make_observers(annotations: Annotations, is_qat: bool) -> Observers:
    """An observer for every group, by all its sites. Derived ones come last, since they read others."""
    groups = annotations.groups()
    made: Observers = {}
    waiting = [group for group in groups if isinstance(group.root, Derived)]
    for group in groups:
        if not isinstance(group.root, Derived):
            made.update(dict.fromkeys(group.places, _plain(group.root, is_qat)))
    while waiting:
        ready = [group for group in waiting if all(place in made for place in _parents(group))]
        if not ready:
            raise _underivable(waiting[0], made)
        for group in ready:
            made.update(dict.fromkeys(group.places, _derived_observer(group.root, made)))
        waiting = [group for group in waiting if group not in ready]
    return {place: made[place] for place in annotations.wanted}


def _parents(group: Group) -> tuple[EdgeOrNode, ...]:
    return group.root.places if isinstance(group.root, Derived) else ()


def _underivable(group: Group, made: Observers) -> AnnotationError:
    missing = next(place for place in _parents(group) if place not in made)
    return AnnotationError(
        f"{show(group.places[0])} is to be derived from {show(missing)}, which is not quantized, or derived from it",
        where=", ".join(show(place) for place in group.places),
        advice="annotate that place with a spec of its own",
    )


def plain_observer(spec: Any, is_qat: bool = False) -> ObserverOrFakeQuantize:
    """The observer that a spec makes by itself."""
    return _plain(Fixed(spec) if not hasattr(spec, "observer_or_fake_quant_ctr") else Observed(spec), is_qat)


def _plain(root: Observed, is_qat: bool) -> ObserverOrFakeQuantize:
    spec = root.spec
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    if isinstance(root, Fixed):
        low, high = integer_range(spec.dtype, spec.quant_min, spec.quant_max, False)
        scheme = spec.qscheme if spec.qscheme is not None else torch.per_tensor_affine
        given = fields | {"quant_min": low, "quant_max": high, "qscheme": scheme}
        observer = FixedQParamsObserver.with_args(**given)
        made: ObserverOrFakeQuantize = FixedQParamsFakeQuantize(observer) if is_qat else observer()
        return made
    make = fields.pop("observer_or_fake_quant_ctr")
    kind = getattr(getattr(make, "p", None), "func", make)  # what `with_args` gives wraps the class
    axis = fields.pop("ch_axis", None)
    if axis is not None and (spec.qscheme in PER_CHANNEL or "ch_axis" in inspect.signature(kind).parameters):
        return _along(make, kind, fields, axis)
    observer_of_spec: ObserverOrFakeQuantize = make.with_args(**fields)()
    return observer_of_spec


def _along(make: Any, kind: Any, fields: dict[str, Any], axis: int) -> ObserverOrFakeQuantize:
    """Make an observer with scales along an axis, of any class that takes `ch_axis`."""
    name = getattr(kind, "__name__", str(kind))
    takes = inspect.signature(kind).parameters
    if "ch_axis" not in takes and not any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        raise _axis_lost(name, axis, "takes no ch_axis")
    try:
        made: ObserverOrFakeQuantize = make.with_args(**fields, ch_axis=axis)()
    except TypeError as error:
        raise _axis_lost(name, axis, f"cannot be made with it ({error})") from error
    if getattr(made, "ch_axis", getattr(inner(made), "ch_axis", None)) != axis:
        raise _axis_lost(name, axis, "was given it, and has another ch_axis or none")
    return made


def _axis_lost(name: str, axis: int, why: str) -> AnnotationError:
    return AnnotationError(
        f"{name} is to have a scale for each channel of axis {axis}, and {why}",
        where="a QuantizationSpec with a per-channel qscheme",
        advice="let the observer take ch_axis, and keep it as an attribute of that name; or use a per-tensor qscheme",
    )


def _derived_observer(root: Observed, made: Observers) -> ObserverOrFakeQuantize:
    places = root.places if isinstance(root, Derived) else ()
    names = ("dtype", "derive_qparams_fn", "quant_min", "quant_max", "qscheme", "ch_axis")
    fields: dict[str, Any] = {name: getattr(root.spec, name, None) for name in names}
    return DerivedObserverOrFakeQuantize(obs_or_fqs=[made[place] for place in places], **fields)


# -- placing ---------------------------------------------------------------------------------------------------


def insert_observers(module: fx.GraphModule, annotations: Annotations, observers: Observers) -> int:
    """Put observers where their places are; how many nodes that took.

    A reader whose observer is that of the tensor itself reads the tensor's; readers with the same observer share a
    node."""
    insertion = _Insertion(module, observers)
    for node in list(module.graph.nodes):
        if node in annotations.nodes:
            insertion.visit(node)
    return insertion.count


class _Insertion:
    def __init__(self, module: fx.GraphModule, observers: Observers) -> None:
        self.module = module
        self.observers = observers
        self.count = 0
        self.behind: dict[fx.Node, fx.Node] = {}
        """For each observer node the tensor it observes."""
        self.present: dict[tuple[fx.Node, int], fx.Node] = {}
        """The observer node behind a node, by the observer."""
        self.writes = writes_of(module)
        self.taken = {name for name in module._modules if name.startswith(PREFIX)}

    def visit(self, node: fx.Node) -> None:
        def observed(operand: fx.Node) -> fx.Node:
            return operand if self.writes.is_kept(node, operand) else self._operand(node, operand)

        args, kwargs = map_arg(node.args, observed), map_arg(node.kwargs, observed)
        if args != node.args:
            node.args = args
        if kwargs != node.kwargs:
            node.kwargs = kwargs
        observer = self.observers.get(node)
        if observer is not None and isinstance(node.meta.get("val"), Tensor):
            self._output(node, observer)

    def _operand(self, node: fx.Node, operand: fx.Node) -> fx.Node:
        tensor = operand
        while tensor in self.behind:
            tensor = self.behind[tensor]
        observer = self.observers.get((tensor, node))
        if observer is None or observer is self.observers.get(tensor):
            return operand
        if operand in self.writes.changing:
            return self._insert(operand, observer, before=node)
        found = self.present.get((operand, id(observer)))
        return found if found is not None else self._insert(operand, observer)

    def _output(self, node: fx.Node, observer: ObserverOrFakeQuantize) -> None:
        readers = [reader for reader in node.users if not self.writes.is_kept(reader, node)]
        is_steady = node not in self.writes.changing
        observed = self._insert(node, observer) if is_steady else node
        for reader in readers:
            observed = observed if is_steady else self._insert(node, observer, before=reader)
            if FROM_NODE in node.meta:
                observed.meta[FROM_NODE] = node.meta[FROM_NODE]
            reader.replace_input_with(node, observed)

    def _insert(self, node: fx.Node, observer: ObserverOrFakeQuantize, before: fx.Node | None = None) -> fx.Node:
        """A call of an observer, right behind a node; before a reader where what the node yields is written to."""
        name = f"{PREFIX}{self.count}"
        while name in self.taken:
            self.count += 1
            name = f"{PREFIX}{self.count}"
        self.count += 1
        self.module.add_module(name, observer)
        observed_by = inner(observer)
        if isinstance(observed_by, ObserverBase) and observed_by.place is None:
            observed_by.place = _describe(node)
        with node.graph.inserting_after(node) if before is None else node.graph.inserting_before(before):
            observed = node.graph.create_node("call_module", name, (node,))
        self.behind[observed] = node
        self.present[node, id(observer)] = observed
        return observed


def _describe(node: fx.Node) -> str:
    """A node and the module it is from, for messages."""
    *_, path = ("", *(path for path, _ in modules_around(node)))
    return f"{node.name}, of module {path}" if path else node.name


def to_device(observers: Mapping[EdgeOrNode, ObserverOrFakeQuantize], module: nn.Module) -> None:
    """Bring observers to where the model is; nothing to do where it is on the CPU."""
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) == 1 and (device := devices.pop()).type != "cpu":
        for observer in observers.values():
            observer.to(device)
