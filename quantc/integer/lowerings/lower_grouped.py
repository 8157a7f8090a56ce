"""Integer op and lowering of linear layers with group-wise weight scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from quantc.integer.epilogue import OutputGrid, end, reach
from quantc.integer.fixed_point import common_shift
from quantc.integer.grid import Grid
from quantc.integer.library import OPS, OUT, integer_op
from quantc.integer.match_lowering import NotIntegerError, Quantized, Task
from quantc.spec.arithmetic import MultiplierForm
from quantc.spec.aten_arithmetic import aten, center, round_to_grid

GROUPED = (
    "acc_g = Σ (xq − xz)(wq − wz_g) in int32 over the input channels of group g; "
    "out = clamp(round(Σ_g acc_g · M_g + b / so) + zo), added in float64 in ascending order of g, the bias last; "
    "M_g = sx·sw_g / so. Float output: f32(Σ_g acc_g · (sx·sw_g) + b)"
)
EIGHT_BITS = (torch.int8, torch.uint8)
FLOAT32_GROUP = 256
"""In groups up to this size sums of products of 9-bit integers stay below 2^24, where float32 is exact."""


def _linear_grouped_fast(
    x: Tensor, x_zero_point: int, w: Tensor, w_zero_point: Tensor | None, group_size: int, *rest: Any
) -> Tensor:
    """`linear_grouped` with its sums of integers in floating point, where they are exact, too."""
    small = group_size <= FLOAT32_GROUP and x.dtype in EIGHT_BITS and w.dtype in EIGHT_BITS
    wide = torch.float32 if small else torch.float64
    xs = (x.to(wide) - x_zero_point).reshape(-1, w.shape[1] // group_size, group_size).transpose(0, 1)
    ws = w.to(wide).reshape(w.shape[0], -1, group_size)
    if w_zero_point is not None:
        ws = ws - w_zero_point.unsqueeze(-1).to(wide)
    # adding zero makes -0.0, which integers do not have, 0.0
    return _sum_groups(torch.bmm(xs, ws.permute(1, 2, 0)).add_(0.0), [*x.shape[:-1], w.shape[0]], *rest)


@integer_op(
    "linear_grouped(Tensor x, int x_zero_point, Tensor w, Tensor? w_zero_point, int group_size, Tensor? offset, "
    f"{OUT}) -> Tensor",
    formula=GROUPED,
    kernel=_linear_grouped_fast,
)
def linear_grouped(
    x: Tensor, x_zero_point: int, w: Tensor, w_zero_point: Tensor | None, group_size: int, *rest: Any
) -> Tensor:
    """Linear layer with one multiplier per weight row and group.

    The offset is the bias in steps of the result, as float64; with `shift` an int64 in the same fractions of a step as
    the multipliers, which are mantissas then.
    """
    groups = w.shape[1] // group_size
    xs = aten.reshape.default(center(x, x_zero_point), [-1, groups, group_size])
    ws = aten.reshape.default(w, [w.shape[0], groups, group_size])
    ws = center(ws, 0 if w_zero_point is None else aten.unsqueeze.default(w_zero_point, -1))
    products = aten.bmm.default(aten.transpose.int(xs, 0, 1), aten.permute.default(ws, [1, 2, 0]))
    return _sum_groups(products, [*x.shape[:-1], w.shape[0]], *rest)


def _sum_groups(
    products: Tensor, shape: list[int], offset: Tensor | None, multiplier: Tensor, shift: Tensor | None, *grid: Any
) -> Tensor:
    """The products of the groups, `[group, row of x, row of w]`, added one by one: a sum of floats has an order."""
    wide = torch.float64 if shift is None else torch.int64
    factors = aten.to.dtype(multiplier, wide)
    parts = [
        aten.mul.Tensor(aten.to.dtype(aten.select.int(products, 0, group), wide), aten.select.int(factors, 1, group))
        for group in range(multiplier.shape[1])
    ]
    total = parts[0]
    for part in parts[1:]:
        total = aten.add.Tensor(total, part)
    if offset is not None:
        total = aten.add.Tensor(total, offset)
    return round_to_grid(aten.reshape.default(total, shape), shift, *grid)


# -- how it is written -------------------------------------------------------------------------------------------------


def write_linear_grouped(task: Task, w: Quantized) -> None:
    """Lower a linear layer with a group-wise quantized weight."""
    x = task.whole(task.argument("x"))
    bias, scales = _bias(task), x.grid.scale * w.grid.scale
    largest = reach(x.grid) * _mass(task, w)
    bits = task.arithmetic.sum_bits
    if largest > 2 ** (bits - 1):
        raise NotIntegerError(f"the sum of a group could be {largest}, more than {bits} bits hold")
    zeros = w.grid.zero_point if bool(w.grid.zero_point.any()) else None

    def head() -> tuple[Any, ...]:
        return x.node, x.grid.one_zero_point, w.node, _keep(task, "weight_zero_point", zeros), w.grid.group

    def make(place: OutputGrid | None) -> tuple[Any, ...]:
        if place is None:
            return (*head(), _keep(task, "bias", bias), *task.to_float(scales))
        grid = place.grid
        task.check_shifts(scales / grid.scale)
        factors, offset, shift = _numbers(task.arithmetic.multiplier, scales / grid.scale, bias, grid, largest)
        numbers = (_keep(task, "bias", offset), task.keep("multiplier", factors), _keep(task, "shift", shift))
        return (*head(), *numbers, grid.one_zero_point, *place.bounds.on(grid), grid.dtype, *task.arithmetic.ending)

    end(task, OPS["linear_grouped"].target, make)


def _keep(task: Task, hint: str, value: Tensor | None) -> fx.Node | None:
    return None if value is None else task.keep(hint, value)


def _numbers(
    form: MultiplierForm, factors: Tensor, bias: Tensor | None, grid: Grid, largest: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Multipliers, offset and shift that requantize the sums of the groups, each at most `largest`."""
    offset = None if bias is None else bias / grid.scale
    if form == "float64":
        return factors, offset, None
    found = common_shift(list(factors.unbind(1)), [largest] * factors.shape[1], offset)
    if found is None:
        raise NotIntegerError("the multipliers of its groups and its bias fit no common shift")
    mantissas, constant, shift = found
    return torch.stack(mantissas, dim=1), constant, shift


def _mass(task: Task, w: Quantized) -> int:
    """The largest sum of |wq − wz| over a group."""
    levels = task.constant(w.node)
    if levels is None:
        raise NotIntegerError(f"the weight {w.node.name} is not a constant")
    by_group = levels.to(torch.int64).reshape(*w.grid.scale.shape, -1) - w.grid.zero_point.unsqueeze(-1)
    return int(by_group.abs().sum(dim=-1).max())


def _bias(task: Task) -> Tensor | None:
    node = task.argument("b")
    if node is None:
        return None
    bias = task.constant(node)
    if bias is None:
        name = node.name if isinstance(node, fx.Node) else repr(node)
        raise NotIntegerError(f"the bias {name} is not a constant")
    return bias.detach().double()
