"""Example arguments for the ops of the dialect. Sizes are small; values are like a trained model's.

Nothing refers to the batch size, which is the first axis, so that a model runs on batches of any size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantc.ir.dialect import OPS, ops_in
from quantc.ir.op_row import Family
from quantc.testing.arguments import BATCH, CHANNELS, ExampleTable, Wanted
from quantc.testing.choices import NoExampleError

OP_EXAMPLES = ExampleTable()
Arguments = dict[str, Any]

RANKS: dict[str, int] = {op.name: op.spatial + 2 for op in OPS if op.spatial}
RANKS |= {f"aten.adaptive_max_pool{n}d.default": n + 2 for n in (1, 2, 3)} | {"aten.upsample_trilinear3d.vec": 5}
RANKS |= {**dict.fromkeys(ops_in(Family.SHUFFLE), 4), "sdpa": 4, "addmm": 2, "baddbmm": 3, "bilinear": 2}
RANKS |= dict.fromkeys(ops_in(Family.RECURRENT), 3) | dict.fromkeys(ops_in(Family.RECURRENT_CELL), 2)
"""Number of axes an op reads, where its operands leave it open."""

POSITIVE = ("log", "sqrt", "rsqrt", "reciprocal", "pow")
"""Ops whose operand must stay away from zero."""


def _bias(wanted: Wanted, size: int) -> Tensor | None:
    return None if wanted.lacks("b") else wanted.randn(size) / 4


def _weight(wanted: Wanted, shape: tuple[int, ...], *, inputs: int) -> Tensor:
    made = wanted.tensor("w")
    return made if made is not None else wanted.randn(*shape) / inputs**0.5


# -- products ----------------------------------------------------------------------------------------------------


@OP_EXAMPLES.of(*ops_in(Family.CONV))
def conv(wanted: Wanted) -> Arguments:
    rank = RANKS[wanted.op]
    x = wanted.x(rank=rank)
    channels = x.shape[1]
    groups = int(wanted.attr("groups", 1, channels))
    w = _weight(wanted, (CHANNELS, channels // groups, *[3] * (rank - 2)), inputs=channels // groups * 3 ** (rank - 2))
    spatial = {name: wanted.attr(name, [start] * (rank - 2)) for name, start in _SPATIAL.items()}
    return {"x": x, "w": w, "b": _bias(wanted, w.shape[0]), **spatial, "groups": groups}


_SPATIAL = {"stride": 1, "padding": 1, "dilation": 1}


@OP_EXAMPLES.of(*ops_in(Family.CONV_TRANSPOSE))
def conv_transpose(wanted: Wanted) -> Arguments:
    rank = RANKS[wanted.op]
    x = wanted.x(rank=rank)
    channels = x.shape[1]
    groups = int(wanted.attr("groups", 1, 2))
    w = _weight(wanted, (channels, CHANNELS // groups, *[3] * (rank - 2)), inputs=channels // groups * 3 ** (rank - 2))
    spatial = {name: wanted.attr(name, [start] * (rank - 2)) for name, start in _SPATIAL.items()}
    return {"x": x, "w": w, "b": _bias(wanted, w.shape[1] * groups), **spatial, "groups": groups}


@OP_EXAMPLES.of("linear")
def linear(wanted: Wanted) -> Arguments:
    x = wanted.x(rank=None if wanted.tensor("x") is not None else wanted.rank or wanted.choose("axes", 3, 2))
    w = _weight(wanted, (12, x.shape[-1]), inputs=x.shape[-1])
    return {"x": x, "w": w, "b": _bias(wanted, w.shape[0])}


@OP_EXAMPLES.of("bilinear")
def bilinear(wanted: Wanted) -> Arguments:
    x, y = wanted.x(rank=2), wanted.x("y", rank=2)
    w = _weight(wanted, (12, x.shape[-1], y.shape[-1]), inputs=x.shape[-1] * y.shape[-1])
    return {"x": x, "y": y, "w": w, "b": _bias(wanted, 12)}


@OP_EXAMPLES.of("matmul")
def matmul(wanted: Wanted) -> Arguments:
    x, y = wanted.tensor("x"), wanted.tensor("y")
    if x is None and y is None:
        x = wanted.x(rank=wanted.rank or wanted.choose("axes", 3, 2, 4))
    if x is None and y is not None:
        return {"x": wanted.randn(*y.shape[:-2], 6, y.shape[-2])}
    if x is not None and y is None:
        lead = x.shape[:-2] if x.dim() > 2 else ()
        return {"x": x, "y": wanted.randn(*lead, x.shape[-1], 6)}
    return {}


@OP_EXAMPLES.of("addmm", "baddbmm")
def addmm(wanted: Wanted) -> Arguments:
    x = wanted.x(rank=RANKS[wanted.op])
    y = wanted.tensor("y")
    y = y if y is not None else wanted.randn(*x.shape[:-2], x.shape[-1], 12) / x.shape[-1] ** 0.5
    return {"x": x, "y": y, "b": wanted.randn(*x.shape[:-2], *((1,) if x.dim() > 2 else ()), y.shape[-1]) / 4}


@OP_EXAMPLES.of("einsum")
def einsum(wanted: Wanted) -> Arguments:
    operands = _several(wanted, "operands", (BATCH, 6, 6), most=2)
    letters = "abcdefgh"
    inputs = ",".join(f"z{letters[n]}{letters[n + 1]}" for n in range(len(operands)))
    return {"equation": f"{inputs}->za{letters[len(operands)]}", "operands": operands}


@OP_EXAMPLES.of("sdpa")
def sdpa(wanted: Wanted) -> Arguments:
    q = wanted.x("q", shape=(BATCH, 2, 6, 8))
    k, v = wanted.x("k", shape=tuple(q.shape)), wanted.x("v", shape=tuple(q.shape))
    mask = {} if "mask" not in wanted.known else {"mask": torch.ones(6, 6, dtype=torch.bool).tril()}
    return {"q": q, "k": k, "v": v, **mask}


@OP_EXAMPLES.of("embedding")
def embedding(wanted: Wanted) -> Arguments:
    return {"w": wanted.randn(10, 16), "indices": wanted.whole(10, BATCH, 6)}


@OP_EXAMPLES.of("embedding_bag")
def embedding_bag(wanted: Wanted) -> Arguments:
    bags = {"indices": wanted.whole(10, 3 * BATCH), "offsets": torch.arange(0, 3 * BATCH, 3)}
    flags = {"scale_grad_by_freq": False, "mode": 0, "sparse": False, "per_sample_weights": None}
    return {"w": wanted.randn(10, 16), **bags, **flags, "include_last_offset": False, "padding_idx": None}


@OP_EXAMPLES.of(*ops_in(Family.RECURRENT))
def recurrent(wanted: Wanted) -> Arguments:
    x, size = wanted.x(rank=3), 8
    gates = {"lstm": 4, "gru": 3}.get(wanted.op, 1) * size
    state = torch.zeros(1, x.shape[0], size)
    params = [wanted.weight(gates, x.shape[-1]), wanted.weight(gates, size), *(wanted.randn(2, gates) / 4).unbind()]
    flags = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False}
    hx = [state, state.clone()] if wanted.op == "lstm" else state
    return {"x": x, "hx": hx, "params": params, **flags, "batch_first": True}


@OP_EXAMPLES.of(*ops_in(Family.RECURRENT_CELL))
def cell(wanted: Wanted) -> Arguments:
    x, size = wanted.x(rank=2), 8
    gates = {"lstm_cell": 4, "gru_cell": 3}.get(wanted.op, 1) * size
    state = wanted.randn(x.shape[0], size)
    weights = {"w_ih": wanted.weight(gates, x.shape[-1]), "w_hh": wanted.weight(gates, size)}
    biases = {"b_ih": wanted.randn(gates) / 4, "b_hh": wanted.randn(gates) / 4}
    return {"x": x, "hx": [state, state / 2] if wanted.op == "lstm_cell" else state, **weights, **biases}


# -- element by element ------------------------------------------------------------------------------------------


@OP_EXAMPLES.of("add", "sub", "mul", "div", "maximum", "minimum", "where")
def binary(wanted: Wanted) -> Arguments:
    x, y = wanted.tensor("x"), wanted.tensor("y")
    like = x if x is not None else y
    shape = tuple(like.shape) if like is not None else tuple(wanted.x().shape)
    x = x if x is not None else wanted.randn(*shape)
    y = y if y is not None else wanted.randn(*shape)
    if wanted.op == "where":
        return {"condition": wanted.whole(2, *shape).bool(), "x": x, "y": y}
    return {"x": x, "y": y.abs() + 0.5 if wanted.op == "div" and y is not wanted.tensor("y") else y}


@OP_EXAMPLES.of("masked_fill")
def masked_fill(wanted: Wanted) -> Arguments:
    x = wanted.x()
    return {"x": x, "mask": wanted.whole(2, *x.shape).bool(), "value": -1.0}


@OP_EXAMPLES.of(*POSITIVE)
def positive(wanted: Wanted) -> Arguments:
    x = wanted.tensor("x")
    exponent = {"exponent": 2} if wanted.op == "pow" else {}
    return {"x": x if x is not None else wanted.x().abs() + 0.5, **exponent}


@OP_EXAMPLES.of("prelu")
def prelu(wanted: Wanted) -> Arguments:
    x = wanted.x()
    return {"x": x, "w": wanted.randn(x.shape[1]).abs() / 4}


@OP_EXAMPLES.of("aten._safe_softmax.default")
def safe_softmax(wanted: Wanted) -> Arguments:
    return {"self": wanted.x("self"), "dim": wanted.attr("dim", -1)}


# -- norms -------------------------------------------------------------------------------------------------------


@OP_EXAMPLES.of("batch_norm", "instance_norm")
def channel_norm(wanted: Wanted) -> Arguments:
    x = wanted.x()
    sizes = x.shape[1]
    scale = None if wanted.lacks("w") else wanted.randn(sizes).abs() + 0.5
    last = {"training": wanted.attr("training", False)}
    running: Arguments = {"mean": wanted.randn(sizes) / 4, "var": wanted.randn(sizes).abs() + 0.5}
    if wanted.op == "instance_norm":
        last, running = {"use_input_stats": True}, {"mean": None, "var": None}
    return {
        "x": x,
        "w": scale,
        "b": _bias(wanted, sizes),
        **running,
        **last,
        "momentum": 0.1,
        "eps": 1e-5,
        "cudnn_enabled": False,
    }


@OP_EXAMPLES.of("layer_norm", "rms_norm")
def row_norm(wanted: Wanted) -> Arguments:
    x = wanted.x(rank=None if wanted.tensor("x") is not None else wanted.rank or 3)
    scale = None if wanted.lacks("w") else wanted.randn(x.shape[-1]).abs() + 0.5
    bias = {"b": _bias(wanted, x.shape[-1])} if wanted.op == "layer_norm" else {}
    return {"x": x, "normalized_shape": [x.shape[-1]], "w": scale, **bias}


@OP_EXAMPLES.of("group_norm")
def group_norm(wanted: Wanted) -> Arguments:
    x = wanted.x()
    scale = None if wanted.lacks("w") else wanted.randn(x.shape[1]).abs() + 0.5
    return {"x": x, "num_groups": wanted.attr("num_groups", 2), "w": scale, "b": _bias(wanted, x.shape[1])}


# -- pooling and reduction ---------------------------------------------------------------------------------------


@OP_EXAMPLES.of(*ops_in(Family.MAX_POOL, Family.AVERAGE_POOL), "max_pool2d_with_indices")
def pool(wanted: Wanted) -> Arguments:
    rank = RANKS[wanted.op]
    sizes = {name: wanted.attr(name, [2] * (rank - 2)) for name in ("kernel_size", "stride")}
    return {"x": wanted.x(rank=rank), **sizes}


@OP_EXAMPLES.of(*ops_in(Family.ADAPTIVE_POOL))
@OP_EXAMPLES.of(*(f"aten.adaptive_max_pool{n}d.default" for n in (1, 2, 3)))
def adaptive_pool(wanted: Wanted) -> Arguments:
    rank, x = RANKS[wanted.op], wanted.rows[0].name
    return {x: wanted.x(x, rank=rank), "output_size": wanted.attr("output_size", [2] * (rank - 2), [1] * (rank - 2))}


@OP_EXAMPLES.of("mean", "sum", "amax", "amin")
def reduce(wanted: Wanted) -> Arguments:
    x = wanted.x()
    axes = [list(range(2, x.dim()))] if x.dim() > 2 else []
    return {"x": x, "dim": wanted.attr("dim", *axes, [-1]), "keepdim": wanted.attr("keepdim", False, True)}


@OP_EXAMPLES.of("max", "min", "topk")
def select_largest(wanted: Wanted) -> Arguments:
    x = wanted.x()
    return {"x": x, "dim": wanted.axis(x, "dim", -1), **({"k": 2} if wanted.op == "topk" else {})}


# -- moving values about -----------------------------------------------------------------------------------------


def _several(wanted: Wanted, name: str, shape: tuple[int, ...], *, most: int = 3) -> list[Tensor]:
    """A list of tensors of one shape: those made already, and new ones of different size."""
    given = wanted.known.get(name)
    items: list[Any] = given if isinstance(given, list) else [None] * (2 + wanted.choices.take(f"{name} items", *_TWO))
    made = [item for item in items[:most] if isinstance(item, Tensor)]
    if len({tuple(item.shape) for item in made}) > 1:
        raise NoExampleError(f"what feeds {wanted.op} has different shapes")
    size = tuple(made[0].shape) if made else shape
    scales = torch.linspace(0.5, 1.5, len(items))
    return [item if item is not None else wanted.randn(*size) * scales[n] for n, item in enumerate(items[:most])]


_TWO = ("two operands", "three operands")


@OP_EXAMPLES.of(*ops_in(Family.JOIN))
def join(wanted: Wanted) -> Arguments:
    items = _several(wanted, "xs", tuple(wanted.x("_").shape))
    return {"xs": items, "dim": wanted.axis(items[0])}


@OP_EXAMPLES.of(*ops_in(Family.SPLIT))
def part(wanted: Wanted) -> Arguments:
    x = wanted.x()
    axis = wanted.axis(x)
    half = x.shape[axis] // 2
    sizes = {"split": {"split_size": half}, "chunk": {"chunks": 2}}.get(wanted.op, {})
    return {"x": x, **sizes, **({"split_sizes": [half, half]} if wanted.op == "split_sizes" else {}), "dim": axis}


@OP_EXAMPLES.of("reshape")
def reshape(wanted: Wanted) -> Arguments:
    x = wanted.x()
    return {"x": x, "shape": [-1, 2, x.shape[1] // 2, *x.shape[2:]]}


@OP_EXAMPLES.of("unflatten")
def unflatten(wanted: Wanted) -> Arguments:
    x = wanted.x()
    return {"x": x, "dim": 1, "sizes": [2, x.shape[1] // 2]}


@OP_EXAMPLES.of("squeeze", "aten.squeeze.dims", "unsqueeze", "expand")
def axis_of_one(wanted: Wanted) -> Arguments:
    name = wanted.rows[0].name
    x = wanted.x(name)
    if wanted.op != "unsqueeze" and wanted.tensor(name) is None:
        x = x[:, :1].clone()
    if wanted.op != "expand":
        return {name: x, "dim": wanted.attr("dim", [1] if wanted.op == "aten.squeeze.dims" else 1)}
    return {name: x, "size": [-1, CHANNELS, *[-1] * (x.dim() - 2)] if x.shape[1] == 1 else [2, *[-1] * x.dim()]}


@OP_EXAMPLES.of(*ops_in(Family.PERMUTE))
def permute(wanted: Wanted) -> Arguments:
    x = wanted.x()
    if wanted.op == "transpose":
        return {"x": x, "dim0": wanted.attr("dim0", x.dim() - 2), "dim1": wanted.attr("dim1", x.dim() - 1)}
    return {"x": x, "dims": wanted.attr("dims", [0, *range(2, x.dim()), 1] if x.dim() > 2 else [1, 0])}


@OP_EXAMPLES.of("repeat", "aten.repeat_interleave.self_int")
def again(wanted: Wanted) -> Arguments:
    name = wanted.rows[0].name
    x = wanted.x(name)
    others = {
        "aten.repeat_interleave.self_int": {"repeats": 2, "dim": wanted.attr("dim", 1)},
        "repeat": {"repeats": [1, 2, *[1] * (x.dim() - 2)]},
    }
    return {name: x, **others[wanted.op]}


@OP_EXAMPLES.of(*ops_in(Family.SLICE, Family.GATHER))
def pick(wanted: Wanted) -> Arguments:
    x = wanted.x()
    axis = wanted.axis(x)
    half = x.shape[axis] // 2
    others: dict[str, Arguments] = {
        "select": {"dim": axis, "index": 0},
        "slice": {"dim": axis, "start": 0, "end": half, "step": 1},
        "narrow": {"dim": axis, "start": 0, "length": half},
        "index": {"indices": [None, wanted.whole(x.shape[1], 3)]},
        "index_select": {"dim": axis, "index": wanted.whole(x.shape[axis], 3)},
        "gather": {"dim": axis, "index": wanted.whole(x.shape[axis], *x.shape)},
    }
    return {"x": x, **others[wanted.op]}


@OP_EXAMPLES.of(*ops_in(Family.SHUFFLE))
def shuffle(wanted: Wanted) -> Arguments:
    name = {"pixel_shuffle": "upscale_factor", "pixel_unshuffle": "downscale_factor"}.get(wanted.op, "groups")
    return {"x": wanted.x(rank=4), name: wanted.attr(name, 2)}


@OP_EXAMPLES.of(*ops_in(Family.RESIZE, Family.INTERPOLATE, overloads=True))
def upsample(wanted: Wanted) -> Arguments:
    rank = RANKS[wanted.op]
    corners = {} if "nearest" in wanted.op else {"align_corners": wanted.attr("align_corners", False)}
    factors = [2.0] * (rank - 2)
    x = wanted.rows[0].name
    return {x: wanted.x(x, rank=rank), "output_size": None, **corners, "scale_factors": factors}
