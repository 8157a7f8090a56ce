"""Arguments of ops on elements and along axes, drawn from what their schemas allow."""

from __future__ import annotations

from typing import Any

import torch

from quantc.targets.onnx.write_elementwise import COMPARISONS, LOGIC, PLAIN
from tests.support.onnx_calls import Arguments, Draw, draws

POSITIVE = {"log", "sqrt", "rsqrt", "reciprocal"}
INTEGERS_TOO = {"abs", "neg", "aten.sign.default"}
BOUNDED = {"exp", "mish", "selu"}
BOOLS = {"aten.logical_not.default", "aten.bitwise_not.default"}


def _one(name: str, draw: Draw) -> Arguments:
    shape = draw.shape(empty=True)
    if name in BOOLS:
        return (draw.bools(shape),), {}
    if name in INTEGERS_TOO and draw.chance(0.3):
        return (draw.ints(shape),), {}
    return (draw.floats(shape, positive=name in POSITIVE),), {}


for name in [each for names in PLAIN.values() for each in names]:
    draws(name)(lambda draw, name=name: _one(name, draw))  # type: ignore[misc]
for name in ("relu", "hardsigmoid", "silu", "aten.log_sigmoid.default"):
    draws(name)(lambda draw: ((draw.floats(draw.shape(empty=True)),), {}))
draws("rsqrt")(lambda draw: ((draw.floats(draw.shape(empty=True), positive=True),), {}))


@draws("add", "sub")
def added(draw: Draw) -> Arguments:
    shape = draw.shape(empty=True)
    x, y = draw.numbers(shape, infinite=True), draw.numbers(draw.broadcast(shape))
    alpha = draw.pick(1, 1, 2, -3) if not (x.is_floating_point() or y.is_floating_point()) else draw.pick(1, 0.5, -2)
    return (x, y), {"alpha": alpha}


@draws("rsub")
def reversed_sub(draw: Draw) -> Arguments:
    x = draw.numbers(draw.shape())
    is_float = x.is_floating_point()
    return (x, draw.pick(2.5, -1.0) if is_float else 3, draw.pick(1, 0.5) if is_float else draw.pick(1, 2)), {}


@draws("mul", "maximum", "minimum", "aten.max.other", "aten.min.other")
def two(draw: Draw) -> Arguments:
    shape = draw.shape(empty=True)
    return (draw.numbers(shape, infinite=True), draw.numbers(draw.broadcast(shape))), {}


@draws("div")
def divided(draw: Draw) -> Arguments:
    shape = draw.shape(empty=True)
    y = draw.pick(draw.floats, draw.floats, draw.ints)(draw.broadcast(shape))
    return (draw.numbers(shape), torch.where(y == 0, torch.ones_like(y), y)), {}


