"""Capture through torch.export."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.export._trace
from torch import fx, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from quantc.capture.assemble import SymbolNames, assemble, inputs_of
from quantc.capture.export.dimensions import dim_names, dynamic_dims, upper_bound, widen_examples
from quantc.capture.rebinding import refuse_rebinding, refuse_shared_memory
from quantc.capture.refused_trace import RefusedError
from quantc.capture.source_lines import user_line_of_trace
from quantc.ir.dialect import higher_order_name
from quantc.ir.program import Program, attribute
from quantc.ir.signature import Signature
from quantc.ir.sites import Origin
from quantc.ir.subgraphs import called_graphs, form_of

CHATTY = ("torch.fx.experimental.symbolic_shapes", "torch.export._trace")
"""Loggers that report a failed export in full."""
NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
CALL_INDEX = re.compile(r"@\d+")
STRICT_ROOT = re.compile(r"^L\['self'\]\.?|^L__self___?|^_export_root(?:\.|$)")


def export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic_shapes: Any,
    strictness: str,
) -> Program:
    """Export `model` and convert the result to a Program."""
    dims = dynamic_dims(dynamic_shapes, args, kwargs, model)
    args, kwargs = widen_examples(dims, *_apart((args, kwargs)))
    with _quiet():
        exported = torch.export.export(
            model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strictness == "strict"
        )
    _refuse_leftovers(exported)
    if strictness == "strict" and any(_is_autocast(node) for node in exported.graph.nodes):
        raise RefusedError("strict export loses the dtypes of an autocast region; use method='export'")
    return from_exported(exported, name=type(model).__name__, model=model, given_dims=dim_names(dims))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings about plain attributes: quantc itself checks for those that matter, and refuses them.

    Nor does export print its partial graph when it fails: the error is sufficient.
    """
    loggers = [logging.getLogger(name) for name in CHATTY]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), patch.object(torch.export._trace, "print", lambda *_, **__: None, create=True):
        warnings.filterwarnings("ignore", message=r"The tensor attributes? .* assigned during export")
        warnings.filterwarnings("ignore", message=r"While (compiling|exporting), we found certain side effects")
        warnings.filterwarnings("ignore", message=r"A model attribute .* requires gradient")
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _apart(tree: Any) -> Any:
    """Inputs of which no two are the same tensor: export would take them for one input, for good."""
    seen: set[int] = set()

    def first_or_copy(tensor: torch.Tensor) -> torch.Tensor:
        is_new = id(tensor) not in seen
        seen.add(id(tensor))
        return tensor if is_new else tensor.detach().clone()

    return pytree.tree_map_only(torch.Tensor, first_or_copy, tree)


def _refuse_leftovers(exported: ExportedProgram) -> None:
    """torch.export lets some things through that a graph cannot compute again."""
    for name, value in exported.constants.items():
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            raise RefusedError(
                f"{name} is a {type(value).__name__} made while the model ran, which a graph cannot hold"
            )
    for node in exported.graph.nodes:
        module = getattr(node.target, "__module__", None) or ""
        if node.op == "call_function" and module.startswith(("torch._functorch", "torch._C._functorch")):
            raise RefusedError(f"torch.func transforms (vmap, grad, …) cannot be captured ({node.target.__name__})")


