"""Graph modules of this flow: copies that leave the caller's alone, and modules built of a finished graph.

A graph is copied once and its module compiled once, at the end: until then its code is compiled only when it is run.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from quantc.capture.model_copies import Tensors
from quantc.errors import InputError, ModeError


class NotExportedError(InputError, ValueError):
    """Something was given that torch.export did not make; also a ValueError, as in torchao."""


class ModeNotImplementedError(ModeError, NotImplementedError):
    """`.train()` or `.eval()` of an exported model; also a NotImplementedError, as in torchao."""


def check_graph_module(model: object, verb: str) -> None:
    """Refuse what is no graph module."""
    if not isinstance(model, fx.GraphModule):
        raise NotExportedError(
            f"{verb} was given a {type(model).__name__}, and takes a graph that torch.export captured",
            where=f"the first argument of {verb}",
            advice="write model = torch.export.export(model, example_inputs).module() first",
        )


def check_flag(name: str, value: object) -> None:
    """Refuse a flag that is not a bool: an argument in the wrong place would count as true."""
    if not isinstance(value, bool):
        raise NotExportedError(
            f"{name} is {value!r}, and must be True or False",
            where=f"{name}={value!r}",
            advice=f"give it by name: {name}=True",
        )


def copied_graph(graph: fx.Graph) -> fx.Graph:
    """A copy whose nodes have the same names and metadata."""
    copied = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    results: Any = copied.graph_copy(graph, nodes)
    for old in graph.find_nodes(op="output"):
        nodes[old] = copied.output(results)
    for old, new in nodes.items():
        new.meta = dict(old.meta)
        new.name = old.name  # fx renames nodes that are called like builtins
        copied._graph_namespace._used_names.add(old.name)
    copied._codegen = copy.copy(graph._codegen)
    return copied


def own_copy(model: fx.GraphModule, tensors: Tensors) -> fx.GraphModule:
    """A copy of the graph in a module that is not compiled yet. Parameters are shared unless they are to be trained;
    buffers never are, since running the copy may write to them."""
    with _use_lazy_graph_module(True):
        owned = _make_graph_module(model, copied_graph(model.graph))
    memo: dict[int, torch.Tensor] = {}
    for module in _holders(owned):
        _copy_tensors(module._buffers, memo)
        if tensors is Tensors.COPIED:
            _copy_tensors(module._parameters, memo)
    owned.meta.update(model.meta)
    return owned


def _holders(module: nn.Module) -> list[nn.Module]:
    """The module and the plain ones below it, which fx makes for dotted names; other modules are the caller's."""
    found = [module]
    for holder in found:
        found += [child for child in holder.children() if type(child) is nn.Module]
    return found


def _copy_tensors(table: dict[str, Any], memo: dict[int, torch.Tensor]) -> None:
    for name, tensor in table.items():
        if tensor is None:
            continue
        if id(tensor) not in memo:
            data = tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(data, tensor.requires_grad) if is_parameter else data
        table[name] = memo[id(tensor)]


def finish_module(module: fx.GraphModule, meta: dict[str, Any]) -> fx.GraphModule:
    """The compiled module of a graph. Its mode cannot be switched in the way of an eager model, and it says so."""
    made = fx.GraphModule(module, module.graph)
    made.meta.update(meta)
    made.train = MethodType(_refuse_mode, made)  # type: ignore[method-assign]
    made.eval = MethodType(_refuse_mode, made)  # type: ignore[method-assign]
    return made


def _refuse_mode(module: fx.GraphModule, mode: bool = True) -> NoReturn:
    raise ModeNotImplementedError(
        "train() and eval() do not switch an exported model: its graph is that of one mode",
        where=type(module).__name__,
        advice="call move_exported_model_to_train(model) or move_exported_model_to_eval(model), or "
        "allow_exported_model_train_eval(model) once, which lets train() and eval() do that",
    )


PATH = "quantc_path"
"""Key in the `meta` of a loop body under annotation: its path in the model."""
BODIES: dict[str, int] = {"scan": 0, "while_loop": 1}
"""The loops whose bodies are quantized like the graph around them, and which argument is the body."""


def loop_bodies(module: fx.GraphModule) -> list[tuple[str, fx.GraphModule]]:
    """The bodies of the loops of a graph, by their names."""
    found: dict[str, fx.GraphModule] = {}
    for node in module.graph.nodes:
        place = (
            BODIES.get(getattr(node.target, "__name__", "")) if isinstance(node.target, HigherOrderOperator) else None
        )
        body = node.args[place] if place is not None else None
        part = getattr(module, str(body.target), None) if isinstance(body, fx.Node) else None
        if isinstance(body, fx.Node) and isinstance(part, fx.GraphModule):
            found[str(body.target)] = part
    return list(found.items())


def tensor_at(module: nn.Module, target: str) -> torch.Tensor | None:
    """The tensor a get_attr target refers to; None if it is something else."""
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, torch.Tensor) else None


def store(module: nn.Module, target: str, value: torch.Tensor) -> None:
    """Store a tensor at a dotted name, replacing the old value."""
    path, _, leaf = target.rpartition(".")
    holder = module.get_submodule(path) if path else module
    if isinstance(value, nn.Parameter):
        holder._buffers.pop(leaf, None)
        setattr(holder, leaf, value)
    else:
        holder._parameters.pop(leaf, None)
        holder.register_buffer(leaf, value)
