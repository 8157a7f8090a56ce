"""Program edits that let a rule claim a node. Each works on a copy, which has to be prepared again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from quantc.errors import QuantcError
from quantc.ir.dialect import BY_NAME, arguments, position
from quantc.ir.mac_count import example_sizes
from quantc.ir.plan import Plan
from quantc.ir.program import Program, Stage
from quantc.ir.site_index import outputs_of
from quantc.ir.size_expressions import evaluate
from quantc.ir.types import DTYPES, TensorType, dtype_of, tensor_type, type_of_value


def _copy(program: Program) -> Program:
    """A copy of which nothing is decided yet."""
    if program.stage >= Stage.QUANTIZED:
        raise QuantcError(
            f"{program.name} is quantized already",
            where=f"its stage is {program.stage.label}",
            advice="apply the change to the program that was captured or prepared",
        )
    copy = program.clone()
    copy.plan = Plan()
    copy.stage = min(copy.stage, Stage.FUSED)
    return copy


def set_arguments(program: Program, name: str, values: Mapping[str, Any]) -> Program:
    """Change arguments of a node. They must keep the type of its result."""
    copy = _copy(program)
    node = copy.node(name)
    target = node.target
    if not isinstance(target, OpOverload):
        raise QuantcError(f"{name} is not an ATen op", where=copy.describe(node), advice="change the model itself")
    for argument_name, value in values.items():
        _set(node, target, argument_name, value)
    _check_type(copy, node, values)
    copy.touch()
    return copy


def _set(node: fx.Node, target: OpOverload, name: str, value: Any) -> None:
    index = position(target, name)
    row = arguments(target)[index]
    if row.keyword_only or row.aten_name in node.kwargs:
        node.kwargs = {**node.kwargs, row.aten_name: value}
        return
    defaults = [missing.default for missing in arguments(target)[len(node.args) : index]]
    args = [*node.args, *defaults]
    args[index : index + 1] = [value]
    node.args = tuple(args)


def _check_type(program: Program, node: fx.Node, values: Mapping[str, Any]) -> None:
    """The rest of the program depends on the node's type."""
    sizes = example_sizes(program)
    known = tensor_type(node)
    try:
        args, kwargs = map_arg((node.args, node.kwargs), lambda operand: _empty(operand, sizes))
        made = type_of_value(node.target(*args, **kwargs))  # type: ignore[operator]
    except LookupError:
        return  # types that are not known cannot be checked
    except (RuntimeError, ValueError, TypeError) as error:
        raise _cannot(program, node, values, str(error).splitlines()[0]) from error
    if known is not None and made != TensorType(known.dtype, _shape(known, sizes)):
        raise _cannot(program, node, values, f"it would yield {made} and not {known}")


def _cannot(program: Program, node: fx.Node, values: Mapping[str, Any], why: str) -> QuantcError:
    listed = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return QuantcError(
        f"{node.name} cannot be called with {listed} where it stands: {why}",
        where=program.describe(node),
        advice="change the model and its weights, and capture it again",
    )


def _empty(operand: fx.Node, sizes: Mapping[str, int]) -> Tensor:
    kind = tensor_type(operand)
    if kind is None:
        raise LookupError(operand.name)
    return torch.empty(_shape(kind, sizes), dtype=kind.dtype, device="meta")


def _shape(kind: TensorType, sizes: Mapping[str, int]) -> tuple[int, ...]:
    found = [size if isinstance(size, int) else evaluate(size, sizes) for size in kind.shape]
    known = tuple(size for size in found if size is not None)
    if len(known) != len(found):
        raise LookupError(str(kind))
    return known


def give_others_a_copy(program: Program, name: str, keep: Sequence[str]) -> Program:
    """Duplicate a node for all its users except `keep`."""
    copy = _copy(program)
    node = copy.node(name)
    others = [user for user in node.users if user.name not in keep]
    if node.op != "call_function" or not others:
        raise QuantcError(
            f"{name} has no users other than {', '.join(keep)}" if not others else f"{name} is not a call of an op",
            where=copy.describe(node),
            advice="explain the node again: the program is not the one the change was found for",
        )
    second = copy.emit(node.target, node.args, dict(node.kwargs), before=node.next, like=node)
    for user in others:
        user.replace_input_with(node, second)
    copy.touch()
    return copy


def compute_in(program: Program, names: Sequence[str], dtype: str) -> Program:
    """Compute nodes in another float dtype: cast inputs from outside, and cast results back."""
    copy = _copy(program)
    nodes = dict.fromkeys(copy.node(name) for name in names)
    wanted = DTYPES[dtype]
    casts: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for operand in dict.fromkeys(node.all_input_nodes):
            if operand in nodes or not _is_other_float(operand, wanted):
                continue
            if operand not in casts:
                casts[operand] = _cast(copy, operand, wanted, before=node)
            node.replace_input_with(operand, casts[operand])
    for node in nodes:
        for output in list(outputs_of(node)):
            _cast_back(copy, output, wanted, nodes)
    copy.touch()
    return copy


def _cast_back(program: Program, output: fx.Node, wanted: torch.dtype, nodes: Mapping[fx.Node, None]) -> None:
    kind = tensor_type(output)
    if kind is None or not _is_other_float(output, wanted):
        return
    output.meta["val"] = TensorType(wanted, kind.shape)
    outside = [user for user in output.users if user not in nodes]
    if not outside:
        return
    back = _cast(program, output, kind.dtype, before=output.next)
    for user in outside:
        user.replace_input_with(output, back)


def _is_other_float(node: fx.Node, wanted: torch.dtype) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point and dtype is not wanted


def _cast(program: Program, value: fx.Node, dtype: torch.dtype, *, before: fx.Node) -> fx.Node:
    kind = tensor_type(value)
    made = None if kind is None else TensorType(dtype, kind.shape)
    return program.emit(BY_NAME["cast"].target, (value, dtype), before=before, like=value, value=made)


def make_constant(program: Program, name: str, operand: str, value: Tensor | None) -> Program:
    """Replace an operand of a node by a constant."""
    copy = _copy(program)
    node, source = copy.node(name), copy.node(operand)
    if source not in node.all_input_nodes:
        raise QuantcError(f"{name} does not read {operand}", where=copy.describe(node), advice="explain it again")
    stored = value.detach().clone() if value is not None else _evaluate(copy, source)
    constant = copy.constant(f"{source.name}_constant", stored, before=node)
    node.replace_input_with(source, constant)
    copy.touch()
    return copy


@torch.no_grad()
def _evaluate(program: Program, node: fx.Node) -> Tensor:
    """The value of a node that is computed from constants alone."""
    values: dict[fx.Node, Any] = {}
    for part in _before(node):
        if part.op == "get_attr" and (tensor := program.tensor(part)) is not None:
            values[part] = tensor
        elif part.op == "call_function":
            args, kwargs = map_arg((part.args, part.kwargs), values.__getitem__)
            values[part] = part.target(*args, **kwargs)  # type: ignore[operator]
        else:
            raise QuantcError(
                f"{node.name} depends on {part.name}, which is no constant",
                where=program.describe(part),
                advice="give the tensor to store: change.apply(program, value=tensor)",
            )
    found = values[node]
    if not isinstance(found, Tensor):
        raise QuantcError(f"{node.name} is not a tensor", where=program.describe(node), advice="store a tensor")
    return found.detach().clone()


def _before(node: fx.Node) -> Iterator[fx.Node]:
    """All that a node is computed from and the node itself, in the order of the graph."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        part = pending.pop()
        if part not in found:
            found.add(part)
            pending.extend(part.all_input_nodes)
    return iter(sorted(found))
