"""torch.export and torch.compile of integer programs, in both styles: they run, and give the same bits.

Where a table leaves ops in float (x86 has no rule for softmax), inductor computes those in its own way, and they may
differ in their last bits. The integers never do.
"""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.export import Dim, ExportedProgram

from quantc.integer.region_check import integer_regions
from quantc.ir.program import Program
from quantc.ir.types import tensor_type
from tests.support.integer_calls import CALLS, IDS, Call
from tests.support.integer_models import BACKENDS, STYLES, Multiplier, Style, converted

pytestmark = pytest.mark.filterwarnings("ignore")
every_style = pytest.mark.parametrize("style", STYLES)
QUICK = {("residual", "x86"), ("residual", "executorch"), ("digits", "qnnpack"), ("encoder", "qnnpack")}
models = pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=() if (name, backend) in QUICK else pytest.mark.slow)
        for name in ("digits", "residual", "encoder")
        for backend in BACKENDS
    ],
)


def exported(program: Program, inputs: tuple[Tensor, ...], dynamic: bool) -> ExportedProgram:
    shapes = ({0: Dim("batch", min=1)},) if dynamic else None
    return torch.export.export(program.module, inputs, dynamic_shapes=shapes)


def loaded(program: ExportedProgram) -> Any:
    """What is left of an exported program in a file."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def compiled(module: fx.GraphModule, backend: str) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend=backend, fullgraph=True)


@every_style
@models
def test_export_runs_and_agrees(name: str, backend: str, style: Style) -> None:
    program, inputs = converted(name, backend, style)
    expected = program(*inputs)
    found = exported(program, inputs, dynamic=False)
    assert torch.equal(found.module()(*inputs), expected)
    assert torch.equal(loaded(found)(*inputs), expected)


@every_style
@pytest.mark.parametrize("multiplier", ["float64", "fixed"])
def test_export_keeps_a_dynamic_batch(style: Style, multiplier: Multiplier) -> None:
    program, inputs = converted("residual", "qnnpack", style, multiplier=multiplier, dynamic=True)
    found = loaded(exported(program, inputs, dynamic=True))
    for rows in (1, 2, len(inputs[0])):
        part = tuple(value[:rows] for value in inputs)
        assert torch.equal(found(*part), program(*part))


READ = """
import sys, torch, quantc
program = torch.export.load(sys.argv[1]).module()
inputs, expected = torch.load(sys.argv[2])
assert torch.equal(program(*inputs), expected)
"""


def test_another_process_reads_an_exported_program(tmp_path: Path) -> None:
    program, inputs = converted("branches", "qnnpack", "fused")
    files = [str(tmp_path / name) for name in ("program.pt2", "values.pt")]
    torch.export.save(exported(program, inputs, dynamic=False), files[0])
    torch.save((inputs, program(*inputs)), files[1])
    subprocess.run([sys.executable, "-c", READ, *files], check=True)


def test_the_ops_of_an_exported_program_are_the_program_s() -> None:
    fused, inputs = converted("residual", "qnnpack", "fused")
    targets = {str(node.target) for node in exported(fused, inputs, dynamic=False).graph.nodes}
    assert {"quantc.conv.default", "quantc.linear.default"} <= targets
    decomposed, _ = converted("residual", "qnnpack", "decomposed")
    targets = {str(node.target) for node in exported(decomposed, inputs, dynamic=False).graph.nodes}
    assert "out_dtype" in targets
    assert not any(target.startswith("quantc") for target in targets)


@every_style
@models
def test_compile_in_eager_runs_and_agrees(name: str, backend: str, style: Style) -> None:
    program, inputs = converted(name, backend, style)
    assert torch.equal(compiled(program.module, "aot_eager")(*inputs), program(*inputs))


@pytest.mark.slow  # half a minute, most of it the C++ compiler's
@every_style
def test_inductor_runs_and_agrees(style: Style) -> None:
    program, inputs = converted("residual", "qnnpack", style, multiplier="fixed" if style == "fused" else "float64")
    assert torch.equal(compiled(program.module, "inductor")(*inputs), program(*inputs))


@pytest.mark.slow
@every_style
def test_inductor_takes_a_dynamic_batch(style: Style) -> None:
    program, inputs = converted("residual", "qnnpack", style, dynamic=True)
    torch._dynamo.reset()
    found = torch.compile(program.module, fullgraph=True, dynamic=True)
    for rows in (3, len(inputs[0])):
        part = tuple(value[:rows] for value in inputs)
        assert torch.equal(found(*part), program(*part))


@pytest.mark.slow
@every_style
@pytest.mark.parametrize("multiplier", ["float64", "fixed"])
@pytest.mark.parametrize("name", ["digits", "encoder", "pools"])
def test_inductor_keeps_every_bit_where_nothing_is_left_in_float(
    name: str, style: Style, multiplier: Multiplier
) -> None:
    program, inputs = converted(name, "qnnpack", style, multiplier=multiplier)
    assert torch.equal(compiled(program.module, "inductor")(*inputs), program(*inputs))


def all_values(program: Program) -> tuple[fx.GraphModule, list[fx.Node]]:
    """A module that yields what every node of a program yields, and those nodes."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function" and tensor_type(node) is not None]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(program.graph, copies)
    graph.output(tuple(copies[node] for node in nodes))
    return fx.GraphModule(program.root, graph), nodes


@pytest.mark.slow
@every_style
@pytest.mark.parametrize("backend", ["x86", "executorch"])
@pytest.mark.parametrize("name", ["digits", "residual", "encoder", "pools"])
def test_inductor_differs_in_ops_left_in_float_alone(name: str, backend: str, style: Style) -> None:
    """A node that differs though all it reads agrees is at fault: it must lie outside the integer regions."""
    program, inputs = converted(name, backend, style)
    module, nodes = all_values(program)
    pairs = zip(nodes, compiled(module, "inductor")(*inputs), module(*inputs), strict=True)
    agrees = {node: torch.equal(result, expected) for node, result, expected in pairs}
    inside = {node for region in integer_regions(program) for node in region.nodes}
    assert inside
    at_fault = [
        node
        for node in nodes
        if not agrees[node] and all(agrees.get(operand, True) for operand in node.all_input_nodes)
    ]
    assert not inside.intersection(at_fault)


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_ops_are_what_their_schemas_say_and_have_their_shapes(call: Call) -> None:
    torch.library.opcheck(call.target, call.args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_ops_pass_all_of_torchs_checks(call: Call) -> None:
    torch.library.opcheck(call.target, call.args)
