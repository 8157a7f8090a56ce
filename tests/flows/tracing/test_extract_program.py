"""One fused op of a program as a small program of its own, run where the model calls the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import quantc as qc
from quantc.flows.tracing.extract_program import Compute, extract_program, grid_made, grid_of, grid_read, with_elements
from quantc.flows.tracing.traced_tensor import Grid
from quantc.ir.dialect import is_op
from quantc.ir.program import Program
from quantc.qdq.registration import decomposed_ops

ops: Any = decomposed_ops()
GRID = Grid(0.5, 3, 0, 255, torch.uint8)
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def quantized() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    program: Program = qc.quantize(model, (X,), [X]).program
    return program


def rounded(graph: fx.Graph, node: fx.Node, grid: Grid) -> tuple[fx.Node, fx.Node]:
    down = graph.create_node("call_function", ops.quantize_per_tensor.default, (node, *grid))
    return down, graph.create_node("call_function", ops.dequantize_per_tensor.default, (down, *grid))


def test_grids_are_read_off_the_ops_that_round() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    down, up = rounded(graph, x, GRID)
    assert grid_of(down) == grid_of(up) == GRID
    assert grid_of(x) is None
    assert grid_read(up) == (x, GRID)
    assert grid_read(down) is None
    scale = graph.placeholder("scale")
    unknown = graph.create_node("call_function", ops.quantize_per_tensor.default, (x, scale, *GRID[1:]))
    assert grid_of(unknown) is None


def test_a_tensor_is_on_a_grid_if_all_who_read_it_have_it_there() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    rounded(graph, x, GRID)
    rounded(graph, x, GRID)
    assert grid_made(x) == GRID
    graph.create_node("call_function", torch.relu, (x,))
    assert grid_made(x) is None
    y = graph.placeholder("y")
    rounded(graph, y, GRID)
    rounded(graph, y, GRID._replace(scale=0.25))
    assert grid_made(y) is None


def parts(program: Program) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The input, what the first linear yields behind its ReLU, and what the second does."""
    linears = [node for node in program.graph.nodes if is_op(node, "linear")]
    (relu,) = (node for node in program.graph.nodes if is_op(node, "relu"))
    (given,) = program.graph.find_nodes(op="placeholder")
    return given, relu, linears[1]


def test_parts_put_together_compute_what_the_program_does() -> None:
    program = quantized()
    given, relu, last = parts(program)
    first = Compute(extract_program(program, relu.name, [given.name], {}, None, "first"), None)
    second = Compute(extract_program(program, last.name, [relu.name], {}, None, "second"), None)
    out = grid_made(last)
    made = second.forward(first.forward(X))
    if out is not None:
        made = ops.dequantize_per_tensor(ops.quantize_per_tensor(made, *out), *out)
    assert torch.equal(made, program(X))


def test_operands_and_results_may_be_bytes() -> None:
    program = quantized()
    given, relu, _ = parts(program)
    on = {node.name: grid_read(node) for node in program.graph.nodes if grid_read(node) is not None}
    grid = next(found[1] for found in on.values() if found is not None and found[0] is given)
    out = grid_made(relu)
    assert out is not None
    levels = ops.quantize_per_tensor(X, *grid)
    as_bytes = Compute(extract_program(program, relu.name, [given.name], {given.name: grid}, out, "bytes"), None)
    as_floats = Compute(extract_program(program, relu.name, [given.name], {}, None, "floats"), None)
    made = as_bytes.forward(levels)
    assert made.dtype is torch.uint8
    assert torch.equal(made, ops.quantize_per_tensor(as_floats.forward(X), *out))


def test_a_kernel_is_within_one_step_of_the_op() -> None:
    program = quantized()
    given, relu, _ = parts(program)
    out = grid_made(relu)
    assert out is not None
    small = extract_program(program, relu.name, [given.name], {}, out, "kernel")
    reference = Compute(extract_program(program, relu.name, [given.name], {}, out, "float"), None)
    compute = Compute(small, "x86")
    assert compute.kernels
    assert int((compute.forward(X).int() - reference.forward(X).int()).abs().max()) <= 1
    assert torch.equal(compute.forward(X), compute.forward(X))


def test_what_a_part_would_read_beside_its_operands_is_refused() -> None:
    program = quantized()
    _, relu, last = parts(program)
    with pytest.raises(qc.QuantcError, match=last.name):
        extract_program(program, last.name, [], {}, None, "too little")
    assert relu.name


def test_an_empty_result_of_full_operands_is_refused() -> None:
    empty, full = torch.empty(0, 3), torch.ones(2, 3)
    assert with_elements(full, (full,)) is full
    assert with_elements(empty, (empty,)) is empty
    with pytest.raises(RuntimeError, match=r"\[2, 3\]"):
        with_elements(empty, (full,))
    assert with_elements((empty,), (full,)) == (empty,)


def test_operands_lie_in_order_for_those_who_want_it() -> None:
    program = quantized()
    given, relu, _ = parts(program)
    compute = Compute(extract_program(program, relu.name, [given.name], {}, None, "first"), None)
    turned: Tensor = X.t().contiguous().t()
    assert not turned.is_contiguous()
    assert torch.equal(compute.forward(turned), compute.forward(X))
