"""Biases on the accumulator's grid."""

from __future__ import annotations

import torch
from torch import fx

from quantc.integer.grid import grid_of
from quantc.integer.match_lowering import Task
from quantc.ir.dialect import WEIGHTED, argument, is_op
from quantc.ir.program import Program
from quantc.rewrite.constant_order import forget_unread


@torch.no_grad()
def snap_biases(program: Program) -> int:
    """Round each constant bias of a quantized conv or matmul to a multiple of `sx * sw`; number of changed biases."""
    changed = 0
    for node in list(program.nodes()):
        if not is_op(node, *WEIGHTED):
            continue
        bias, scale = argument(node, "b"), _accumulator_scale(program, node)
        value = program.tensor(bias) if isinstance(bias, fx.Node) else None
        if value is None or scale is None:
            continue
        rounded = round_bias(value, scale)
        if torch.equal(rounded, value):
            continue
        node.replace_input_with(bias, program.constant(f"{bias.target}_snapped", rounded, before=node))
        changed += 1
    if changed:
        forget_unread(program)
    return changed


def round_bias(bias: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A bias rounded to multiples of the accumulator's scale, which is float64."""
    return (torch.round(bias.double() / scale) * scale).to(bias.dtype)


def _accumulator_scale(program: Program, node: fx.Node) -> torch.Tensor | None:
    """The scale of a product's accumulator, one for all channels or one each; None if it has none."""
    factors = [argument(node, name) for name in ("x", "w")]
    x, w = (grid_of(program, factor) if isinstance(factor, fx.Node) else None for factor in factors)
    if x is None or w is None or not x.is_whole or w.group is not None:
        return None
    return x.scale * w.scale


def stored_bias(task: Task, node: fx.Node, scale: torch.Tensor) -> torch.Tensor | None:
    """Integers of a bias that is already stored on the accumulator's grid, as by rules that quantize it.

    `scale` is the accumulator's, in float64; the stored one is the nearest float32.
    """
    found = task.maybe_quantized(node)
    levels = None if found is None else task.constant(found.node)
    if found is None or levels is None or levels.dtype != torch.int32 or bool(found.grid.zero_point.any()):
        return None
    is_same = torch.equal(found.grid.scale.expand(levels.shape), scale.float().double().expand(levels.shape))
    return levels if is_same else None
