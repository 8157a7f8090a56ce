"""Programs as networkx graphs, GraphML, JSON, Graphviz and tables."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

import networkx as nx
import torch

from quantc.ir.sites import Origin
from quantc.text.graph_formats import (
    dump_dot,
    dump_graphml,
    dump_json,
    dump_table,
    operation,
    to_networkx,
    vertex,
)
from tests.support.programs import Builder, Choice, aten, exported, small_net


def test_networkx_has_an_edge_for_every_operand() -> None:
    build = Builder()
    x = build.input("x", 2, 4)
    double = build.call(aten.add.Tensor, x, x)
    both = build.call(aten.cat.default, [x, double], 1)
    graph = to_networkx(build.program(both))
    edges = {(a, b, row["operand"]) for a, b, row in graph.edges(data=True)}
    assert edges == {
        ("x", "add", 0),
        ("x", "add", 1),
        ("x", "cat", 0),
        ("add", "cat", 1),
        ("cat", "output", 0),
    }
    own = {"op": "add", "type": "f32[2,4]", "arguments": "x=%x, y=%x"}
    assert graph.nodes["add"] == {**own, "origin": "", "module": "", "graph": ""}


def test_graphml_reads_back_as_the_same_graph() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    program.origins[program.node("linear")] = Origin("a\x00<&>\u2028", "T", "file.py", 3)
    read = nx.parse_graphml(dump_graphml(program), force_multigraph=True)
    original = to_networkx(program)
    assert set(read.nodes) == set(original.nodes)
    assert sorted(edge[:2] for edge in read.edges) == sorted(edge[:2] for edge in original.edges)
    ET.fromstring(dump_graphml(program))


def test_json_keys_are_stable() -> None:
    document = json.loads(dump_json(small_net()))
    assert list(document) == [
        "format",
        "name",
        "stage",
        "method",
        "mode",
        "inference_only",
        "fixed_mode",
        "sizes",
        "graphs",
    ]
    (top,) = document["graphs"]
    conv = next(node for node in top["nodes"] if node["op"] == "conv2d")
    assert conv == {
        "name": "conv2d",
        "op": "conv2d",
        "type": "f32[2,2,4,4]",
        "operands": ["x", "w"],
        "arguments": {"x": "%x", "w": "%w", "b": "None", "stride": "[1, 1]", "padding": "[1, 1]"},
        "users": 1,
        "origin": {"module_path": "c", "module_type": "torch.nn.modules.conv.Conv2d", "source": "model.py:12"},
        "target": None,
        "decision": None,
    }


def test_table_has_one_row_a_node_and_no_colours() -> None:
    program = small_net()
    rows = dump_table(program).splitlines()
    assert rows[0].split() == ["node", "op", "type", "users", "origin"]
    assert len(rows) == 2 + len(program.graph.nodes)
    assert "f32[2,2,4,4]" in rows[6]
    assert "\x1b" not in "".join(rows)


def test_dot_has_every_node_and_edge() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    text = dump_dot(program)
    assert text.startswith('digraph "Choice" {')
    graph = to_networkx(program)
    constants = {name for name, row in graph.nodes(data=True) if row["op"] == "get_attr" and graph.out_degree(name)}
    edges = [source for source, _ in graph.edges() if source not in constants]
    assert text.count(" -> ") == len(edges)
    assert text.count("[label=") == len(edges) + graph.number_of_nodes() - len(constants)
    assert text.count("{") == text.count("}")
    clusters = re.findall(r"subgraph (\w+)", text)
    assert len({*clusters}) == len(clusters), "a name that comes twice is one cluster"


def test_nodes_of_nested_graphs_are_qualified() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    inner = program.node("false_graph_0/sub")
    assert (vertex("false_graph_0", inner), vertex("", program.node("linear"))) == ("false_graph_0/sub", "linear")
    assert (operation(inner), operation(program.node("x"))) == ("sub", "placeholder")
    paths = [graph["path"] for graph in json.loads(dump_json(program))["graphs"]]
    assert paths == [path for path, _ in program.graphs()]
    assert dump_dot(program).count("subgraph cluster_") == len(paths) - 1
    assert "false_graph_0/sub " in dump_table(program)


def test_names_with_quotes_and_breaks_stay_in_one_dot_string() -> None:
    program = small_net()
    program.name = 'a "quoted"\\\n\x00 name'
    first = dump_dot(program).splitlines()[0]
    assert first == 'digraph "a \\"quoted\\"\\\\\\n? name" {'


def test_json_tells_sizes_modes_and_targets() -> None:
    dims = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    program = exported(Choice(), [torch.ones(3, 4)], dynamic_shapes=dims)
    program.note_inference_only("folded")
    document = json.loads(dump_json(program))
    assert list(document["sizes"].values()) == [[2, 64]]
    assert (document["mode"], document["inference_only"]) == ("eval", ["folded"])
    targets = {node["target"] for node in document["graphs"][0]["nodes"]}
    assert {"first.weight", "true_graph_0", None} <= targets


def test_unknown_types_are_question_marks_or_null() -> None:
    build = Builder()
    node = build.call(aten.relu.default, build.input("x", 2))
    program = build.program(node)
    node.meta.clear()
    program.origins[node] = Origin("act")
    assert to_networkx(program).nodes["relu"] == {
        "op": "relu",
        "type": "?",
        "arguments": "x=%x",
        "origin": "act",
        "module": "act",
        "graph": "",
    }
    row = next(row for row in json.loads(dump_json(program))["graphs"][0]["nodes"] if row["name"] == "relu")
    assert row["type"] is None
    assert "?" in next(line for line in dump_table(program).splitlines() if line.startswith("relu"))