def _is_autocast(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and higher_order_name(node.target) == "wrap_with_autocast"


def from_exported(
    exported: ExportedProgram,
    *,
    name: str = "exported",
    model: nn.Module | None = None,
    given_dims: dict[tuple[int, int], str] | None = None,
) -> Program:
    """A Program from an ExportedProgram, which is not modified."""
    with _quiet():
        module = exported.module(check_guards=False)
    if not isinstance(module, fx.GraphModule):
        raise TypeError(f"torch.export gave a {type(module).__name__}")
    graph = module.graph
    placeholders = list(graph.find_nodes(op="placeholder"))
    constants = {
        spec.arg.name: spec.arg.value
        for spec in exported.graph_signature.input_specs
        if isinstance(spec.arg, torch.export.graph_signature.ConstantArgument)
    }
    leaves = [constants[node.name] if node.name in constants else node.meta.get("val") for node in placeholders]
    names = SymbolNames(_given_symbols(leaves, given_dims or {}))
    training = model.training if model is not None else _looks_trained(graph)

    def signature(names: SymbolNames) -> Signature:
        inputs = inputs_of(placeholders, leaves, names)
        ranges = {
            names.used[str(symbol)]: (max(int(bounds.lower), 0), upper_bound(bounds.upper))
            for symbol, bounds in exported.range_constraints.items()
            if str(symbol) in names.used
        }
        return Signature(inputs, module._in_spec, module._out_spec, ranges)  # type: ignore[arg-type]

    program = assemble(
        graph,
        module,
        signature,
        name=name,
        method="export",
        is_training=training,
        names=names,
        origin_of=origin_from_meta,
        mode_source=model,
    )
    if model is not None:
        _name_nested(program, model)
    refuse_rebinding(program)
    refuse_shared_memory(program, partial(attribute, model if model is not None else module))
    return program


def _given_symbols(leaves: list[Any], given: dict[tuple[int, int], str]) -> dict[str, str]:
    """torch's symbol → the user's name for the dimension it stands for."""
    found: dict[str, str] = {}
    for (leaf, dim), name in given.items():
        value = leaves[leaf]
        size: Any = value.shape[dim] if isinstance(value, torch.Tensor) else None
        if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
            found.setdefault(str(size.node.expr), name)
    return found


def _looks_trained(graph: fx.Graph) -> bool:
    """True if a graph of unknown origin was exported in training mode."""
    aten = torch.ops.aten
    batch_norms = graph.find_nodes(op="call_function", target=aten.batch_norm.default)
    dropouts = graph.find_nodes(op="call_function", target=aten.dropout.default)
    return any(node.args[5] is True and node.args[3] is not None for node in batch_norms) or any(
        len(node.args) > 2 and node.args[2] is True for node in dropouts
    )


def origin_from_meta(node: fx.Node) -> Origin | None:
    """Origin of a node, from torch.export's `meta`."""
    if node.op not in ("call_function", "call_module", "call_method"):
        return None
    stack = node.meta.get("nn_module_stack") or {}
    path, kind = list(stack.values())[-1] if stack else ("", "")
    if path == NO_MODULE:  # a size of an input, which export reads before the model runs
        return Origin()
    kind_name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    file, line = user_line_of_trace(node.meta.get("stack_trace"))
    return Origin(clean_path(path), kind_name, file, line)


def _name_nested(program: Program, model: nn.Module) -> None:
    """Say which module an op in a nested graph belongs to, which export forgets: that of the weights it reads, which
    reach the graph as operands of the call, or else the module that calls the graph."""
    given: dict[fx.Node, str] = {}
    """The inputs of nested graphs that stand for tensors of the model, by the names of these."""
    for _, graph in program.graphs():
        for call in graph.nodes:
            form = form_of(call)
            operands = form.operands(call.args) if form is not None else []
            for module in called_graphs(program, call):
                for entry, operand in zip(module.graph.find_nodes(op="placeholder"), operands, strict=False):
                    if isinstance(operand, fx.Node) and (operand.op == "get_attr" or operand in given):
                        given[entry] = given.get(operand, str(operand.target))
                for node in module.graph.nodes:
                    if node.op not in ("placeholder", "get_attr", "output"):
                        _name(program, node, call, given, model)


def _name(program: Program, node: fx.Node, call: fx.Node, given: dict[fx.Node, str], model: nn.Module) -> None:
    own, outer = program.origins.get(node) or Origin(), program.origins.get(call)
    if own.module_type:
        return
    weight = None if form_of(node) is not None else next((given[x] for x in node.all_input_nodes if x in given), None)
    if weight is not None:
        path = weight.rpartition(".")[0]
        kind = type(attribute(model, path) if path else model)
        program.origins[node] = replace(own, module_path=path, module_type=f"{kind.__module__}.{kind.__qualname__}")
    elif outer is not None:
        program.origins[node] = replace(own, module_path=outer.module_path, module_type=outer.module_type)


def clean_path(path: str) -> str:
    """`L['self'].layer1[0]` (strict), `_export_root.layer1.0` (in its nested graphs) and `layer1.0@1` (second call) all
    name `layer1.0`.
    """
    path = STRICT_ROOT.sub("", CALL_INDEX.sub("", path))
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).lstrip(".")
