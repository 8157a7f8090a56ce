"""Higher-order ops as plain Python during training.

torch differentiates a `cond` or `while_loop` by its operands, with graphs traced beforehand: neither the parameters nor
the fake quantizers inside would take part. Run as Python, a branch is a module like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from quantc.ir.dialect import target_name
from quantc.ir.program import Program
from quantc.ir.subgraphs import form_of

Graph = Callable[..., Any]


def run_cond(pred: Any, on_true: Graph, on_false: Graph, operands: Sequence[Any] = ()) -> Any:
    return (on_true if bool(pred) else on_false)(*operands)


def run_while(keeps_on: Graph, body: Graph, carried: Sequence[Any], read: Sequence[Any] = ()) -> Any:
    values = tuple(carried)
    while bool(_first(keeps_on(*values, *read))):
        values = tuple(body(*values, *read))
    return values


def run_map(body: Graph, taken_apart: Sequence[Tensor], read: Sequence[Any] = ()) -> Any:
    steps = [body(*(tensor[index] for tensor in taken_apart), *read) for index in range(len(taken_apart[0]))]
    return tuple(torch.stack(parts) for parts in zip(*steps, strict=True))


def run_scan(body: Graph, init: Sequence[Any], taken_apart: Sequence[Tensor], read: Sequence[Any] = ()) -> Any:
    carried, outputs = tuple(init), []
    for index in range(len(taken_apart[0])):
        found = tuple(body(*carried, *(tensor[index] for tensor in taken_apart), *read))
        carried = found[: len(init)]
        outputs.append(found[len(init) :])
    return (*carried, *(torch.stack(parts) for parts in zip(*outputs, strict=True)))


def run_with_grad(enabled: bool, body: Graph, *operands: Any) -> Any:
    with torch.set_grad_enabled(enabled):
        return body(*operands)


def run_with_autocast(
    device: str, dtype: torch.dtype | None, enabled: bool, cache: bool | None, body: Graph, *operands: Any
) -> Any:
    with torch.autocast(device, dtype, enabled, cache):
        return body(*operands)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) else value


AS_PYTHON: dict[str, Callable[..., Any]] = {
    "cond": run_cond,
    "while_loop": run_while,
    "map_impl": run_map,
    "scan": run_scan,
    "wrap_with_set_grad_enabled": run_with_grad,
    "wrap_with_autocast": run_with_autocast,
}
"""By the name of the op."""


def write_as_python(program: Program) -> None:
    """Replace the higher-order ops of a program by Python functions."""
    for node in list(program.nodes()):
        if form_of(node) is not None:
            node.target = AS_PYTHON[_name(node)]
            program.touch()


def write_as_ops(program: Program) -> None:
    """Restore the higher-order ops."""
    ops: dict[Any, Any] = {function: getattr(torch.ops.higher_order, name) for name, function in AS_PYTHON.items()}
    for node in list(program.nodes()):
        if node.op == "call_function" and node.target in ops:
            node.target = ops[node.target]
            program.touch()


def _name(node: fx.Node) -> str:
    return target_name(node.target).removeprefix("higher_order.")
