"""The state of a quantized model beside its tensors: the scales and zero points that stand in its graph as numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from quantc.errors import LoadError
from quantc.ir.program import Program

NOT_COUNTED = "aten."
"""Ops whose numbers are sizes and axes: what they compute is part of the model, not of its state."""
OF_THE_MODEL = frozenset(
    (
        *("axis", "dim", "dims", "length", "mode", "num_layers", "padding_idx", "shape"),
        *("kernel", "stride", "padding", "output_padding", "dilation", "groups"),
    )
)
"""Sizes and axes among the operands of all other ops."""


Grid = tuple[float, int, torch.dtype]
"""Scale, zero point and quantized dtype."""


def numbers_of(program: Program, outputs: Mapping[int, Grid]) -> Tensor:
    """Every call of a program with its operands, and the grids of its outputs, as bytes: a state dict holds tensors."""
    grids = [[index, scale, zero_point, str(dtype)] for index, (scale, zero_point, dtype) in outputs.items()]
    text = json.dumps({"calls": [_row(node) for node in program.nodes()], "outputs": grids})
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def put_numbers(program: Program, state: Tensor) -> dict[int, Grid]:
    """Give a program the numbers of another that differs from it in these and in tensors alone. Gives the grids of its
    outputs."""
    try:
        read = json.loads(bytes(state.tolist()))
        rows, grids = read["calls"], read["outputs"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _other(program, "its _extra_state cannot be read") from error
    nodes = list(program.nodes())
    if len(rows) != len(nodes):
        raise _other(program, f"it has {len(rows)} calls, and this has {len(nodes)}")
    for node, row in zip(nodes, rows, strict=True):
        fixed = _of_the_model(node)
        if _structure(_row(node), fixed) != _structure(row, fixed):
            raise _other(program, f"its {row[0]} is {row[1]} on other operands than {node.name} here")
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        known = [new if _is_number(old) else old for old, new in zip(leaves, row[2], strict=True)]
        node.args, node.kwargs = pytree.tree_unflatten(known, spec)
    program.touch()
    return {index: (scale, zero, getattr(torch, dtype.removeprefix("torch."))) for index, scale, zero, dtype in grids}


def _other(program: Program, why: str) -> LoadError:
    return LoadError(
        f"this is the state of another model than {program.name}: {why}",
        where="load_state_dict",
        advice="prepare and convert the same model in the same way first, then load the state",
    )


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def _row(node: fx.Node) -> list[Any]:
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return [node.name, str(node.target), [leaf if _is_number(leaf) else str(leaf) for leaf in leaves]]


def _of_the_model(node: fx.Node) -> frozenset[int]:
    """The places among the operands of a call whose numbers belong to the model."""
    names: list[str] = []
    schema = getattr(node.target, "_schema", None)
    given = zip((argument.name for argument in schema.arguments), node.args, strict=False) if schema is not None else ()
    for name, value in (*given, *node.kwargs.items()):
        names += [name] * len(pytree.tree_leaves(value))
    is_all = str(node.target).startswith(NOT_COUNTED)
    return frozenset(place for place, name in enumerate(names) if is_all or name in OF_THE_MODEL)


def _structure(row: list[Any], fixed: frozenset[int]) -> list[Any]:
    """A row without the numbers that belong to the state."""
    name, target, leaves = row
    return [
        name,
        target,
        [type(leaf).__name__ if _is_number(leaf) and place not in fixed else leaf for place, leaf in enumerate(leaves)],
    ]
