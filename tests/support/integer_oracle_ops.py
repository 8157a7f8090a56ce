"""What each op of the dialect computes on integers, for the oracle: one function for each family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from quantc.ir.dialect import argument, op_name
from quantc.ir.program import Program
from tests.support import integer_oracle_functions as functions
from tests.support import integer_oracle_sums as sums
from tests.support.integer_oracle_sums import Ints, Reals, spread
from tests.support.integer_oracle_values import Average, Clamped, Exact, Function, Joined, NotExactError, Scaled, Terms


@dataclass(frozen=True, eq=False)
class Call:
    """One node of a match, and the values it reads."""

    program: Program
    node: fx.Node
    values: Mapping[fx.Node, Any]

    def at(self, name: str) -> Any:
        """An argument by its name in the dialect."""
        return map_arg(argument(self.node, name), self.values.__getitem__)

    def exact(self, name: str) -> Exact:
        found = self.at(name)
        if not isinstance(found, Exact):
            raise NotExactError(f"{name} of {self.node.name} does not come quantized")
        return found

    def term(self, name: str) -> tuple[Ints, Reals]:
        """An operand that is integers times one scale."""
        found = self.at(name)
        if not isinstance(found, Terms) or len(found.parts) != 1:
            raise NotExactError(f"{name} of {self.node.name} is not integers times one scale")
        return found.parts[0]

    def constant(self, name: str) -> Reals | None:
        """A constant in float64; None if it is absent."""
        value = argument(self.node, name)
        if value is None:
            return None
        tensor = self.program.tensor(value)
        if tensor is None:
            raise NotExactError(f"{name} of {self.node.name} is not a constant")
        return tensor.detach().double().numpy()


Compute = Callable[[Call], Any]
OPS: dict[str, Compute] = {}


def computes(*ops: str) -> Callable[[Compute], Compute]:
    def add(function: Compute) -> Compute:
        OPS.update(dict.fromkeys(ops, function))
        return function

    return add


def compute(call: Call) -> Any:
    """The exact value of a node. NotExactError if the oracle knows none."""
    name = op_name(call.node)
    if name not in OPS:
        raise NotExactError(f"the oracle does not know {name}")
    return OPS[name](call)


def _one(ints: Ints, scale: Any) -> Terms:
    return Terms(((ints, np.asarray(scale, dtype=np.float64)),))


# -- products ----------------------------------------------------------------------------------------------------


def _with_bias(call: Call, acc: Ints, scale: Reals, channel_axis: int) -> Terms:
    """A bias is rounded to the scale of the accumulator, and added to it. One that is stored so is added as it is."""
    if call.at("b") is None:
        return _one(acc, scale)
    shape = [-1 if axis == channel_axis % acc.ndim else 1 for axis in range(acc.ndim)]
    if isinstance(call.at("b"), Terms):
        return _one(acc + call.term("b")[0].reshape(shape), scale)
    bias = call.constant("b")
    assert bias is not None
    return _one(acc + np.rint(bias.reshape(shape) / scale).astype(np.int64), scale)


@computes("linear")
def _linear(call: Call) -> Terms:
    (x, x_scale), (w, w_scale) = call.term("x"), call.term("w")
    return _with_bias(call, np.matmul(x, w.T), x_scale * (w_scale.reshape(-1) if w_scale.ndim else w_scale), -1)


@computes("conv1d", "conv2d", "conv3d")
def _conv(call: Call) -> Terms:
    (x, x_scale), (w, w_scale) = call.term("x"), call.term("w")
    rank = w.ndim - 2
    stride, padding, dilation = (spread(call.at(name), rank) for name in ("stride", "padding", "dilation"))
    acc = sums.convolve(x, w, stride, padding, dilation, call.at("groups"))
    return _with_bias(call, acc, x_scale * _by_channel(w_scale, rank), 1)


@computes("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(call: Call) -> Terms:
    (x, x_scale), (w, w_scale) = call.term("x"), call.term("w")
    rank = w.ndim - 2
    stride, padding, more, dilation = (
        spread(call.at(name), rank) for name in ("stride", "padding", "output_padding", "dilation")
    )
    acc = sums.convolve_transposed(x, w, stride, padding, more, dilation, call.at("groups"))
    return _with_bias(call, acc, x_scale * _by_channel(w_scale, rank), 1)


def _by_channel(scale: Reals, rank: int) -> Reals:
    return scale.reshape(-1, *[1] * rank) if scale.ndim else scale


@computes("matmul")
def _matmul(call: Call) -> Terms:
    (x, x_scale), (y, y_scale) = call.term("x"), call.term("y")
    return _one(np.matmul(x, y), x_scale * (y_scale.reshape(-1) if y_scale.ndim else y_scale))


@computes("addmm", "baddbmm")
def _addmm(call: Call) -> Any:
    """A constant vector is a bias. Anything else is float, and is added in float to the product as float32."""
    (x, x_scale), (y, y_scale) = call.term("x"), call.term("y")
    scale = float(call.at("alpha")) * x_scale * (y_scale.reshape(-1) if y_scale.ndim else y_scale)
    acc, beta, addend = np.matmul(x, y), float(call.at("beta")), call.at("b")
    if call.program.tensor(call.node.all_input_nodes[0]) is None or any(size != 1 for size in addend.shape[:-1]):
        return _one(acc, scale).single() + (addend if beta == 1 else addend * beta)
    bias = addend.detach().double().numpy() * beta
    return _one(acc + np.rint(bias / scale).astype(np.int64), scale)


@computes("embedding")
def _embedding(call: Call) -> Terms:
    w, scale = call.term("w")
    indices = call.at("indices").numpy()
    return _one(w[indices], scale[indices] if scale.ndim else scale)


# -- sums and products of elements -------------------------------------------------------------------------------


@computes("add")
def _add(call: Call) -> Terms:
    return _sum(call.at("x"), call.at("y"), 1)


@computes("sub")
def _sub(call: Call) -> Terms:
    return _sum(call.at("x"), call.at("y"), -1)


@computes("rsub")
def _rsub(call: Call) -> Terms:
    return _sum(call.at("y"), call.at("x"), -1)


def _sum(first: Any, second: Any, sign: int) -> Terms:
    one, other = _terms(first), _terms(second)
    return Terms((*one.parts, *other.scaled(sign).parts))


def _terms(value: Any) -> Terms:
    """A number is one step of its own size."""
    if isinstance(value, int | float):
        return _one(np.asarray(1), float(value))
    if not isinstance(value, Terms):
        raise NotExactError("a summand is not integers times a scale")
    return value


@computes("mul")
def _mul(call: Call) -> Terms:
    x, x_scale = call.term("x")
    number = call.at("y")
    if isinstance(number, int | float):
        return _one(x, x_scale * float(number))
    y, y_scale = call.term("y")
    return _one(x * y, x_scale * y_scale)


@computes("div")
def _div(call: Call) -> Terms:
    x, x_scale = call.term("x")
    number = call.at("y")
    if not isinstance(number, int | float):
        raise NotExactError(f"{call.node.name} does not divide by a number")
    return _one(x, x_scale / float(number))


# -- reductions --------------------------------------------------------------------------------------------------


def _axes(call: Call, rank: int) -> tuple[int, ...]:
    dims = call.at("dim")
    listed = [dims] if isinstance(dims, int) else list(dims or range(rank))
    return tuple(dim % rank for dim in listed)


@computes("sum")
def _total(call: Call) -> Terms:
    x, scale = call.term("x")
    return _one(x.sum(axis=_axes(call, x.ndim), keepdims=call.at("keepdim")), scale)


@computes("mean")
def _mean(call: Call) -> Average:
    x, scale = call.term("x")
    axes = _axes(call, x.ndim)
    count = math.prod(x.shape[axis] for axis in axes)
    return Average(x.sum(axis=axes, keepdims=call.at("keepdim")), scale, count)


@computes("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(call: Call) -> Average:
    x, scale = call.term("x")
    rank = int(op_name(call.node)[-2])
    kernel = spread(call.at("kernel_size"), rank)
    stride = spread(call.at("stride") or kernel, rank)
    padding = spread(call.at("padding"), rank)
    modes = (call.at("ceil_mode"), call.at("count_include_pad"))
    sizes = x.shape[-rank:]
    windows = [sums.pool_windows(sizes[a], kernel[a], stride[a], padding[a], *modes) for a in range(rank)]
    total, counts = sums.sum_windows(x, windows)
    divisor = call.at("divisor_override") if rank > 1 else None
    return Average(total, scale, divisor or counts)


@computes("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive_avg_pool(call: Call) -> Average:
    x, scale = call.term("x")
    rank = int(op_name(call.node)[-2])
    sizes = spread(call.at("output_size"), rank)
    windows = [sums.adaptive_windows(x.shape[axis - rank], size) for axis, size in enumerate(sizes)]
    total, counts = sums.sum_windows(x, windows)
    return Average(total, scale, counts)


# -- moves: the op itself, on the integers -----------------------------------------------------------------------

MOVES = (
    *("reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "aten.squeeze.default", "aten.squeeze.dims"),
    *("transpose", "permute", "expand", "repeat", "aten.repeat_interleave.self_int", "slice", "select", "narrow"),
    *("index", "index_select", "gather", "flip", "roll", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
    *("contiguous", "clone", "detach", "max_pool1d", "max_pool2d", "max_pool3d", "amax", "amin", "pad"),
    *("split", "split_sizes", "chunk", "unbind", "max_pool2d_with_indices"),
    *(f"aten.adaptive_max_pool{n}d.default" for n in (1, 2, 3)),
    *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
)


@computes(*MOVES)
def _move(call: Call) -> Any:
    """In float64, which holds the integers exactly: torch has not every op for int64. Zero is zero there."""
    source = call.node.all_input_nodes[0]
    found = call.values[source]
    if not isinstance(found, Terms) or len(found.parts) != 1 or found.parts[0][1].ndim:
        raise NotExactError(f"{source.name} is not integers times one scale")
    (ints, scale) = found.parts[0]
    moved = torch.from_numpy(ints.astype(np.float64))
    args, kwargs = map_arg((call.node.args, call.node.kwargs), lambda n: moved if n is source else call.values[n])
    assert callable(call.node.target)
    return _again(call.node.target(*args, **kwargs), scale)


def _again(result: Any, scale: Reals) -> Any:
    """Integers with their scale once more; what is no float is an index, and stays."""
    if isinstance(result, Sequence):
        return tuple(_again(item, scale) for item in result)
    assert isinstance(result, Tensor)
    return _one(result.numpy().astype(np.int64), scale) if result.is_floating_point() else result


@computes("relu")
def _relu(call: Call) -> Exact:
    return Clamped(call.exact("x"), 0.0, math.inf)


@computes("clamp")
def _clamp(call: Call) -> Exact:
    low, high = call.at("min"), call.at("max")
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        raise NotExactError(f"the bounds of {call.node.name} are tensors")
    return Clamped(call.exact("x"), -math.inf if low is None else low, math.inf if high is None else high)


@computes("cat")
def _cat(call: Call) -> Exact:
    return _joined(call.at("xs"), call.at("dim"))


@computes("stack")
def _stack(call: Call) -> Exact:
    items = call.at("xs")
    axis = call.at("dim") % (items[0].reals().ndim + 1) if isinstance(items[0], Exact) else 0
    return _joined([_wider(item, axis) for item in items], axis)


def _wider(item: Any, axis: int) -> Any:
    if not isinstance(item, Terms):
        raise NotExactError("what is stacked does not come quantized")
    return Terms(tuple((np.expand_dims(ints, axis), scale) for ints, scale in item.parts))


def _joined(items: Sequence[Any], axis: int) -> Exact:
    if not all(isinstance(item, Exact) for item in items):
        raise NotExactError("what is joined does not come quantized")
    return Joined(tuple(items), axis)


# -- functions ---------------------------------------------------------------------------------------------------


@computes(*functions.FUNCTIONS)
def _function(call: Call) -> Exact:
    return Function(functions.FUNCTIONS[op_name(call.node)](call.exact("x").reals(), call.node))


@computes("prelu")
def _prelu(call: Call) -> Exact:
    x, slope = call.exact("x").reals(), call.constant("w")
    assert slope is not None
    slopes = slope.reshape(-1, *[1] * (x.ndim - 2)) if slope.size > 1 else slope.reshape(())
    return Function(np.where(x > 0, x, x * slopes))


@computes("softmax", "aten._safe_softmax.default")
def _softmax(call: Call) -> Exact:
    name = "x" if op_name(call.node) == "softmax" else "self"
    return Function(functions.softmax(call.exact(name).reals(), call.at("dim")))


@computes("layer_norm", "rms_norm")
def _row_norm(call: Call) -> Exact:
    x = call.exact("x").reals()
    axes = tuple(range(-len(call.at("normalized_shape")), 0))
    if op_name(call.node) == "layer_norm":
        return _scaled(call, functions.normalized(x, axes, call.at("eps")), ())
    eps = call.at("eps")
    value = functions.root_mean_square(x, axes, float(torch.finfo(torch.float32).eps) if eps is None else eps)
    weight = call.constant("w")
    return Function(value if weight is None else value * weight)


@computes("group_norm")
def _group_norm(call: Call) -> Exact:
    x = call.exact("x").reals()
    grouped = x.reshape(x.shape[0], call.at("num_groups"), -1)
    return _scaled(call, functions.normalized(grouped, (-1,), call.at("eps")).reshape(x.shape), x.shape[2:])


@computes("instance_norm")
def _instance_norm(call: Call) -> Exact:
    x = call.exact("x").reals()
    if not call.at("use_input_stats"):
        raise NotExactError(f"{call.node.name} has running statistics")
    return _scaled(call, functions.normalized(x, tuple(range(2, x.ndim)), call.at("eps")), x.shape[2:])


@computes("batch_norm")
def _batch_norm(call: Call) -> Exact:
    x = call.exact("x").reals()
    mean, var = call.constant("mean"), call.constant("var")
    if mean is None or var is None:
        raise NotExactError(f"{call.node.name} has no running statistics")
    shape = [-1, *[1] * (x.ndim - 2)]
    norm = _scaled(call, (x - mean.reshape(shape)) / np.sqrt(var.reshape(shape) + call.at("eps")), x.shape[2:])
    return Scaled(norm.reals())


def _scaled(call: Call, value: Reals, trailing: Sequence[int]) -> Exact:
    """Times the scale of a norm, plus its shift; `trailing` axes come after the channels."""
    for name, apply in (("w", np.multiply), ("b", np.add)):
        constant = call.constant(name)
        if constant is not None:
            value = apply(value, constant.reshape(*constant.shape, *[1] * len(trailing)))
    return Function(value)
