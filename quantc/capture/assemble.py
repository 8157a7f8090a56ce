"""Assembly: turns a captured graph and its source module into a self-contained Program.

Tensors are copied (ties between them kept), so neither training the program nor changing the model afterwards affects
the other. Facts in `meta` move to typed tables; of `meta` only `val` stays, as a plain type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn

from quantc.capture.mode_flags import record_modes
from quantc.capture.model_copies import Tensors, copied_module
from quantc.ir.program import Program, attribute
from quantc.ir.signature import Input, Signature
from quantc.ir.sites import Origin
from quantc.ir.types import ScalarType, TensorType, TupleType, ValueType


@dataclass
class SymbolNames:
    """Readable names for the symbols of dynamic sizes: the user's own, else s0, s1, … in order of appearance."""

    given: dict[str, str] = field(default_factory=dict)
    """torch's symbol → the name of the user's Dim."""
    used: dict[str, str] = field(default_factory=dict)

    def name(self, symbol: str) -> str:
        if symbol not in self.used:
            fresh = (f"s{count}" for count in range(len(self.used) + 1))
            taken = set(self.used.values())
            self.used[symbol] = self.given.get(symbol) or next(name for name in fresh if name not in taken)
        return self.used[symbol]

    def size(self, value: Any) -> int | str:
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return value  # type: ignore[no-any-return]
        expression = value.node.expr
        if isinstance(expression, sympy.Integer):
            return int(expression)
        symbols = sorted(expression.free_symbols, key=str)
        renamed = expression.xreplace(
            {symbol: sympy.Symbol(self.name(str(symbol)), integer=True) for symbol in symbols}
        )
        return str(renamed)


def light_type(value: Any, names: SymbolNames) -> ValueType | None:
    """Type of a (fake) value, with renamed symbols."""
    if isinstance(value, TensorType | ScalarType | TupleType):
        return value
    if isinstance(value, torch.Tensor):
        return TensorType(value.dtype, tuple(names.size(size) for size in value.shape))
    for kinds, kind in (
        ((bool, torch.SymBool), "bool"),
        ((int, torch.SymInt), "int"),
        ((float, torch.SymFloat), "float"),
    ):
        if isinstance(value, kinds):
            return ScalarType(kind, str(names.size(value)))
    if isinstance(value, tuple | list):
        return TupleType(tuple(light_type(item, names) for item in value))
    return None


def assemble(
    graph: fx.Graph,
    source: nn.Module,
    signature: Callable[[SymbolNames], Signature],
    *,
    name: str,
    method: str,
    is_training: bool,
    names: SymbolNames | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
    origin_of: Callable[[fx.Node], Origin | None],
    mode_source: nn.Module | None = None,
    tensors: Tensors = Tensors.COPIED,
) -> Program:
    """Build the Program. `source` holds the tensors the graph refers to, besides `constants`. A read-only program can
    share them instead of copying.
    """
    names = names or SymbolNames()
    program = Program(
        graph,
        _copy_root(graph, source, constants or {}, tensors),
        signature(names),
        name=name,
        method=method,
        training=is_training,
    )
    for node in program.nodes():
        origin = origin_of(node)
        if origin is not None and node.op not in ("placeholder", "get_attr", "output"):
            program.origins[node] = origin
        value = light_type(node.meta.get("val"), names)
        if node.op == "get_attr" and (tensor := program.tensor(node)) is not None:
            value = light_type(tensor, names)
        if node.op == "placeholder" and not isinstance(value, TensorType) and node.graph is graph:
            value = None  # a constant of the capture: the signature holds it
        node.meta = {} if value is None else {"val": value}
    record_modes(program, mode_source)
    return program


def inputs_of(placeholders: Iterable[fx.Node], leaves: Iterable[Any], names: SymbolNames) -> tuple[Input, ...]:
    """Flat inputs, from the placeholders and (fake) example leaves."""
    rows = []
    for node, leaf in zip(placeholders, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            kind = light_type(leaf, names)
            rows.append(Input(node.name, kind if isinstance(kind, TensorType) else None))
        elif isinstance(leaf, torch.SymInt | torch.SymFloat):
            rows.append(Input(node.name))
        else:
            rows.append(Input(node.name, is_constant=True, constant=leaf))
    return tuple(rows)


def _copy_root(
    graph: fx.Graph, source: nn.Module, constants: Mapping[str, torch.Tensor], tensors: Tensors
) -> nn.Module:
    memo: dict[int, Any] = {}
    if tensors is Tensors.SHARED:
        memo |= {id(tensor): tensor for tensor in (*source.parameters(), *source.buffers())}
    root = nn.Module()
    whole: set[str] = set()
    """The modules that are there as they are, such as the graphs of branches."""
    for name, tensor in source.named_parameters(remove_duplicate=False):
        place(root, name, _copy_tensor(tensor, memo))
    for name, buffer in source.named_buffers(remove_duplicate=False):
        parent, _, leaf = name.rpartition(".")
        is_saved = leaf not in source.get_submodule(parent)._non_persistent_buffers_set
        place(root, name, _copy_tensor(buffer, memo), is_saved=is_saved)
    for node in graph.nodes:
        target = str(node.target)
        if node.op not in ("get_attr", "call_module"):
            continue
        value = constants.get(target) if target in constants else attribute(source, target)
        if isinstance(value, torch.Tensor) and attribute(root, target) is None:
            place(root, target, _copy_tensor(value, memo), is_saved=False)
        elif isinstance(value, nn.Module) and (node.op == "call_module" or target not in whole):
            # its tensors, if it has any, have made a plain module of that name
            place(root, target, copied_module(value, memo))
            whole.add(target)
    return root


def _copy_tensor(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:
        data = tensor.detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(data, tensor.requires_grad) if is_parameter else data
        # deepcopy's memo must keep the originals alive, or an id could be used again
        memo.setdefault(id(memo), []).append(tensor)
    found: torch.Tensor = memo[id(tensor)]
    return found


def place(root: nn.Module, name: str, value: torch.Tensor | nn.Module, *, is_saved: bool = True) -> None:
    """Set a tensor or module at a dotted name, creating plain modules on the way."""
    *path, leaf = name.split(".")
    module = root
    for part in path:
        child = module._modules.get(part)
        if child is None:
            child = nn.Module()
            module.add_module(part, child)
        module = child
    if isinstance(value, nn.Module):
        module.add_module(leaf, value)
    elif isinstance(value, nn.Parameter):
        module.register_parameter(leaf, value)
    else:
        module.register_buffer(leaf, value, persistent=is_saved)
