"""The text dump and its siblings: golden examples, digests, and what other readers make of them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import fx, nn

from quantc.errors import QuantcError
from quantc.ir.program import Program, Stage
from quantc.ir.signature import Input, Signature
from quantc.text.printer import dump, node_line, numbered, to_networkx
from tests.support.growth import calls, exponent
from tests.support.programs import Choice, aten, bytes_digest, chain, exported, small_net

GOLDEN = """\
program "Net" stage=canonical method=given mode=eval
  state "count" : i64[] buffer #COUNT
  input %x : f32[2,3,4,4]
  const %w = "w" : f32[2,3,3,3] param #WEIGHT
  const %mean = "mean" : f32[2] buffer #MEAN
  const %var = "var" : f32[2] buffer #VAR
  %conv2d : f32[2,2,4,4] = conv2d(%x, %w, padding=[1, 1])  # c : Conv2d @ model.py:12
  %batch_norm : f32[2,2,4,4] = batch_norm(%conv2d, None, None, %mean, %var, training=False, momentum=0.1, eps=1e-05, \
cudnn_enabled=True) {mode_arg=5, train=True, eval=False, counter="count"}
  %dropout : f32[2,2,4,4] = dropout(%batch_norm, p=0.5, train=False) {mode_arg=2, train=True, eval=False}
  %relu : f32[2,2,4,4] = relu(%dropout)
  output (%relu,)
"""


def test_golden() -> None:
    digests: dict[str, np.ndarray[Any, Any]] = {
        "COUNT": np.array(7, dtype=np.int64),
        "WEIGHT": np.arange(54, dtype=np.float32),
        "MEAN": np.zeros(2, dtype=np.float32),
        "VAR": np.ones(2, dtype=np.float32),
    }
    expected = GOLDEN
    for name, array in digests.items():
        expected = expected.replace(f"#{name}", f"#{bytes_digest(array)}")
    assert dump(small_net()) == expected


def test_program_methods_are_doors_to_this_module() -> None:
    program = small_net()
    assert program.dump() == str(program) == dump(program)
    assert nx.utils.graphs_equal(program.to_networkx(), to_networkx(program))


def test_node_line_is_the_line_of_the_dump() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    lines = {line.strip() for line in dump(program).splitlines()}
    shown = [node_line(program, node) for node in program.nodes() if not str(node.target).endswith("graph_0")]
    assert len(shown) > 10
    assert set(shown) <= lines


def test_dump_follows_a_constant_that_changes() -> None:
    program = small_net()
    before = dump(program)
    program.root.get_parameter("w").data.add_(1)
    assert dump(program) != before


def test_tied_constants_are_visible() -> None:
    text = dump(exported(Choice(), [torch.ones(2, 4)]))
    rows = [line for line in text.splitlines() if '.weight"' in line]
    assert len(rows) == 2
    assert sum('tied="first.weight"' in line for line in rows) == 1


def test_nested_graphs_follow_with_their_paths() -> None:
    text = dump(exported(Choice(), [torch.ones(2, 4)]))
    headers = [line for line in text.splitlines() if line.startswith("graph ")]
    assert headers[:2] == ["graph @true_graph_0", "graph @false_graph_0"]
    assert "graph @true_graph_0/true_graph_0" in headers
    assert "= higher_order.cond(%gt, @true_graph_0, @false_graph_0, (" in text


def test_signature_facts_are_shown() -> None:
    program = exported(
        Choice(), [torch.ones(2, 4)], dynamic_shapes={"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    )
    program.note_inference_only('batch norm was "folded"')
    text = dump(program)
    assert 'inference_only "batch norm was \\"folded\\""' in text
    assert "in 2..64" in text
    assert 'out_spec (*, {"y": *})' in text


def test_numbered_ignores_what_capture_may_choose() -> None:
    def build(names: dict[str, str], *, constant_first: bool) -> Program:
        root = nn.Module()
        root.w = nn.Parameter(torch.ones(4, 4))
        graph = fx.Graph()
        x = graph.placeholder(names["x"])
        w = graph.create_node("get_attr", "w", name=names["w"])
        if constant_first:
            x.prepend(w)
        y = graph.create_node("call_function", aten.linear.default, (x, w), name=names["y"])
        graph.output((y,))
        spec = small_net().signature
        signature = Signature((Input(names["x"]),), spec.in_spec, spec.out_spec)
        return Program(graph, root, signature, name=names["x"], stage=Stage.CANONICAL)

    one = build({"x": "x", "w": "w", "y": "linear"}, constant_first=True)
    two = build({"x": "arg", "w": "p_w", "y": "linear_5"}, constant_first=False)
    assert dump(one) != dump(two)
    assert numbered(one) == numbered(two)
    two.root.get_parameter("w").data[0, 0] = 2
    assert numbered(one) != numbered(two)


def test_numbered_sees_operands_and_arguments() -> None:
    def build(first: str, second: str, alpha: int) -> Program:
        graph = fx.Graph()
        nodes = {name: graph.placeholder(name) for name in "xy"}
        graph.output((graph.call_function(aten.sub.Tensor, (nodes[first], nodes[second]), {"alpha": alpha}),))
        spec = small_net().signature
        return Program(graph, nn.Module(), Signature((Input("x"), Input("y")), spec.in_spec, spec.out_spec))

    texts = {numbered(build(*row)) for row in (("x", "y", 1), ("y", "x", 1), ("x", "y", 2), ("x", "x", 1))}
    assert len(texts) == 4


def test_unknown_format() -> None:
    with pytest.raises(QuantcError, match="unknown dump format 'yaml'"):
        dump(small_net(), "yaml")  # type: ignore[arg-type]


def test_broken_programs_still_print() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    lost = graph.create_node("get_attr", "gone.weight")
    unprintable: Any = object()
    odd = graph.call_function(aten.relu.default, (x, lost, 3), {"what": unprintable})
    module = graph.create_node("call_module", "nowhere", (odd,))
    graph.call_function(operator.getitem, (module, slice(None, x)))
    program = Program(graph, nn.Module(), small_net().signature)
    text = dump(program)
    assert '"gone.weight" missing' in text
    assert 'relu(%x, %gone_weight, 3, what=opaque("builtins.object"))' in text
    assert "operator:getitem(%nowhere, slice(None, %x, None))" in text


@pytest.mark.parametrize("work", [dump, numbered], ids=["dump", "numbered"])
def test_cost_grows_linearly(work: Callable[[Program], str]) -> None:
    work(chain(10))
    costs = {length: calls(partial(work, chain(length))) for length in (250, 2000)}
    assert exponent(costs) < 1.05
