"""Checks of what a program file can hold. They run before writing and after reading: everything saved can be loaded,
and everything a file names is an op on tensors without effects outside the model.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from quantc.capture.pt2.operator_checks import why_not_operator
from quantc.ir.alias_analysis import Aliasing
from quantc.ir.dialect import higher_order_name, target_name
from quantc.ir.program import TRAINED, Program, Stage, attribute
from quantc.ir.types import DTYPE_NAMES
from quantc.observe.module import ObserverModule
from quantc.text.digests import graph_constants
from quantc.text.literals import ATOMS, Opaque
from quantc.text.node_printer import OpaqueModule
from quantc.text.target_names import functions

TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
LEAF = "capture the model without keeping this module whole (leaf=), or keep it out of the program"
STATE = "while it trains, save prepared.state_dict(); what qc.convert(prepared) gives can be saved whole"
TRAINING = (TRAINED, "_norms", "_modes")
"""The submodules that hold what stands in a graph while it is trained quantized."""
PLACED = (
    "save the lowered module, qc.lower(program, target).save(path): it is the integer form, and which kernels run it"
)
FUNCTION = "capture with method='export', which sees through Python functions, or write it with torch ops"


def faults(program: Program) -> Iterator[tuple[str, str, str]]:
    """Contents that a file cannot hold: what, where, and advice."""
    if program.stage >= Stage.PLACED:
        yield "it is on kernels", f"its stage is {program.stage.label}", PLACED
        return
    for item in program.signature.inputs:
        if item.is_constant and (odd := _odd(item.constant)) is not None:
            yield f"input {item.name!r} is fixed to {odd}", f"input {item.name!r}", "capture with tensors and numbers"
    for spec in (program.signature.in_spec, program.signature.out_spec):
        if (odd := _odd_context(spec)) is not None:
            yield f"the inputs or outputs are arranged by {odd}", "signature", "use tuples, lists and dicts"
    for node, row in program.set_aside.rows.items():
        yield f"{row.name} behind {node.name} was set aside for training", program.describe(node), STATE
        return
    for _, graph in program.graphs():
        owner = program.owner(graph)
        for node in graph.nodes:
            found = _call(node, owner) or _attribute(node, owner) or _literal(node)
            if found is not None:
                yield found[0], program.describe(node), found[1]
    yield from _find_aliased_writes(program)


def _call(node: fx.Node, owner: nn.Module) -> tuple[str, str] | None:
    if node.op == "call_module":
        module = attribute(owner, str(node.target))
        if type(module) is ObserverModule:
            return None
        if str(node.target).partition(".")[0] in TRAINING:
            return f"{node.name} calls the module {node.target!r}, which is for training", STATE
        kind = module.kind if isinstance(module, OpaqueModule) else type(module).__name__
        return f"{node.name} calls the module {node.target!r} ({kind}), which was kept whole", LEAF
    if node.op != "call_function":
        return None
    target: Any = node.target
    if isinstance(target, OpOverload | HigherOrderOperator):
        why = _why_not_op(target)
        return None if why is None else (f"{node.name} {why}", "leave the op out of the model")
    if isinstance(target, Hashable) and target in _known_functions():
        return None
    return f"{node.name} calls the Python function {target_name(target)}", FUNCTION


@cache
def _known_functions() -> frozenset[Any]:
    """The Python functions that text may name."""
    return frozenset(functions().values())


def _why_not_op(target: OpOverload | HigherOrderOperator) -> str | None:
    if isinstance(target, HigherOrderOperator):
        return why_not_operator(f"torch.ops.higher_order.{higher_order_name(target)}")
    return why_not_operator(f"torch.ops.{target.namespace}.{target._opname}.{target._overloadname}")


def _attribute(node: fx.Node, owner: nn.Module) -> tuple[str, str] | None:
    if node.op != "get_attr":
        return None
    value = attribute(owner, str(node.target))
    if isinstance(value, torch.Tensor):
        why = why_not_tensor(value)
        return None if why is None else (f"{node.target!r} {why}", "store plain tensors in the model")
    if isinstance(value, fx.GraphModule):
        return None
    if value is None or isinstance(value, nn.Module):
        return f"{node.name} refers to {node.target!r}, which is {_kind_text(value)}", LEAF
    odd = _odd(value)
    return None if odd is None else (f"{node.target!r} is {odd}", "store plain tensors and numbers in the model")


def _find_aliased_writes(program: Program) -> Iterator[tuple[str, str, str]]:
    """Constants that are parts of one memory, if that is written to. In a file each has its own."""
    memory: dict[int, dict[int, str]] = {}
    for name, tensor in graph_constants(program).items():
        if why_not_tensor(tensor) is None and tensor.numel():
            memory.setdefault(tensor.untyped_storage().data_ptr(), {})[id(tensor)] = name
    others = {key: names for names in memory.values() if len(names) > 1 for key in names}
    for _, graph in program.graphs() if others else ():
        aliasing = Aliasing(graph, program.owner(graph))
        for node in graph.find_nodes(op="get_attr"):
            names = others.get(id(program.tensor(node)))
            if names is not None and aliasing.is_written(node):
                what = f"{node.name} is written to, and shares memory with others: {', '.join(sorted(names.values()))}"
                yield what, program.describe(node), "give each buffer of the model memory of its own"


def why_not_tensor(tensor: torch.Tensor) -> str | None:
    """Reason why a tensor cannot be stored; None if it can."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return "has no numbers: the program was parsed without its constants"
    if type(tensor) not in TENSORS:
        return f"is a {type(tensor).__name__}"
    if tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES:
        return f"is {tensor.layout}, {tensor.dtype}"
    return None


def _literal(node: fx.Node) -> tuple[str, str] | None:
    odd = _odd((node.args, node.kwargs))
    return None if odd is None else (f"{node.name} has {odd} among its arguments", FUNCTION)


def _odd(value: Any) -> str | None:
    """The first part of a literal that text cannot carry; None if there is none."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list | tuple):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend([*item, *item.values()])
        elif isinstance(item, slice):
            pending.extend((item.start, item.stop, item.step))
        elif isinstance(item, OpOverload | HigherOrderOperator):
            if _why_not_op(item) is not None:
                return f"the op {target_name(item)}"
        elif not _is_plain(item):
            return f"an object of another program ({item.kind})" if isinstance(item, Opaque) else _kind_text(item)
    return None


def _is_plain(item: Any) -> bool:
    if isinstance(item, Opaque):
        return False
    return type(item) in ATOMS or isinstance(item, fx.Node | range | int | float | complex | str)


def _odd_context(spec: pytree.TreeSpec) -> str | None:
    pending = [spec]
    while pending:
        item = pending.pop()
        pending.extend(item.children())
        if item.type in (None, tuple, list) or pytree.is_namedtuple_class(item.context):
            continue
        if (odd := _odd(item.context)) is not None:
            return odd
    return None


def _kind_text(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}"
