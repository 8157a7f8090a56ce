"""Assign a QConfig and a kind of quantization to each op of a program."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn

from quantc.config.selectors import ancestors
from quantc.flows.foreign_observers import inner
from quantc.flows.fx.custom_config import QuantType
from quantc.flows.fx.object_types import class_name, is_module_class, ops_of, stands_for
from quantc.flows.fx.qconfig_mapping import ObjectType, QConfigMapping
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.ir.sites import Origin

CALLS = ("call_function", "call_module", "call_method")
MAX_KNOWN = 1024
"""Capacity of each cache of facts about QConfigs: they are asked at every op, and each answer constructs observers."""
INTEGERS = (torch.qint8, torch.quint8, torch.int8, torch.uint8)


PREFIX = "activation_post_process_"
"""Prefix of observer names in a graph."""


def is_observer(node: fx.Node) -> bool:
    """True if a node is an observer of this flow and no op of the model."""
    return node.op == "call_module" and str(node.target).startswith(PREFIX)


class UnmatchedWarning(UserWarning):
    """An entry of a QConfigMapping that is about nothing in the model."""


@lru_cache(MAX_KNOWN)
def quant_type_of(qconfig: Any) -> QuantType | None:
    """The kind of quantization a QConfig asks for; None if it quantizes nothing."""
    activation, weight = qconfig.activation(), qconfig.weight()
    dtype = getattr(activation, "dtype", torch.float32)
    if getattr(activation, "is_dynamic", False):
        return QuantType.DYNAMIC
    if dtype in INTEGERS:
        return QuantType.STATIC
    is_weight_only = dtype in (torch.float32, None) and getattr(weight, "dtype", torch.float32) != torch.float32
    return QuantType.WEIGHT_ONLY if is_weight_only else None


@lru_cache(MAX_KNOWN)
def is_fixed(qconfig: Any) -> bool:
    """True if the activation scale is fixed."""
    found = inner(qconfig.activation())
    return isinstance(getattr(found, "scale", None), torch.Tensor)


@lru_cache(MAX_KNOWN)
def reuses_input(qconfig: Any) -> bool:
    """True if results reuse the input's scale."""
    return type(inner(qconfig.activation())).__name__ == "ReuseInputObserver"


def rounds(observer: Any) -> bool:
    """True for a fake quantizer, as opposed to a plain observer."""
    return isinstance(getattr(observer, "fake_quant_enabled", None), torch.Tensor)


@dataclass
class Choice:
    """The QConfigs of a program's ops by the mapping of a user."""

    program: Program
    mapping: QConfigMapping
    qconfigs: dict[fx.Node, Any] = field(default_factory=dict)
    _calls: Counter[tuple[str, ObjectType]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        mapping = self.mapping
        self._classes = {class_name(kind): kind for kind in mapping.object_type_qconfigs if is_module_class(kind)}
        functions = [kind for kind in mapping.object_type_qconfigs if not is_module_class(kind)]
        self._functions = {op: kind for kind in reversed(functions) for op in ops_of(kind)}
        for graph_path, graph in self.program.graphs():
            for node in graph.nodes:
                if node.op in CALLS and not is_observer(node):
                    origin = self.program.origins.get(node) or Origin()
                    self.qconfigs[node] = self._of(node, origin) if not graph_path else mapping.global_qconfig

    def __getitem__(self, node: fx.Node) -> Any:
        return self.qconfigs.get(node)

    def _of(self, node: fx.Node, origin: Origin) -> Any:
        mapping = self.mapping
        found = mapping.global_qconfig
        function = self._functions.get(op_name(node))
        if function is not None and not is_layer(origin):
            found = mapping.object_type_qconfigs[function]
        return self._by_order(node, origin, self._by_name(origin, self._by_class(origin, found)))

    def of_module(self, path: str, module: nn.Module) -> Any:
        """The QConfig of an untraced module, or of one inside it."""
        origin = Origin(module_path=path, module_type=class_name(type(module)))
        return self._by_name(origin, self._by_class(origin, self.mapping.global_qconfig))

    def _by_class(self, origin: Origin, found: Any) -> Any:
        kind = self._classes.get(origin.module_type)
        return found if kind is None else self.mapping.object_type_qconfigs[kind]

    def _by_name(self, origin: Origin, found: Any) -> Any:
        mapping, path = self.mapping, origin.module_path
        for pattern, qconfig in mapping.module_name_regex_qconfigs.items():
            if re.match(pattern, path):
                found = qconfig
                break
        for name in reversed(ancestors(path)):
            if name in mapping.module_name_qconfigs:
                found = mapping.module_name_qconfigs[name]
                break
        return found

    def _by_order(self, node: fx.Node, origin: Origin, found: Any) -> Any:
        """The QConfig of the n-th op of a kind in its calling module; `found` where the mapping has none."""
        ordered = self.mapping.module_name_object_type_order_qconfigs
        if not ordered:
            return found
        path = origin.module_path.rpartition(".")[0] if is_layer(origin) else origin.module_path
        for kind in dict.fromkeys(kind for name, kind, _ in ordered if name == path):
            if is_module_class(kind):
                is_it = class_name(kind) == origin.module_type
            else:
                is_it = not is_layer(origin) and stands_for(kind, node)
            if not is_it:
                continue
            index = self._calls[path, kind]
            self._calls[path, kind] += 1
            found = ordered.get((path, kind, index), found)
        return found

    def warn_unmatched(self, names: set[str]) -> None:
        """Say which entries by name are about no module: a misspelt one would otherwise go unnoticed."""
        mapping = self.mapping
        unknown = [name for name in mapping.module_name_qconfigs if name not in names]
        patterns = mapping.module_name_regex_qconfigs
        unknown += [text for text in patterns if not any(re.match(text, name) for name in names)]
        unknown += [
            f"{path}, {kind}" for path, kind, _ in mapping.module_name_object_type_order_qconfigs if path not in names
        ]
        if unknown:
            warnings.warn(
                f"the QConfigMapping names what {self.program.name} does not have: {', '.join(unknown)}",
                UnmatchedWarning,
                stacklevel=4,
            )


def is_layer(origin: Origin) -> bool:
    """True if a node comes from a layer of torch.nn, not from a function that a user's module calls."""
    return origin.module_type.startswith("torch.nn.")
