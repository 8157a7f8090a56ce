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


def to_networkx(program: Program) -> nx.MultiDiGraph[str]:
    """One vertex a node (attributes `op`, `type`, `origin`, `graph`), one edge an operand (attribute `operand`)."""
    result: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=program.name)
    for path, graph in program.graphs():
        for node in graph.nodes:
            result.add_node(
                vertex(path, node),
                op=operation(node),
                type=_type_text(node) or "?",
                origin=str(program.origins.get(node) or ""),
                graph=path,
            )
        for node in graph.nodes:
            for index, source in enumerate(used_nodes((node.args, node.kwargs))):
                result.add_edge(vertex(path, source), vertex(path, node), operand=index)
    return result


def dump_graphml(program: Program) -> str:
    """GraphML. Characters invalid in XML become `?`."""
    graph = to_networkx(program)
    for _, row in graph.nodes(data=True):
        row.update({key: _NOT_XML.sub("?", value) for key, value in row.items()})
    graph.graph["name"] = _NOT_XML.sub("?", program.name)
    return "\n".join(nx.generate_graphml(graph)) + "\n"


def _dot(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{_NOT_XML.sub("?", escaped)}"'


def dump_dot(program: Program) -> str:
    """Graphviz: one box a node, nested graphs as clusters."""
    rows = [f"digraph {_dot(program.name)} {{", '  node [shape=box, fontname="monospace"];']
    for index, (path, graph) in enumerate(program.graphs()):
        if path:
            rows.append(f"  subgraph cluster_{index} {{ label={_dot(path)};")
        rows.extend(_dot_rows(path, graph))
        if path:
            rows.append("  }")
    return "\n".join([*rows, "}"]) + "\n"


def _dot_rows(path: str, graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        label = "\n".join(filter(None, (node.name, operation(node), _type_text(node))))
        yield f"  {_dot(vertex(path, node))} [label={_dot(label)}];"
        for index, source in enumerate(used_nodes((node.args, node.kwargs))):
            yield f'  {_dot(vertex(path, source))} -> {_dot(vertex(path, node))} [label="{index}"];'


def dump_json(program: Program) -> str:
    """One JSON document; see this module's docstring for the keys."""
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
            {"path": path, "nodes": [_json_node(program, node) for node in graph.nodes]}
            for path, graph in program.graphs()
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def _json_node(program: Program, node: fx.Node) -> dict[str, Any]:
    origin = program.origins.get(node)
    return {
        "name": node.name,
        "op": operation(node),
        "type": _type_text(node),
        "operands": [source.name for source in used_nodes((node.args, node.kwargs))],
        "arguments": {name: format_value(value, lambda n: f"%{n.name}") for name, value in operands(node)},
        "users": len(node.users),
        "origin": None
        if origin is None
        else {"module_path": origin.module_path, "module_type": origin.module_type, "source": origin.source},
        "target": str(node.target) if node.op in ("get_attr", "call_module", "call_method") else None,
    }


def dump_table(program: Program) -> str:
    """A plain table: node, op, type, users, origin."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("node", "op", "type"):
        table.add_column(heading, no_wrap=True)
    table.add_column("users", justify="right", no_wrap=True)
    table.add_column("origin", no_wrap=True)
    for path, graph in program.graphs():
        for node in graph.nodes:
            origin = str(program.origins.get(node) or "")
            cells = (vertex(path, node), operation(node), _type_text(node) or "?", str(len(node.users)), origin)
            table.add_row(*(Text(cell) for cell in cells))  # Text: `f32[2,3]` is not markup
    out = StringIO()
    # wide enough for any row: the text must not depend on the terminal it is made in
    Console(file=out, width=100_000, color_system=None, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
