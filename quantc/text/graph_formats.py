"""Export of programs to other formats: networkx, Graphviz, GraphML, JSON, and a readable table.

The JSON document has these keys, and will only gain others:

    format          1
    name, stage, method, mode ("train" or "eval"), inference_only (list of reasons), fixed_mode (reason or "")
    sizes           {symbol: [low, high or null]}
    graphs          list of {path, nodes}; the path of the top graph is ""
      nodes         list of {name, op, type or null, operands, arguments, users, origin or null, target or null}
        operands    names of the nodes it uses, in order, as often as it uses them
        arguments   {dialect name: literal as in the text dump}
        target      for get_attr, call_module and call_method: what it refers to
        origin      {module_path, module_type, source}
        decision    null, or {verdict, rule, quantizer, technique, reason, spec, scale, zero_point}; null where unknown
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from io import StringIO
from typing import Any

import networkx as nx
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import fx

from quantc.ir.dialect import operands
from quantc.ir.program import Program
from quantc.ir.types import type_of
from quantc.text.literals import format_value, used_nodes
from quantc.text.node_facts import Decision, Decisions, select
from quantc.text.target_names import callee_name

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def vertex(path: str, node: fx.Node) -> str:
    """The qualified name of a node: `conv2d`, or `true_graph_0/conv2d`."""
    return f"{path}/{node.name}" if path else node.name


def operation(node: fx.Node) -> str:
    """The operation of a node, under its name in the text dump."""
    return callee_name(node.target) if node.op == "call_function" else node.op


def _type_text(node: fx.Node) -> str | None:
    kind = type_of(node)
    return None if kind is None else str(kind)


def to_networkx(program: Program, only: str | None = None) -> nx.MultiDiGraph[str]:
    """One vertex a node, one edge an operand (attribute `operand`).

    Attributes of vertices, all text: `op`, `type`, `arguments`, `origin`, `module`, `graph`, and of a prepared program
    `verdict`, `rule`, `technique`, `reason`, `spec`, `scale`. `only` names a module, or a range of nodes, `first..last`.
    """
    result: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=program.name)
    kept, decisions = select(program, only), Decisions(program)
    for path, graph in program.graphs():
        nodes = [node for node in graph.nodes if kept is None or node in kept]
        for node in nodes:
            origin = program.origins.get(node)
            result.add_node(
                vertex(path, node),
                op=operation(node),
                type=_type_text(node) or "?",
                arguments=", ".join(f"{name}={value}" for name, value in _arguments(node).items()),
                origin=str(origin or ""),
                module="" if origin is None else origin.module_path,
                graph=path,
                **_decided(decisions.of(node)),
            )
        for node in nodes:
            for index, source in enumerate(used_nodes((node.args, node.kwargs))):
                if kept is None or source in kept:
                    result.add_edge(vertex(path, source), vertex(path, node), operand=index)
    return result


def _arguments(node: fx.Node) -> dict[str, str]:
    """The arguments of a call, by dialect name, as literals."""
    return {name: format_value(value, lambda n: f"%{n.name}") for name, value in operands(node)}


def _decided(decision: Decision | None) -> dict[str, str]:
    """The attributes of a decision; none without one."""
    if decision is None:
        return {}
    names = ("verdict", "rule", "technique", "reason", "spec")
    return {**{name: getattr(decision, name) for name in names}, "scale": decision.scale_text}


def dump_graphml(program: Program, only: str | None = None) -> str:
    """GraphML. Characters invalid in XML become `?`."""
    graph = to_networkx(program, only)
    for _, row in graph.nodes(data=True):
        row.update({key: _NOT_XML.sub("?", value) for key, value in row.items()})
    graph.graph["name"] = _NOT_XML.sub("?", program.name)
    return "\n".join(nx.generate_graphml(graph)) + "\n"


def _dot(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{_NOT_XML.sub("?", escaped)}"'


COLOURS = {"quantized": "#cfe8cf", "propagated": "#e6f2e6", "float": "#f6d9d2"}
"""By verdict."""


def dump_dot(program: Program, only: str | None = None) -> str:
    """Graphviz: one box a node, with its decision; modules and nested graphs are clusters.

    Constants are lines of the boxes that read them. Boxes are green where quantized, pale where quantization is
    propagated, and red where float.
    """
    rows = [f"digraph {_dot(program.name)} {{", '  node [shape=box, fontname="monospace"];']
    kept, decisions = select(program, only), Decisions(program)
    for number, (path, graph) in enumerate(program.graphs()):
        nodes = [node for node in graph.nodes if (kept is None or node in kept) and not _is_folded(node, kept)]
        boxes = [(_cluster(program, path, node), _box(path, node, decisions.of(node))) for node in nodes]
        rows += _nest(boxes, f"cluster_{number}")
        rows += (row for node in nodes for row in _edges(path, node, kept))
    return "\n".join([*rows, "}"]) + "\n"


def _is_folded(node: fx.Node, kept: frozenset[fx.Node] | None) -> bool:
    """True for a constant that others read: it is a line of theirs."""
    return node.op == "get_attr" and any(kept is None or user in kept for user in node.users)


def _cluster(program: Program, path: str, node: fx.Node) -> tuple[str, ...]:
    """The clusters around a node: the nested graph, then the modules that contain its own."""
    origin = program.origins.get(node)
    modules = [] if origin is None or not origin.module_path else origin.module_path.split(".")
    return (*((path,) if path else ()), *(".".join(modules[: count + 1]) for count in range(len(modules))))


def _nest(boxes: list[tuple[tuple[str, ...], str]], prefix: str, depth: int = 0) -> Iterator[str]:
    """Boxes inside their clusters, which nest."""
    inner: dict[str, list[tuple[tuple[str, ...], str]]] = {}
    for clusters, box in boxes:
        if len(clusters) == depth:
            yield f"  {box}"
        else:
            inner.setdefault(clusters[depth], []).append((clusters, box))
    for number, (label, own) in enumerate(inner.items()):
        name = f"{prefix}_{number}"
        yield f"  subgraph {name} {{ label={_dot(label)}; color=gray;"
        yield from _nest(own, name, depth + 1)
        yield "  }"


def _box(path: str, node: fx.Node, decision: Decision | None) -> str:
    names = {value: name for name, value in operands(node) if isinstance(value, fx.Node)}
    constants = [
        f"{names.get(value, value.name)} = {_type_text(value) or '?'}"
        for value in node.all_input_nodes
        if value.op == "get_attr"
    ]
    label = [node.name, operation(node), _type_text(node), *constants]
    style = ""
    if decision is not None:
        by = f"{decision.verdict} by {decision.rule}" if decision.rule else f"{decision.verdict} {decision.reason}"
        label += [by.strip()[:80], " ".join(filter(None, (decision.spec, decision.scale_text)))]
        if colour := COLOURS.get(decision.verdict):
            style = f', style=filled, fillcolor="{colour}"'
    return f"{_dot(vertex(path, node))} [label={_dot(chr(10).join(filter(None, label)))}{style}];"


def _edges(path: str, node: fx.Node, kept: frozenset[fx.Node] | None) -> Iterator[str]:
    for index, source in enumerate(used_nodes((node.args, node.kwargs))):
        if not _is_folded(source, kept) and (kept is None or source in kept):
            yield f'  {_dot(vertex(path, source))} -> {_dot(vertex(path, node))} [label="{index}"];'


def dump_json(program: Program, only: str | None = None) -> str:
    """One JSON document; see this module's docstring for the keys."""
    kept, decisions = select(program, only), Decisions(program)
    document = {
        "format": 1,
        "name": program.name,
        "stage": program.stage.label,
        "method": program.method,
        "mode": "train" if program.training else "eval",
        "inference_only": list(program.inference_only),
        "fixed_mode": program.fixed_mode,
        "sizes": {symbol: list(bounds) for symbol, bounds in program.signature.ranges.items()},
        "graphs": [
            {
                "path": path,
                "nodes": [_json_node(program, node, decisions) for node in graph.nodes if kept is None or node in kept],
            }
            for path, graph in program.graphs()
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def _json_node(program: Program, node: fx.Node, decisions: Decisions) -> dict[str, Any]:
    origin, decision = program.origins.get(node), decisions.of(node)
    return {
        "name": node.name,
        "op": operation(node),
        "type": _type_text(node),
        "operands": [source.name for source in used_nodes((node.args, node.kwargs))],
        "arguments": _arguments(node),
        "users": len(node.users),
        "origin": None
        if origin is None
        else {"module_path": origin.module_path, "module_type": origin.module_type, "source": origin.source},
        "target": str(node.target) if node.op in ("get_attr", "call_module", "call_method") else None,
        "decision": None if decision is None else decision.to_data(),
    }


def dump_table(program: Program, only: str | None = None) -> str:
    """A plain table: node, op, type, users, origin."""
    kept = select(program, only)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("node", "op", "type"):
        table.add_column(heading, no_wrap=True)
    table.add_column("users", justify="right", no_wrap=True)
    table.add_column("origin", no_wrap=True)
    for path, graph in program.graphs():
        for node in graph.nodes:
            if kept is not None and node not in kept:
                continue
            origin = str(program.origins.get(node) or "")
            cells = (vertex(path, node), operation(node), _type_text(node) or "?", str(len(node.users)), origin)
            table.add_row(*(Text(cell) for cell in cells))  # Text: `f32[2,3]` is not markup
    out = StringIO()
    # wide enough for any row: the text must not depend on the terminal it is made in
    Console(file=out, width=100_000, color_system=None, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
