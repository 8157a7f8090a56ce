"""Capture by symbolic tracing (torch.fx): needs no example inputs, supports leaf modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from quantc.capture.assemble import SymbolNames, assemble, inputs_of
from quantc.capture.export.dimensions import DynamicDim, dynamic_dims, resize_examples, widen_examples
from quantc.capture.leaf_modules import LeafSelector, leaf_outputs
from quantc.capture.model_copies import Tensors, twin
from quantc.capture.rebinding import refuse_rebinding, refuse_shared_memory
from quantc.capture.symbolic.trace_inputs import Narrowing, TracedInputs
from quantc.capture.symbolic.tracer import AtenTracer
from quantc.ir.program import Program, attribute
from quantc.ir.signature import Input, Signature
from quantc.rewrite.inline_wrappers import GRADIENTS_LOST

Marks = dict[tuple[int, int], DynamicDim]


def trace(
    model: nn.Module,
    args: tuple[Any, ...] | None,
    kwargs: dict[str, Any],
    *,
    dynamic_shapes: Any,
    leaves: LeafSelector,
) -> Program:
    """Trace `model` symbolically. Without example inputs no shapes are known and none are fixed."""
    marks: Marks = dynamic_dims(dynamic_shapes, args, kwargs, model) if args is not None else {}
    if args is not None:
        args, kwargs = widen_examples(marks, args, kwargs)
    untouched = twin(model, Tensors.SHARED) if marks else model
    tracer, plan, graph = _trace(model, args, kwargs, marks, leaves)
    plan.check_still_dynamic()
    for narrowing in list(plan.narrowings()):
        if args is not None and _matters(narrowing, graph, untouched, args, kwargs, marks, leaves):
            plan.accept(narrowing)

    def signature(names: SymbolNames) -> Signature:
        placeholders = list(graph.find_nodes(op="placeholder"))
        if args is None:
            inputs = tuple(Input(node.name) for node in placeholders)
        else:
            inputs = inputs_of(placeholders, plan.leaves, names)
        return Signature(inputs, plan.in_spec, plan.out_spec, plan.ranges(names))

    program = assemble(
        graph,
        model,
        signature,
        name=type(model).__name__,
        method="fx",
        is_training=model.training,
        names=SymbolNames(plan.given_symbols()),
        constants=tracer.state.constants,
        origin_of=tracer.origins.get,
        mode_source=model,
    )
    refuse_rebinding(program)
    constants = tracer.state.constants
    refuse_shared_memory(program, lambda name: constants.get(name, attribute(model, name)))
    if tracer.changes_grad_mode and not model.training:
        program.note_inference_only(GRADIENTS_LOST)
    return program


def _trace(
    model: nn.Module, args: tuple[Any, ...] | None, kwargs: dict[str, Any], marks: Marks, leaves: LeafSelector
) -> tuple[AtenTracer, TracedInputs, fx.Graph]:
    shape_env = ShapeEnv(specialize_zero_one=False, duck_shape=False) if marks else None
    fakes = None if args is None else FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    tracer = AtenTracer(leaves, fakes, is_training=model.training)
    if leaves and args is not None and fakes is not None and shape_env is None:
        outputs = leaf_outputs(model, args, kwargs, leaves)
        tracer.leaf_values = pytree.tree_map_only(torch.Tensor, fakes.from_tensor, outputs)
    plan = TracedInputs(model, args, kwargs, fakes, marks)
    return tracer, plan, tracer.trace_into(model, plan.build)


def _matters(
    narrowing: Narrowing,
    graph: fx.Graph,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    marks: Marks,
    leaves: LeafSelector,
) -> bool:
    """True if a limit that the trace assumed shows in the graph, rather than being asked only by a kernel choosing its
    method: trace once more, beyond the limit, and compare.
    """
    try:
        _, _, other = _trace(model, *resize_examples(narrowing.beyond, args, kwargs), marks, leaves)
    except Exception:  # noqa: BLE001 - whatever a model raises beyond the limit, it says that the limit matters
        return True
    return _calls(other) != _calls(graph)


def _calls(graph: fx.Graph) -> list[Any]:
    """A graph as a list of calls that compares by structure."""
    places: dict[fx.Node, str] = {}
    rows: list[Any] = []
    for node in graph.nodes:
        places[node] = f"%{len(places)}"
        operands = map_arg((node.args, node.kwargs), lambda operand: places[operand])
        rows.append((node.op, str(node.target), repr(operands)))
    return rows
