"""Printer for one node. Dumps consist of these lines, and errors and diffs quote them.

A line is `keyword %name tail  # origin`. The tail has everything but the node's own name, so two nodes with equal tails
(under the same operand names) compute the same thing: diffs rely on that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from quantc.errors import QuantcError
from quantc.ir.dialect import BY_TARGET, arguments
from quantc.ir.placements import PlacedModule
from quantc.ir.program import Program, attribute
from quantc.ir.signature import Input
from quantc.ir.types import TensorType, type_of
from quantc.text.digests import Constants, owner_of, state_digest
from quantc.text.literals import Opaque, format_value, no_nodes, quote, used_nodes
from quantc.text.target_names import callee_name

_PLAIN_REFERENCE = re.compile(r"[\w.\-/]+", re.ASCII)
_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class OpaqueModule(nn.Module):
    """Placeholder, in a parsed Program, for a module that text cannot represent."""

    def __init__(self, target: str, kind: str | None, state: str | None) -> None:
        super().__init__()
        self.target = target
        self.kind = kind
        self.state = state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise QuantcError(
            f"the module {self.target!r} ({self.kind or 'unknown'}) is not part of the text this program was parsed from",
            advice=f"give it: parse(text, modules={{{self.target!r}: module}})",
        )


@dataclass(frozen=True, slots=True)
class TextSlot:
    """Print format of one argument of an op."""

    name: str
    aten_name: str
    default: str | None
    is_positional: bool


@cache
def slots(target: OpOverload) -> tuple[TextSlot, ...]:
    """The print format of an op's arguments: operands, or outside the dialect's table the leading ones without a
    default, are positional."""
    op = BY_TARGET.get(target)
    rows = arguments(target)
    required = next((index for index, row in enumerate(rows) if row.has_default or row.keyword_only), len(rows))
    positional = len(op.operands) if op is not None else required
    return tuple(
        TextSlot(
            row.name,
            row.aten_name,
            format_value(row.default, no_nodes) if row.has_default else None,
            index < positional and not row.keyword_only,
        )
        for index, row in enumerate(rows)
    )


def at(path: str) -> str:
    """A reference to a nested graph or a module."""
    return f"@{path}" if _PLAIN_REFERENCE.fullmatch(path) else f"@{quote(path)}"


def module_facts(module: nn.Module) -> tuple[str | None, str | None]:
    """Class and state digest of an opaque module; of a kernel, what it is and how it runs."""
    if isinstance(module, OpaqueModule):
        return module.kind, module.state
    if isinstance(module, PlacedModule):
        return module.description, None
    return f"{type(module).__module__}.{type(module).__qualname__}", state_digest(module)


def default_type(node: fx.Node) -> TensorType | None:
    """The type of an input in the signature unless its line says otherwise."""
    kind = type_of(node)
    return kind if isinstance(kind, TensorType) else None


def inline_nodes(graph: fx.Graph, owner: nn.Module) -> set[fx.Node]:
    """The nested graphs directly before the call that uses them, in the order it mentions them.

    Only those can be written inside the call: the parser inserts them exactly there.
    """
    nested = {
        node
        for node in graph.find_nodes(op="get_attr")
        if node.name == node.target and isinstance(attribute(owner, str(node.target)), fx.GraphModule)
    }
    inline: set[fx.Node] = set()
    group: dict[fx.Node, None] = {}
    for node in graph.nodes if nested else ():
        if node in nested:
            group[node] = None
            continue
        mentioned = dict.fromkeys(used for used in used_nodes((node.args, node.kwargs)) if used in group)
        if list(mentioned) == list(group):
            inline.update(group)
        group = {}
    return inline


class GraphLines:
    """Prints the lines of one graph. Invalid after a change to it.

    `refs` maps each node to its reference; a caller may change it.
    """

    def __init__(self, program: Program, path: str, graph: fx.Graph, constants: Constants) -> None:
        self.program = program
        self.path = path
        self.graph = graph
        self.owner = owner_of(program, graph)
        self.constants = constants
        self.inputs: dict[fx.Node, Input] = {}
        if graph is program.graph:
            placeholders = graph.find_nodes(op="placeholder")
            self.inputs = dict(zip(placeholders, program.signature.inputs, strict=False))
        self.refs: dict[fx.Node, str] = {}
        self._described: dict[str, str] = {}
        self._inline = inline_nodes(graph, self.owner)
        self.refs.update({node: at(str(node.target)) for node in self._inline})

    def is_inline(self, node: fx.Node) -> bool:
        """True if a node has no line of its own: a nested graph, written at its use."""
        return node in self._inline

    def refer(self, node: fx.Node) -> str:
        return self.refs.get(node) or f"%{node.name}"

    def line(self, node: fx.Node) -> str:
        """The complete line, with the node's name and origin."""
        return self.line_without_origin(node) + self._comment(node)

    def line_without_origin(self, node: fx.Node) -> str:
        keyword = {"placeholder": "input ", "get_attr": "const ", "output": "output"}.get(node.op, "")
        name = "" if node.op == "output" else f"%{node.name}"
        return f"{keyword}{name}{self.tail(node)}"

    def tail(self, node: fx.Node) -> str:
        """The part after the name."""
        match node.op:
            case "placeholder":
                return self._input(node)
            case "get_attr":
                return f" = {self.constant(str(node.target))}"
            case "output":
                return f" {self.output(node)}{_attributes(name=node.name if node.name != 'output' else None)}"
            case _:
                return f"{_typed(node)} = {self.call(node)}{self._facts(node)}"

    def output(self, node: fx.Node) -> str:
        """The returned values of a graph."""
        return self._value(node.args[0]) if node.args else "()"

    def type_and_constant(self, node: fx.Node) -> str:
        """The type of an input, and its value if capture fixed one."""
        given = self.inputs.get(node)
        constant = f" = {self._value(given.constant)}" if given is not None and given.is_constant else ""
        return _typed(node) + constant

    def constant(self, target: str) -> str:
        """`"c.weight" : f32[8,3,3,3] param #9f2c01ab`, or a description of a value that is not a tensor."""
        if target not in self._described:  # the digest of a large tensor is slow
            self._described[target] = self._describe(target)
        return self._described[target]

    def _describe(self, target: str) -> str:
        value = attribute(self.owner, target)
        if isinstance(value, torch.Tensor):
            return f"{quote(target)} : {self.constants.describe(self.owner, self.path, target, value)}"
        if isinstance(value, fx.GraphModule):
            return at(target)
        if value is None:
            return f"{quote(target)} missing"
        if isinstance(value, nn.Module):
            kind, state = module_facts(value)
            return f"{quote(target)} module{_attributes(type=kind, state=state)}"
        return f"{quote(target)} value {self._value(value)}"

    def state_name(self, target: str) -> str:
        """The name of a constant in the state dict of the program; of tied constants, the first."""
        return self.constants.name(self.path, target, attribute(self.owner, target))

    def call(self, node: fx.Node) -> str:
        """`conv2d(%x, %w, padding=[1, 1])`."""
        if node.op == "call_method":
            callee = f"call_method .{node.target}"
        elif node.op == "call_module":
            callee = f"call_module {at(str(node.target))}"
        else:
            callee = callee_name(node.target)
        return f"{callee}({', '.join(self.arguments(node))})"

    def arguments(self, node: fx.Node) -> list[str]:
        target = node.target
        if isinstance(target, OpOverload) and len(node.args) <= len(slots(target)):
            return self._by_schema(node, slots(target))
        given = [self._value(value) for value in node.args]
        return given + [f"{key}={self._value(value)}" for key, value in node.kwargs.items()]

    def _by_schema(self, node: fx.Node, rows: tuple[TextSlot, ...]) -> list[str]:
        args, kwargs = node.args, dict(node.kwargs)
        parts: list[str] = []
        by_position = True
        for index, slot in enumerate(rows):
            if index < len(args):
                text = self._value(args[index])
            elif slot.aten_name in kwargs:
                text = self._value(kwargs.pop(slot.aten_name))
            else:
                by_position = False
                continue
            if text == slot.default:
                by_position = False
                continue
            by_position = by_position and slot.is_positional
            parts.append(text if by_position else f"{slot.name}={text}")
        return parts + [f"{key}={self._value(value)}" for key, value in kwargs.items()]

    def _value(self, value: Any) -> str:
        return format_value(value, self.refer)

    def _input(self, node: fx.Node) -> str:
        given = self.inputs.get(node)
        target = node.target if node.target != node.name else None
        default = {"default": node.args[0]} if node.args else {}
        if given is None:
            return _typed(node) + _attributes(target=target, **default)
        name = given.name if given.name != node.name else None
        differs = given.type != default_type(node) and not given.is_constant
        accepts = {"accepts": None if given.type is None else str(given.type)} if differs else {}
        return self.type_and_constant(node) + _attributes(name=name, target=target, **accepts, **default)

    def _facts(self, node: fx.Node) -> str:
        """Rows of the side tables, and the class of an opaque module."""
        if node.op == "call_module":
            module = attribute(self.owner, str(node.target))
            if isinstance(module, nn.Module):
                kind, state = module_facts(module)
                return _attributes(type=kind, state=state)
        mode, counter = self.program.modes.get(node), self.program.counters.get(node)
        if mode is None and counter is None:
            return ""
        modes = {} if mode is None else {"mode_arg": mode.position, "train": mode.train, "eval": mode.eval}
        return _attributes(**modes, counter=counter)

    def _comment(self, node: fx.Node) -> str:
        origin = self.program.origins.get(node)
        text = "" if origin is None else _BREAKS.sub("?", str(origin)).strip()
        return f"  # {text}" if text else ""


_MAY_BE_NONE = frozenset({"accepts", "default"})


def _typed(node: fx.Node) -> str:
    kind = type_of(node)
    return "" if kind is None else f" : {kind}"


def _attributes(**rows: Any) -> str:
    given = [
        f"{key}={format_value(value, no_nodes)}"
        for key, value in rows.items()
        if value is not None or key in _MAY_BE_NONE
    ]
    return f" {{{', '.join(given)}}}" if given else ""


__all__ = ["GraphLines", "Opaque", "OpaqueModule", "at", "default_type", "module_facts", "slots"]