def _multiples(draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Dividends that are exact, or nearly exact, multiples of their divisors."""
    shape = draw.shape(1)
    kind = draw.pick("float", "float", "int64", "int32")
    counts = draw.ints(shape, -20, 20)
    if kind != "float":
        divisor = draw.ints(draw.broadcast(shape), 1, 5) * draw.pick(1, -1)
        return counts.to(getattr(torch, kind)), divisor.to(getattr(torch, kind))
    divisor = torch.tensor(draw.pick(0.1, 0.3, -0.7, 1.0, 2.0, 1e-3, 3e4)).expand(draw.broadcast(shape)).clone()
    return counts * divisor if draw.chance(0.7) else draw.floats(shape), divisor


@draws("aten.div.Tensor_mode")
def divided_rounding(draw: Draw) -> Arguments:
    return _multiples(draw), {"rounding_mode": draw.pick(None, "floor", "trunc")}


@draws("aten.floor_divide.default", "aten.remainder.Tensor")
def floor_divided(draw: Draw) -> Arguments:
    return _multiples(draw), {}


@draws("aten.remainder.Scalar")
def remainder(draw: Draw) -> Arguments:
    x = draw.numbers(draw.shape())
    return (x, draw.pick(2, -3, 5) if not x.is_floating_point() else draw.pick(0.3, -2.0, 5)), {}


@draws("pow")
def power(draw: Draw) -> Arguments:
    shape = draw.shape()
    if draw.chance(0.2):
        return (draw.ints(shape, -5, 5), draw.pick(0, 1, 2, 3)), {}
    exponent = draw.pick(2, 3, 0, 1, -1, 0.5, -0.5, 1.7, 2.0)
    return (draw.floats(shape, positive=exponent not in (0, 1, 2, 3)), exponent), {}


@draws("aten.pow.Tensor_Tensor")
def powers(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.floats(shape, positive=True).clamp(max=9), draw.floats(draw.broadcast(shape)).clamp(-3, 3)), {}


@draws("aten.pow.Scalar")
def power_of(draw: Draw) -> Arguments:
    return (draw.pick(2, 0.5, 1.5, 1), draw.floats(draw.shape()).clamp(-9, 9)), {}


for short in (*COMPARISONS, "ne"):

    @draws(f"aten.{short}.Tensor")
    def compared(draw: Draw) -> Arguments:
        shape = draw.shape(empty=True)
        x, y = draw.numbers(shape, infinite=True), draw.numbers(draw.broadcast(shape))
        return (x, y.to(x.dtype).expand(shape).clone() if draw.chance(0.2) else y), {}

    @draws(f"aten.{short}.Scalar")
    def compared_to(draw: Draw) -> Arguments:
        x = draw.numbers(draw.shape(empty=True), infinite=True)
        return (draw.bools(x.shape) if draw.chance(0.1) else x, draw.pick(0, 1, 0.5, -1.5, 2.5, 3)), {}


for short in LOGIC:

    @draws(f"aten.{short}.default")
    def logical(draw: Draw) -> Arguments:
        shape = draw.shape()
        kinds = (draw.bools, draw.bools, lambda shape: draw.ints(shape, 0, 1), draw.floats)
        return (draw.pick(*kinds)(shape), draw.pick(*kinds)(draw.broadcast(shape))), {}


@draws("aten.bitwise_and.Tensor", "aten.bitwise_or.Tensor")
def bitwise(draw: Draw) -> Arguments:
    shape = draw.shape()
    kind = draw.ints if draw.chance(0.2) else draw.bools
    return (kind(shape), kind(draw.broadcast(shape))), {}


@draws("where")
def where(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (
        draw.bools(draw.broadcast(shape)),
        draw.numbers(shape, infinite=True),
        draw.numbers(draw.broadcast(shape)),
    ), {}


@draws("aten.where.Scalar")
def where_numbers(draw: Draw) -> Arguments:
    return (draw.bools(draw.shape()), draw.pick(1, 2.5), draw.pick(0, -1.5, torch.inf)), {}


@draws("aten.where.ScalarOther")
def where_other(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.bools(draw.broadcast(shape)), draw.numbers(shape), draw.pick(0, 2, -1.5)), {}


@draws("aten.where.ScalarSelf")
def where_self(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.bools(draw.broadcast(shape)), draw.pick(0, 2, -1.5), draw.numbers(shape)), {}


@draws("masked_fill")
def masked_fill(draw: Draw) -> Arguments:
    shape = draw.shape()
    x = draw.numbers(shape)
    return (x, draw.bools(draw.broadcast(shape)), draw.pick(0, 7, -torch.inf) if x.is_floating_point() else 3), {}


@draws("aten.masked_fill.Tensor")
def masked_fill_tensor(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.floats(shape), draw.bools(draw.broadcast(shape)), draw.floats([])), {}


DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8, torch.int8, torch.float16)


@draws("cast")
def cast(draw: Draw) -> Arguments:
    shape, dtype = draw.shape(empty=True), draw.pick(*DTYPES)
    x = draw.pick(draw.floats, draw.ints, draw.bools)(shape)
    return (x.abs() if dtype is torch.uint8 and x.dtype is not torch.bool else x, dtype), {}


@draws("aten._to_copy.default")
def to_copy(draw: Draw) -> Arguments:
    (x, dtype), _ = cast(draw)
    return (x,), {"dtype": draw.pick(dtype, None)}


@draws("aten.type_as.default")
def type_as(draw: Draw) -> Arguments:
    (x, dtype), _ = cast(draw)
    return (x, torch.zeros(draw.shape(), dtype=dtype)), {}


@draws("clamp")
def clamp(draw: Draw) -> Arguments:
    x = draw.numbers(draw.shape(empty=True), infinite=True)
    ends = draw.pick((None, 1), (-1, None), (-1, 1), (2, -2), (0, 6), (-torch.inf, 0.5), (-0.5, 2.5))
    if not x.is_floating_point() and draw.chance(0.7):
        ends = draw.pick((None, 1), (-1, None), (-1, 1), (2, -2))
    return (x, *ends), {}


@draws("gelu")
def gelu(draw: Draw) -> Arguments:
    return (draw.floats(draw.shape(empty=True)),), {"approximate": draw.pick("none", "tanh")}


@draws("leaky_relu", "celu")
def slope(draw: Draw) -> Arguments:
    return (draw.floats(draw.shape(empty=True)), draw.pick(0.01, 0.2, 1.0, 1.7, 2)), {}


@draws("elu")
def elu(draw: Draw) -> Arguments:
    return (draw.floats(draw.shape()), draw.pick(1, 0.3, 2.0), draw.pick(1, 1, 1.5), draw.pick(1, 1, 0.5)), {}


@draws("prelu")
def prelu(draw: Draw) -> Arguments:
    shape = draw.shape(0)
    channels = 1 if len(shape) < 2 or draw.chance(0.3) else shape[1]
    return (draw.floats(shape), draw.floats([channels])), {}


@draws("softplus")
def softplus(draw: Draw) -> Arguments:
    return (draw.floats(draw.shape()), draw.pick(1, 2, 0.5, 1.0), draw.pick(20, 1, 0.5, 3.0, 100)), {}


@draws("softshrink")
def softshrink(draw: Draw) -> Arguments:
    return (draw.floats(draw.shape(empty=True)), draw.pick(0, 0.5, 0.3, 2)), {}


@draws("glu")
def glu(draw: Draw) -> Arguments:
    shape = draw.shape(1)
    axis = draw.axis(len(shape))
    shape[axis] = 2 * draw.size(1, 3)
    return (draw.floats(shape), axis), {}


@draws("softmax", "log_softmax", "aten._safe_softmax.default")
def softmax(draw: Draw) -> Arguments:
    shape = draw.shape(empty=True)
    return (draw.floats(shape, infinite=draw.chance(0.2)), draw.axis(len(shape)), *draw.pick((), (torch.float32,))), {}


@draws("aten.threshold.default")
def threshold(draw: Draw) -> Arguments:
    return (draw.floats(draw.shape()), draw.pick(0, 0.5, -1), draw.pick(0, 3.0, -2)), {}


@draws("aten.addcmul.default", "aten.addcdiv.default")
def addcmul(draw: Draw) -> Arguments:
    shape = draw.shape()
    right = draw.floats(draw.broadcast(shape), positive=True)
    return (draw.floats(shape), draw.floats(draw.broadcast(shape)), right), {"value": draw.pick(1, 0.5, -2)}


@draws("aten.lerp.Scalar")
def lerp(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.floats(shape), draw.floats(shape), draw.pick(0.0, 0.3, 0.5, 1.0, 2.0)), {}


@draws("aten.lerp.Tensor")
def lerp_tensor(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.floats(shape), draw.floats(shape), draw.floats(draw.broadcast(shape))), {}


# -- along axes ----------------------------------------------------------------------------------------------------


def _dims(draw: Draw, rank: int) -> Any:
    return draw.pick(draw.axes(rank), draw.axes(rank), [], draw.axis(rank))


@draws("mean", "sum")
def reduced(draw: Draw) -> Arguments:
    shape = draw.shape(0, 5)
    x = draw.floats(shape) if draw.chance(0.8) else draw.ints(shape)
    kwargs = {} if x.is_floating_point() else {"dtype": torch.float32}
    return (x, draw.pick(_dims(draw, len(shape)), None), draw.chance()), kwargs


@draws("amax", "amin", "aten.amax.default")
def reduced_extreme(draw: Draw) -> Arguments:
    shape = draw.shape(0, 5)
    return (draw.numbers(shape), _dims(draw, len(shape)), draw.chance()), {}


@draws("aten.sum.default", "aten.mean.default", "aten.prod.default", "aten.max.default", "aten.min.default")
def whole(draw: Draw) -> Arguments:
    return (draw.floats(draw.shape()).clamp(-3, 3),), {}


@draws("aten.sum.default")
def whole_sum(draw: Draw) -> Arguments:
    return (draw.numbers(draw.shape()),), draw.pick({}, {"dtype": torch.float32})


@draws("aten.any.default")
def any_whole(draw: Draw) -> Arguments:
    return (draw.pick(draw.bools, draw.ints, draw.floats)(draw.shape()),), {}


@draws("aten.any.dim")
def any_dim(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.pick(draw.bools, draw.ints)(shape), draw.axis(len(shape)), draw.chance()), {}


@draws("aten.any.dims")
def any_dims(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.bools(shape), draw.pick(draw.axes(len(shape)), None), draw.chance()), {}


@draws("max", "min")
def extreme(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.numbers(shape), draw.axis(len(shape)), draw.chance()), {}


@draws("aten.argmax.default", "aten.argmin.default")
def place(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.numbers(shape), draw.pick(draw.axis(len(shape)), None), draw.chance()), {}


def _distinct(draw: Draw, shape: list[int]) -> torch.Tensor:
    """Numbers none of which comes twice: which of equals is first is left open by torch."""
    count = 1
    for size in shape:
        count *= size
    order = list(range(count))
    draw.rng.shuffle(order)
    x = torch.tensor(order, dtype=torch.int64).reshape(shape) - count // 2
    return x if draw.chance(0.2) else x.float() * draw.pick(0.5, 1.0, 3.0)


@draws("topk")
def topk(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    axis = draw.axis(len(shape))
    return (_distinct(draw, shape), draw.size(1, shape[axis]), axis, draw.chance(), True), {}


@draws("aten.sort.default", "aten.argsort.default")
def sort(draw: Draw) -> Arguments:
    shape = draw.shape(0, 3)
    return (_distinct(draw, shape), draw.axis(len(shape)), draw.chance()), {}


@draws("aten.cumsum.default")
def cumsum(draw: Draw) -> Arguments:
    shape = draw.shape()
    x = draw.pick(draw.floats, draw.floats, draw.ints, draw.bools)(shape)
    return (x, draw.axis(len(shape))), draw.pick({}, {"dtype": torch.float32})


@draws("aten.prod.dim_int")
def prod(draw: Draw) -> Arguments:
    shape = draw.shape()
    x = draw.pick(draw.floats, draw.ints)(shape).clamp(-3, 3)
    return (x, draw.axis(len(shape)), draw.chance()), {}


@draws("aten.logsumexp.default")
def logsumexp(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.floats(shape, infinite=True), draw.axes(len(shape)), draw.chance()), {}


@draws("aten.std.correction", "aten.var.correction")
def variance(draw: Draw) -> Arguments:
    shape = draw.shape(1)
    dims = draw.pick(draw.axes(len(shape)), None)
    return (draw.floats(shape), dims), {"correction": draw.pick(None, 0, 1, 0.5, 2), "keepdim": draw.chance()}


@draws("aten.linalg_vector_norm.default")
def vector_norm(draw: Draw) -> Arguments:
    shape = draw.shape()
    order = draw.pick(1, 2, 2.0, torch.inf, -torch.inf, 0, 3, 0.5)
    return (draw.floats(shape), order, draw.pick(draw.axes(len(shape)), None), draw.chance()), {}


@draws("aten.cosine_similarity.default")
def cosine_similarity(draw: Draw) -> Arguments:
    shape = draw.shape(1)
    y = draw.broadcast(shape) if draw.chance(0.3) else shape
    return (draw.floats(shape), draw.floats(y), draw.axis(len(shape)), draw.pick(1e-8, 1e-3, 2.0)), {}
