"""The integer form of a converted graph: quantc's integer engine on the ops between dequantize and quantize.

A matmul or convolution with the clamp behind it becomes exact integer sums and one rounding; so do sums, pools, joins and
the other ops with an integer form (docs/integer-form.md lists them). All other ops stay between dequantize and quantize,
which are decomposed into ATen.
"""

from __future__ import annotations

import torch
from torch import fx

from quantc import pipelines
from quantc.capture.model_copies import Tensors
from quantc.flows.pt2e.exported_program import program_of
from quantc.flows.pt2e.graph_modules import check_graph_module, finish_module
from quantc.ir.dialect import is_op
from quantc.ir.plan import Claim
from quantc.ir.program import Program, Stage
from quantc.ir.types import TensorType, tensor_type
from quantc.qdq.ops import belongs_to_qdq, is_choice, is_dequantize, is_quantize
from quantc.spec.formats import Timing

CLAMPS = ("relu", "clamp")
NAME = "pt2e"
"""By whom nodes are claimed: the graph says that they are quantized, not by which rule."""


def to_program(module: fx.GraphModule) -> Program:
    """A converted graph as a Program in Q/DQ form: for `coverage()`, `qc.lower`, `qc.compare` and `save`."""
    check_graph_module(module, "to_program")
    program = program_of(module, Tensors.COPIED)
    _give_types(program)
    _claim(program)
    program.stage = Stage.FOLDED
    program.note_inference_only("it was quantized with fixed scales")
    return program


def reference_form(module: fx.GraphModule) -> fx.GraphModule:
    """A converted graph with integer arithmetic in place of Q/DQ."""
    program = pipelines.integer(style="decomposed").run(to_program(module))
    return finish_module(program.module, module.meta)


def _give_types(program: Program) -> None:
    """Infer the types of quantize and dequantize ops from their operands."""
    for node in program.nodes():
        source = node.args[0] if node.args else None
        kind = tensor_type(source) if isinstance(source, fx.Node) else None
        if kind is None or tensor_type(node) is not None:
            continue
        if is_quantize(node):
            dtype = next(arg for arg in reversed(node.args) if isinstance(arg, torch.dtype))
            node.meta["val"] = TensorType(dtype, kind.shape)
        elif is_dequantize(node):
            wanted = node.kwargs.get("out_dtype")
            node.meta["val"] = TensorType(wanted if isinstance(wanted, torch.dtype) else torch.float32, kind.shape)


def _claim(program: Program) -> None:
    """Claim every op that reads dequantized tensors, together with the clamp behind it that nothing else reads."""
    claims = program.plan.claims
    for node in program.nodes():
        if node.op != "call_function" or belongs_to_qdq(node) or node in claims:
            continue
        read = [operand for operand in node.all_input_nodes if is_dequantize(operand)]
        if not read:
            continue
        last = node
        while len(last.users) == 1 and is_op(user := next(iter(last.users)), *CLAMPS):
            last = user
        timing = _timing(read)
        step = node
        while True:
            claims[step] = Claim(NAME, node.name, last.name, timing=timing)
            if step is last:
                break
            step = next(iter(step.users))


def _timing(read: list[fx.Node]) -> Timing:
    """The technique of an op, from the dequantize ops it reads."""
    sources = [node.args[0] for node in read]
    if any(_is_chosen(node) for node in read):
        return Timing.DYNAMIC
    is_stored = all(isinstance(source, fx.Node) and source.op == "get_attr" for source in sources)
    return Timing.WEIGHT_ONLY if is_stored else Timing.STATIC


def _is_chosen(node: fx.Node) -> bool:
    """True if the scale of a dequantize op is computed at run time."""
    scale = node.args[1]
    return (
        isinstance(scale, fx.Node)
        and bool(scale.args)
        and isinstance(scale.args[0], fx.Node)
        and is_choice(scale.args[0])
    )
