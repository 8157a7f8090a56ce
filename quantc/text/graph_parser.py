"""Parser of one graph in dump text: inputs, constants, calls and the output."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._ops import OpOverload

from quantc.errors import suggest
from quantc.ir.signature import Input
from quantc.ir.sites import ModeValue, Origin
from quantc.ir.types import TensorType, ValueType, parse_type
from quantc.text.call_parser import (
    by_schema,
    check_getattr,
    is_method,
    read_arguments,
    read_attributes,
    read_mode,
    read_origin,
)
from quantc.text.digests import is_digest
from quantc.text.lexer import Reader, Token
from quantc.text.node_printer import default_type
from quantc.text.pytree_text import is_name
from quantc.text.rebuild_modules import ConstantText, TextPosition, check_target

_KINDS = {"param": "frozen", "buffer": "transient", "tensor": ""}
"""Kinds of constants, and the modifier that may follow each."""
_INPUT_NAME = re.compile(r"[\w.\[\]'/-]+", re.ASCII)


class GraphReader:
    """Parses the statements of one graph into an fx graph; also the scope of its names."""

    def __init__(self, path: str, place: TextPosition) -> None:
        self.path = path
        self.place = place
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.inputs: list[Input] = []
        self.constants: list[ConstantText] = []
        self.modules: dict[str, tuple[str | None, str | None, TextPosition]] = {}
        self.values: dict[str, tuple[Any, TextPosition]] = {}
        self.references: list[tuple[str, TextPosition]] = []
        self.origins: dict[fx.Node, Origin] = {}
        self.modes: dict[fx.Node, ModeValue] = {}
        self.counters: dict[fx.Node, str] = {}
        self.has_output = False

    # -- the scope -------------------------------------------------------------------------------------------

    def node(self, name: str, reader: Reader, at: int) -> fx.Node:
        node = self.nodes.get(name)
        if node is None:
            reader.fail(f"%{name} is used before it is defined", at=at, advice="each node comes after its operands")
        return node

    def graph_node(self, name: str, reader: Reader, at: int) -> fx.Node:
        """The get_attr node of a nested graph, created at its first use."""
        node = self.nodes.get(name)
        if node is not None and node.op == "get_attr" and node.target == name:
            return node
        place = TextPosition(reader, at)
        self.references.append((check_target(name, place), place))
        return self._create(reader, at, name, "get_attr", name)

    def finish(self) -> None:
        if not self.has_output:
            self.place.fail("this graph has no output", "end it with a line such as: output (%x,)")

    # -- statements ------------------------------------------------------------------------------------------

    def statement(self, reader: Reader) -> None:
        first = reader.peek()
        if self.has_output:
            reader.fail("nothing may follow the output of a graph", at=first.start)
        if first.kind == "node":
            self._call(reader)
            return
        readers: dict[str, Callable[[Reader], None]] = {
            "input": self._input,
            "const": self._const,
            "state": self._state,
            "output": self._output,
        }
        read = readers.get(first.text)
        if read is None:
            reader.fail(
                f"{first.text!r} does not begin a line",
                at=first.start,
                advice=suggest(first.text, [*readers, "program", "graph", "size", "in_spec", "out_spec"], noun="words"),
            )
        reader.take()
        read(reader)

    def _create(
        self, reader: Reader, at: int, name: str, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> fx.Node:
        if not is_name(name):
            reader.fail(f"{name!r} cannot name a node: it is not an identifier", at=at)
        if name in self.nodes:
            reader.fail(f"%{name} is defined twice", at=at)
        node = self.graph.create_node(op, target, args, kwargs or {}, name=name)
        if node.name != name:  # fx avoids the names of builtins; a dump may still hold one
            node.name = name
            self.graph._graph_namespace._used_names.add(name)
        self.nodes[name] = node
        return node

    def _finish_line(self, reader: Reader, node: fx.Node | None) -> None:
        """Parse the origin comment and the end of the line."""
        token = reader.peek()
        if token.kind != "comment":
            reader.end()
            return
        text = token.text[1:].strip()
        if node is not None and text:
            self.origins[node] = read_origin(text)

    def _input(self, reader: Reader) -> None:
        token = reader.expect("node", what="the name of an input, such as %x")
        name = token.text[1:]
        kind = reader.type() if reader.accept(":") else None
        is_constant = reader.accept("=")
        constant = reader.value() if is_constant else None
        rows = read_attributes(reader, "name", "target", "accepts", "default")
        target = rows.get("target", name)
        if not is_name(target):
            reader.fail(f"{target!r} cannot be the target of an input", at=token.start)
        default = (rows["default"],) if "default" in rows else ()
        node = self._create(reader, token.start, name, "placeholder", target, default)
        _set_type(node, kind)
        self._finish_line(reader, node)
        if not self.path:
            self.inputs.append(self._signature_input(reader, node, rows, is_constant, constant))
        elif is_constant or "name" in rows or "accepts" in rows:
            reader.fail("only inputs of the top graph are part of the signature", at=token.start)

    def _signature_input(
        self, reader: Reader, node: fx.Node, rows: dict[str, Any], is_constant: bool, constant: Any
    ) -> Input:
        name = rows.get("name", node.name)
        if not isinstance(name, str) or not _INPUT_NAME.fullmatch(name):
            reader.fail(f"{name!r} cannot name an input", at=0)
        if is_constant:
            return Input(name, None, True, constant)
        kind: ValueType | None = default_type(node)
        if "accepts" in rows:
            kind = self._accepted(reader, rows["accepts"])
        return Input(name, kind if isinstance(kind, TensorType) else None)

    def _accepted(self, reader: Reader, text: Any) -> TensorType | None:
        if text is None:
            return None
        try:
            kind = parse_type(str(text)) if not str(text).startswith("(") else None
        except ValueError as error:
            reader.fail(str(error), at=0)
        if not isinstance(kind, TensorType):
            reader.fail("accepts= takes the type of a tensor", at=0)
        return kind

    def _const(self, reader: Reader) -> None:
        token = reader.expect("node", what="the name of a constant, such as %weight")
        reader.require("=")
        name, place = token.text[1:], TextPosition(reader, reader.peek().start)
        if reader.peek().kind == "reference":
            target = check_target(reader.reference(), place)
            self.references.append((target, place))
        else:
            target = check_target(reader.string(), place)
        node = self._create(reader, token.start, name, "get_attr", target)
        if not self.references or self.references[-1][1] is not place:
            self._described(reader, target, place, node)
        self._finish_line(reader, node)

    def _state(self, reader: Reader) -> None:
        place = TextPosition(reader, reader.peek().start)
        target = check_target(reader.string(), place)
        reader.require(":")
        self._tensor(reader, target, place)
        self._finish_line(reader, None)

    def _described(self, reader: Reader, target: str, place: TextPosition, node: fx.Node) -> None:
        """Parse the description of a get_attr target: a tensor, or another value."""
        if reader.accept(":"):
            _set_type(node, self._tensor(reader, target, place))
            return
        token = reader.expect("word", what="':' and a type, or one of missing, module, value")
        match token.text:
            case "missing":
                return
            case "module":
                rows = read_attributes(reader, "type", "state")
                self._module(target, rows, place)
            case "value":
                value = reader.value()
                if self.values.setdefault(target, (value, place))[0] != value:
                    place.fail(f"{target!r} is described in two ways")
            case _:
                reader.fail("expected ':' and a type, or one of missing, module, value", at=token.start)

    def _tensor(self, reader: Reader, target: str, place: TextPosition) -> TensorType:
        at = reader.peek().start
        kind = reader.type()
        if not isinstance(kind, TensorType):
            reader.fail("a constant is one tensor", at=at)
        token = reader.expect("word", what="param, buffer or tensor")
        if token.text not in _KINDS:
            reader.fail(f"{token.text!r} is not a kind of constant", at=token.start, advice="param, buffer or tensor")
        words = token.text
        more = _KINDS[token.text]
        if more and reader.accept(more):
            words = f"{words} {more}"
        digest = reader.digest()
        tied = None
        if reader.accept("tied"):
            reader.require("=")
            tied = reader.string()
        self.constants.append(ConstantText(self.path, target, kind, words, digest, tied, place))
        return kind

    def _module(self, target: str, rows: dict[str, Any], place: TextPosition) -> None:
        facts = (rows.get("type"), rows.get("state"))
        if any(fact is not None and not isinstance(fact, str) for fact in facts):
            place.fail("type and state of a module are strings")
        if facts[1] is not None and not is_digest(facts[1]):
            place.fail(f"state={facts[1]!r} is not a digest: it has eight hex digits, 0-9 and a-f")
        if self.modules.setdefault(target, (*facts, place))[:2] != facts:
            place.fail(f"the module {target!r} is described in two ways")

    def _output(self, reader: Reader) -> None:
        at = reader.peek().start
        value = reader.value()
        rows = read_attributes(reader, "name")
        node = self._create(reader, at, str(rows.get("name", "output")), "output", "output", (value,))
        self._finish_line(reader, node)
        self.has_output = True

    # -- calls -----------------------------------------------------------------------------------------------

    def _call(self, reader: Reader) -> None:
        token = reader.take()
        kind = reader.type() if reader.accept(":") else None
        reader.require("=")
        callee = reader.expect("word", what="the name of an op")
        op, target = self._target(reader, callee)
        args, kwargs = read_arguments(reader)
        rows = read_attributes(reader, "mode_arg", "train", "eval", "counter", "type", "state")
        mode = read_mode(reader, rows)
        if isinstance(target, OpOverload):
            args, kwargs = by_schema(reader, callee, target, args, kwargs, -1 if mode is None else mode.position)
        if mode is not None and mode.position >= len(args):
            reader.fail(f"mode_arg={mode.position}, but the call has {len(args)} arguments", at=callee.start)
        if target is getattr:
            check_getattr(reader, callee, args)
        node = self._create(reader, token.start, token.text[1:], op, target, args, kwargs)
        _set_type(node, kind)
        self._finish_line(reader, node)
        self._facts(reader, node, rows, mode, TextPosition(reader, callee.start))

    def _facts(
        self, reader: Reader, node: fx.Node, rows: dict[str, Any], mode: ModeValue | None, place: TextPosition
    ) -> None:
        if mode is not None:
            self.modes[node] = mode
        if (counter := rows.get("counter")) is not None:
            self.counters[node] = check_target(str(counter), place)
        if node.op == "call_module":
            self._module(str(node.target), rows, place)
        elif "type" in rows or "state" in rows:
            reader.fail("type and state describe a module", at=place.at)

    def _target(self, reader: Reader, callee: Token) -> tuple[str, Any]:
        if callee.text == "call_module":
            place = TextPosition(reader, reader.peek().start)
            return "call_module", check_target(reader.reference(), place)
        if callee.text == "call_method":
            token = reader.expect("method", what="a method such as .view")
            if not is_method(token.text[1:]):
                reader.fail(f"{token.text[1:]!r} is not a method of a tensor", at=token.start)
            return "call_method", token.text[1:]
        return "call_function", reader.callee(callee)


def _set_type(node: fx.Node, kind: ValueType | None) -> None:
    if kind is not None:
        node.meta["val"] = kind
