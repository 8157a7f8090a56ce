"""Lowering of dequantized weights to weight-only ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any, ClassVar

import torch
from torch import fx

from quantc.integer.grid import grid_of
from quantc.integer.library import OPS
from quantc.integer.semantics import load
from quantc.ir.dialect import argument, op_name
from quantc.ir.program import Program, Stage
from quantc.ir.site_index import operand_nodes, rewire
from quantc.ir.types import TensorType, tensor_type
from quantc.passes.eliminate_dead import EliminateDead
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.qdq import float_ops as float_formats
from quantc.qdq.ops import is_dequantize, is_layout
from quantc.rewrite.constant_order import forget_unread
from quantc.spec.formats import Timing


class LowerWeights(Pass):
    """Let weight-only quantized ops read their weight as stored.

    A linear layer, a matmul by a constant, `embedding` and `embedding_bag` are fused with the dequantize op of their
    weight; weights of other ops (convolutions, recurrent layers) become `stored_weight`. All of them compute the same
    bits as the Q/DQ form. Kernels implement them: `qc.lower` runs this pass, and the integer form does not.
    """

    name: ClassVar[str] = "lower-weights"
    needs: ClassVar[Stage] = Stage.FOLDED
    before: ClassVar[Stage | None] = Stage.LOWERED
    preserves: ClassVar[Preserves] = Preserves.CLOSELY

    def run(self, program: Program) -> Outcome:
        load()
        claims = program.plan.claims
        written = 0
        for node in list(program.nodes()):
            claim = claims.get(node)
            if claim is not None and claim.timing is Timing.WEIGHT_ONLY:
                written += _lower(program, node)
        if written:
            EliminateDead().run(program)
            forget_unread(program)
        return Outcome(written > 0, (f"{written} ops read weights as they are stored",) if written else ())


SCALES = (("scale", 1), ("zero_point", 2))
"""The arguments of a dequantize op that hold its qparams, with their positions."""


@dataclass(frozen=True)
class Stored:
    """A weight as stored: its constants, granularity, and the views that give it its shape."""

    w: fx.Node
    scale: fx.Node | None
    zero_point: fx.Node | None
    axis: int | None = None
    group_size: int | None = None
    shape: list[int] | None = None
    order: list[int] | None = None

    @property
    def constants(self) -> tuple[Any, ...]:
        return self.w, self.scale, self.zero_point, self.axis, self.group_size

    @property
    def layout(self) -> tuple[Any, ...]:
        return self.shape, self.order

    @property
    def is_plain(self) -> bool:
        """True if it is stored in its own shape."""
        return self.shape is None and self.order is None


def stored_weight(program: Program, value: Any, before: fx.Node) -> Stored | None:
    """The stored weight that a node dequantizes; None for any other node."""
    shape = order = None
    while isinstance(value, fx.Node) and is_layout(value):
        if value.target is torch.ops.aten.permute.default:
            order = [*value.args[1]]  # type: ignore[misc]
        else:
            shape = [*value.args[1]]  # type: ignore[misc]
        value = value.args[0]
    if not isinstance(value, fx.Node) or not is_dequantize(value):
        return None
    w = value.args[0]
    if not isinstance(w, fx.Node) or program.tensor(w) is None:
        return None
    if value.target is float_formats.DEQUANTIZE:
        scale, axis = value.args[1], value.args[2]
        return Stored(w, scale, None, _counted(axis, w), None, shape, order)  # type: ignore[arg-type]
    grid = grid_of(program, value)
    if grid is None:
        return None
    scale, zero_point = (_constant(program, w, name, value.args[index], before) for name, index in SCALES)
    offset = zero_point if bool(grid.zero_point.any()) else None
    return Stored(w, scale, offset, None if grid.group else _counted(grid.axis, w), grid.group, shape, order)


def _counted(axis: Any, w: fx.Node) -> int | None:
    """A non-negative axis."""
    return None if axis is None else axis % max(1, len(_shape(w)))


def _constant(program: Program, w: fx.Node, name: str, value: Any, before: fx.Node) -> fx.Node | None:
    """A number as a constant; existing constants are unchanged."""
    if value is None or isinstance(value, fx.Node):
        return value
    dtype = torch.float32 if isinstance(value, float) else torch.int64
    return program.constant(f"{w.target}_{name}", torch.tensor(value, dtype=dtype), before=before)


# -- ops that are written as one with their weight ---------------------------------------------------------------------


def _lower(program: Program, node: fx.Node) -> bool:
    """Write one op; whether it read a stored weight."""
    write = WRITERS.get(op_name(node))
    if write is not None and write(program, node):
        return True
    return _weights_alone(program, node)


def _weights_alone(program: Program, node: fx.Node) -> bool:
    """The weights of an op that stays as it is."""
    places: dict[int, fx.Node] = {}
    for index, value in enumerate(operand_nodes(node)):
        found = stored_weight(program, value, node)
        if found is not None:
            made = TensorType(torch.float32, _shape(value))
            arguments = (*found.constants, *found.layout)
            target = OPS["stored_weight"].target
            places[index] = program.emit(target, arguments, before=node, like=value, value=made)
    if places:
        rewire(program, node, places)
    return bool(places)


def _shape(value: fx.Node) -> tuple[Any, ...]:
    kind = tensor_type(value)
    return () if kind is None else kind.shape


def _linear(program: Program, node: fx.Node) -> bool:
    return _product(program, node, argument(node, "x"), argument(node, "w"), argument(node, "b"), transposed=False)


def _matmul(program: Program, node: fx.Node) -> bool:
    return _product(program, node, argument(node, "x"), argument(node, "y"), None, transposed=True)


def _addmm(program: Program, node: fx.Node) -> bool:
    if argument(node, "alpha") != 1 or argument(node, "beta") != 1:
        return False
    return _product(program, node, argument(node, "x"), argument(node, "y"), argument(node, "b"), transposed=True)


def _product(program: Program, node: fx.Node, x: Any, w: Any, bias: Any, *, transposed: bool) -> bool:
    found = stored_weight(program, w, node)
    if found is None or len(_shape(w)) != 2 or not _is_bias(program, bias):
        return False
    arguments = (x, *found.constants, *found.layout, bias, transposed)
    _replace(program, node, node, OPS["linear_weight_only"].target, arguments)
    return True


def _is_bias(program: Program, bias: Any) -> bool:
    """True if there is no bias, or it is a constant with one number per output."""
    if bias is None:
        return True
    tensor = program.tensor(bias) if isinstance(bias, fx.Node) else None
    return tensor is not None and tensor.dim() == 1


def _embedding(program: Program, node: fx.Node) -> bool:
    found = stored_weight(program, argument(node, "w"), node)
    if found is None or not found.is_plain:
        return False
    arguments = (*found.constants, argument(node, "indices"))
    _replace(program, node, node, OPS["embedding_weight_only"].target, arguments)
    return True


def _embedding_bag(program: Program, node: fx.Node) -> bool:
    found = stored_weight(program, argument(node, "w"), node)
    items = list(node.users)
    # the other results are the bag of each index
    if found is None or not found.is_plain or any(item.target is not getitem or item.args[1] != 0 for item in items):
        return False
    names = ("indices", "offsets", "mode", "per_sample_weights", "include_last_offset", "padding_idx")
    arguments = (*found.constants, *(argument(node, name) for name in names))
    for item in items:
        _replace(program, node, item, OPS["embedding_bag_weight_only"].target, arguments)
    return True


def _replace(program: Program, core: fx.Node, old: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
    """Write an op in place of `old`, the result of the op `core`; it takes the claim and the name of the core."""
    made = program.emit(target, arguments, before=old, like=old)
    claim = program.plan.claims.get(core)
    if claim is not None:
        program.plan.claims[made] = claim
    name = core.name
    core.name, made.name = made.name, name
    program.replace(old, made)
    program.plan.lowered[made] = name


Write = Callable[[Program, fx.Node], bool]
WRITERS: dict[str, Write] = {
    "linear": _linear,
    "matmul": _matmul,
    "addmm": _addmm,
    "embedding": _embedding,
    "embedding_bag": _embedding_bag,
}
"""By the name of the op. Each says whether it could write it."""
