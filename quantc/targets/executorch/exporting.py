"""Export of a program in Q/DQ form by torch.export: flat inputs and outputs, and a name for every op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram

from quantc.errors import QuantcError, RefusedError, suggest
from quantc.ir.graph_tree import GraphTree
from quantc.ir.program import Program
from quantc.targets.executorch.lazy_imports import quiet
from quantc.targets.executorch.partitioning import give_name
from quantc.targets.executorch.runtime import in_order

LARGEST = 64
"""The largest size of a dimension that is not bounded: ExecuTorch sets memory aside for the largest there can be."""


def size_ranges(program: Program, largest: int | Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Range of each dynamic dimension, with an upper bound: its own, or the one for all. A named dimension gets no more
    memory than `largest` says, whatever its bound.
    """
    known = program.signature.ranges
    named = {} if isinstance(largest, int) else _by_symbol(largest, known)
    for_all = _check_size(largest) if isinstance(largest, int) else LARGEST
    found: dict[str, tuple[int, int]] = {}
    for symbol, (low, high) in known.items():
        end = for_all if high is None else high
        wanted = named.get(symbol, end)
        found[symbol] = (low, max(wanted if high is None else min(wanted, high), low))
    return found


def _by_symbol(largest: Any, known: Mapping[str, Any]) -> dict[str, int]:
    if not isinstance(largest, Mapping):
        raise _wrong(f"largest is a {type(largest).__name__}", "give a number, or numbers by symbol")
    for symbol in largest:
        if symbol not in known:
            raise _wrong(f"{symbol!r} is no size that varies", suggest(str(symbol), known, noun="sizes"))
    return {symbol: _check_size(size) for symbol, size in largest.items()}


def _check_size(size: Any) -> int:
    if not isinstance(size, int) or size < 1:
        raise _wrong(f"largest is {size!r}", "give the largest size that will be asked for, a whole number")
    return size


def _wrong(what: str, advice: str) -> RefusedError:
    return RefusedError(what, where='qc.lower(program, "executorch", largest=...)', advice=advice)


def export_program(program: Program, ranges: Mapping[str, tuple[int, int]]) -> ExportedProgram:
    """Export a program that the caller owns. Its flat outputs are the tensors that it yields."""
    inputs = _of_several(program, examples_of(program), ranges)
    shapes = _shapes(program, ranges)
    with quiet(), torch.no_grad():
        return torch.export.export(_flat_module(program), inputs, dynamic_shapes=shapes)


def keeps_state(program: ExportedProgram) -> bool:
    """True if an exported program writes to its own buffers. Writes to inputs are refused: ExecuTorch returns written
    values before the outputs, and leaves the caller's tensor unchanged.
    """
    targets = [node.target for node in program.graph.nodes if isinstance(node.target, OpOverload)]
    if not any(target._schema.is_mutable for target in targets):
        return False
    with quiet():  # written inputs are known once the program is functional
        signature = program.run_decompositions({}).graph_signature
    for name in signature.user_inputs_to_mutate.values():
        raise RefusedError(
            f"the program writes to its input {name!r}, which a program of ExecuTorch cannot do for its caller",
            where='qc.lower(program, "executorch")',
            advice="let the model work on a copy: x = x.clone()",
        )
    return bool(signature.buffers_to_mutate)


def _flat_module(program: Program) -> fx.GraphModule:
    """A module on a copy of the graph: its inputs and outputs are tensors, one after the other, and each op carries the
    name of the op that it was made for.
    """
    graph, root = program._as_given()
    constants = [item.constant if item.is_constant else ... for item in program.signature.inputs]
    flat = fx.Graph()
    values: dict[fx.Node, Any] = {}
    given = iter(constants)
    for node in graph.nodes:
        if node.op == "placeholder" and (constant := next(given)) is not ...:
            values[node] = constant  # what it was at capture
        elif node.op == "output":
            results: Any = fx.map_arg(node.args[0], values.__getitem__)
            flat.output(tuple(value for value in results if isinstance(value, fx.Node)))
        else:
            values[node] = flat.node_copy(node, values.__getitem__)
    module = fx.GraphModule(root, flat)
    made_for = program.plan.made_for
    for (_, own), (_, inner) in zip(program.graphs(), GraphTree(flat, module).graphs(), strict=True):
        for old, node in zip(_calls(own), _calls(inner), strict=True):
            give_name(node, old.name if (name := made_for.get(old)) is None else name)
    _order_constants(module)
    return module.requires_grad_(False).eval()


def _calls(graph: fx.Graph) -> list[fx.Node]:
    """The ops of a graph. A copy has the same, in the same order, if not by the same names."""
    return [node for node in graph.nodes if node.op == "call_function"]


def _order_constants(module: nn.Module) -> None:
    """Make constants contiguous: XNNPACK's passes fail on weights that are channels last already."""
    done: dict[int, Any] = {}
    """By the id of a tensor: those that go by several names stay one."""
    names = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, value in names:
        ordered = in_order(value.detach())
        if ordered.stride() != value.stride():
            path, _, leaf = name.rpartition(".")
            own = nn.Parameter(ordered, False) if isinstance(value, nn.Parameter) else ordered
            setattr(module.get_submodule(path), leaf, done.setdefault(id(value), own))


def examples_of(program: Program) -> tuple[Tensor, ...]:
    if program.example_inputs is None:
        raise QuantcError(
            f"{program.name} has no example inputs, and ExecuTorch's exporter runs the program on some",
            where="qc.lower",
            advice="capture the model with example inputs: qc.capture(model, example_inputs)",
        )
    pairs = zip(program.example_inputs, program.signature.inputs, strict=True)
    # contiguous: export bakes in the memory format, and the program is then called with other inputs
    return tuple(in_order(leaf) for leaf, item in pairs if not item.is_constant)


def _of_several(
    program: Program, inputs: tuple[Tensor, ...], ranges: Mapping[str, tuple[int, int]]
) -> tuple[Tensor, ...]:
    """Example inputs whose sizes that vary are not 1: torch.export takes that for a size that does not."""
    items = [item for item in program.signature.inputs if not item.is_constant]
    larger = {symbol for symbol, (_, high) in ranges.items() if high > 1}
    made = []
    for item, tensor in zip(items, inputs, strict=True):
        for axis, size in enumerate(() if item.type is None else item.type.shape):
            if size in larger and tensor.shape[axis] == 1:
                tensor = tensor.repeat_interleave(2, axis)
        made.append(tensor)
    return tuple(made)


def _shapes(program: Program, ranges: Mapping[str, tuple[int, int]]) -> Any:
    """`dynamic_shapes` for torch.export; None if all are static."""
    if not ranges:
        return None
    dims = {symbol: Dim(symbol, min=low, max=high) for symbol, (low, high) in ranges.items()}
    found = []
    for item in program.signature.inputs:
        if item.is_constant or item.type is None:
            continue
        sizes = {dim: size for dim, size in enumerate(item.type.shape) if isinstance(size, str)}
        found.append({dim: dims.get(size, Dim.AUTO) for dim, size in sizes.items()} or None)
    return tuple(found)
