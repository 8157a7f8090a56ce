"""Arguments of ops that move values about, drawn from what their schemas allow."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from tests.support.onnx_calls import Arguments, Draw, draws


@draws("contiguous", "clone", "detach", "aten.alias.default", "aten.lift_fresh_copy.default", "aten.squeeze.default")
def same(draw: Draw) -> Arguments:
    return (draw.numbers(draw.shape(empty=True)),), {}


@draws("dropout")
def dropout(draw: Draw) -> Arguments:
    return (draw.floats(draw.shape()), 0.5, False), {}


@draws("cat")
def cat(draw: Draw) -> Arguments:
    shape = draw.shape(1)
    axis = draw.axis(len(shape))
    parts = []
    for _ in range(draw.size(1, 3)):
        own = list(shape)
        own[axis] = draw.pick(1, 2, 3, 0)
        parts.append(draw.numbers(own))
    if draw.chance(0.2):
        parts.insert(draw.pick(0, len(parts)), torch.zeros(0))
    return (parts, axis), {}


@draws("stack")
def stack(draw: Draw) -> Arguments:
    shape = draw.shape(0, 3)
    return ([draw.floats(shape) for _ in range(draw.size(1, 3))], draw.axis(len(shape) + 1)), {}


@draws("split")
def split(draw: Draw) -> Arguments:
    shape = draw.shape(1)
    return (draw.numbers(shape), draw.size(1, 4), draw.axis(len(shape))), {}


@draws("split_sizes")
def split_sizes(draw: Draw) -> Arguments:
    shape = draw.shape(1)
    axis = draw.axis(len(shape))
    first = draw.size(0, shape[axis])
    sizes = draw.pick([shape[axis]], [first, shape[axis] - first])
    return (draw.floats(shape), sizes, axis), {}


@draws("chunk")
def chunk(draw: Draw) -> Arguments:
    shape = draw.shape(1)
    return (draw.floats(shape), draw.size(1, 4), draw.axis(len(shape))), {}


@draws("unbind")
def unbind(draw: Draw) -> Arguments:
    shape = draw.shape(1)
    return (draw.numbers(shape), draw.axis(len(shape))), {}


@draws("reshape", "aten.view.default", "aten._unsafe_view.default")
def reshape(draw: Draw) -> Arguments:
    shape = draw.shape(0, 4, empty=True)
    count = prod(shape)
    options = [[count], [1, count], [count, 1, 1], list(shape), list(reversed(shape))]
    if count:
        options += [[-1], [-1, 1], *([[2, -1]] if count % 2 == 0 else []), [*shape, -1], [-1, *shape[1:]]]
    else:
        options += [[0], [0, 3], [2, 0]]
    return (draw.numbers(shape), draw.pick(*options)), {}


@draws("flatten")
def flatten(draw: Draw) -> Arguments:
    shape = draw.shape(0, 5, empty=True)
    rank = max(len(shape), 1)
    start = draw.size(0, rank - 1)
    end = draw.size(start, rank - 1)
    return (draw.floats(shape), start - draw.pick(0, rank), end - draw.pick(0, rank)), {}


@draws("unflatten")
def unflatten(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    axis = draw.axis(len(shape))
    first = draw.size(1, 3)
    shape[axis] = first * draw.size(1, 3)
    return (draw.floats(shape), axis, draw.pick([first, -1], [-1, first], [first, shape[axis] // first])), {}


@draws("squeeze")
def squeeze(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.floats(shape), draw.axis(len(shape))), {}


@draws("aten.squeeze.dims")
def squeeze_dims(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.floats(shape), draw.axes(len(shape), 0)), {}


@draws("unsqueeze")
def unsqueeze(draw: Draw) -> Arguments:
    shape = draw.shape(empty=True)
    return (draw.numbers(shape), draw.axis(len(shape) + 1)), {}


@draws("transpose")
def transpose(draw: Draw) -> Arguments:
    shape = draw.shape(empty=True)
    return (draw.numbers(shape), draw.axis(len(shape)), draw.axis(len(shape))), {}


@draws("permute")
def permute(draw: Draw) -> Arguments:
    shape = draw.shape(empty=True)
    return (draw.numbers(shape), draw.axes(len(shape), len(shape))), {}


@draws("aten.t.default")
def turned(draw: Draw) -> Arguments:
    return (draw.floats(draw.shape(0, 2)),), {}


@draws("aten.numpy_T.default")
def turned_all(draw: Draw) -> Arguments:
    return (draw.floats(draw.shape(0, 4)),), {}


def _expanded(draw: Draw) -> tuple[list[int], list[int]]:
    whole = draw.shape(1, 4)
    own = draw.broadcast(whole)
    return own, whole


@draws("expand", "aten.broadcast_to.default")
def expand(draw: Draw) -> Arguments:
    own, whole = _expanded(draw)
    offset = len(whole) - len(own)
    size = [
        -1 if at >= offset and own[at - offset] == each and draw.chance(0.3) else each for at, each in enumerate(whole)
    ]
    return (draw.numbers(own), size), {}


@draws("aten.expand_as.default")
def expand_as(draw: Draw) -> Arguments:
    own, whole = _expanded(draw)
    return (draw.floats(own), draw.floats(whole)), {}


@draws("repeat")
def repeat(draw: Draw) -> Arguments:
    shape = draw.shape(0, 3)
    counts = [draw.pick(1, 1, 2, 3, 0 if draw.chance(0.1) else 1) for _ in range(len(shape) + draw.pick(0, 0, 1, 2))]
    return (draw.numbers(shape), counts), {}


@draws("aten.tile.default")
def tile(draw: Draw) -> Arguments:
    shape = draw.shape(0, 3)
    return (draw.numbers(shape), [draw.size(1, 3) for _ in range(draw.size(0, 4))]), {}


@draws("aten.repeat_interleave.self_int")
def repeat_interleave(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.floats(shape), draw.size(1, 3), draw.pick(draw.axis(len(shape)), draw.axis(len(shape)), None)), {}


@draws("flip")
def flip(draw: Draw) -> Arguments:
    shape = draw.shape(empty=True)
    return (draw.numbers(shape), draw.axes(len(shape), 0)), {}


@draws("roll")
def roll(draw: Draw) -> Arguments:
    shape = draw.shape(1, empty=True)
    if draw.chance(0.1):
        return (draw.floats(shape), [draw.size(-5, 5)]), {}
    axes = draw.axes(len(shape))
    return (draw.floats(shape), [draw.size(-7, 7) for _ in axes], axes), {}


@draws("pad")
def pad(draw: Draw) -> Arguments:
    mode = draw.pick("constant", "constant", "reflect", "replicate", "circular")
    if mode == "constant":
        shape = draw.shape(1, 4)
        amounts = [draw.pick(0, 1, 2, 3, -1) for _ in range(2 * draw.size(1, len(shape)))]
        return (draw.numbers(shape), amounts, mode, draw.pick(None, 0.0, 2.0)), {}
    count = draw.size(1, 2)
    shape = [*(draw.size(1, 3) for _ in range(draw.pick(1, 2))), *(draw.size(3, 6) for _ in range(count))]
    return (draw.floats(shape), [draw.pick(0, 1, 2, -1) for _ in range(2 * count)], mode), {}


@draws("aten.constant_pad_nd.default")
def constant_pad(draw: Draw) -> Arguments:
    shape = draw.shape(1, 4)
    amounts = [draw.pick(0, 1, 2, 3, -1) for _ in range(2 * draw.size(1, len(shape)))]
    return (draw.numbers(shape), amounts, draw.pick(0, 1, 2)), {}


def _images(draw: Draw, channels: int, high: int, wide: int) -> torch.Tensor:
    return draw.floats([*draw.pick([2], [1], [], [2, 3]), channels, high, wide])


@draws("pixel_shuffle")
def pixel_shuffle(draw: Draw) -> Arguments:
    factor = draw.size(1, 3)
    return (_images(draw, factor**2 * draw.size(1, 3), draw.size(), draw.size()), factor), {}


@draws("pixel_unshuffle")
def pixel_unshuffle(draw: Draw) -> Arguments:
    factor = draw.size(1, 3)
    return (_images(draw, draw.size(1, 3), factor * draw.size(1, 3), factor * draw.size(1, 3)), factor), {}


@draws("channel_shuffle")
def channel_shuffle(draw: Draw) -> Arguments:
    groups = draw.size(1, 3)
    shape = [draw.size(), groups * draw.size(1, 3), *draw.shape(1, 3)]
    return (draw.floats(shape), groups), {}


# -- parts ---------------------------------------------------------------------------------------------------------


@draws("select")
def select(draw: Draw) -> Arguments:
    shape = draw.shape(1)
    axis = draw.axis(len(shape))
    return (draw.numbers(shape), axis, draw.size(-shape[axis], shape[axis] - 1)), {}


@draws("slice")
def cut(draw: Draw) -> Arguments:
    shape = draw.shape(1, empty=True)
    ends = (draw.pick(None, 0, 1, 2, -1, -3, 9, -9), draw.pick(None, 0, 1, 3, -1, -2, 9, 2**63 - 1))
    return (draw.numbers(shape), draw.axis(len(shape)), *ends, draw.size(1, 3)), {}


@draws("narrow")
def narrow(draw: Draw) -> Arguments:
    shape = draw.shape(1)
    axis = draw.axis(len(shape))
    size = shape[axis]
    start = draw.size(-size, size)
    length = draw.size(0, size - (start % size if start < 0 else start))
    return (draw.floats(shape), axis, start, length), {}


@draws("index_select")
def index_select(draw: Draw) -> Arguments:
    shape = draw.shape(1)
    axis = draw.axis(len(shape))
    count = draw.pick([draw.size(1, 4)], [0], [])
    return (draw.numbers(shape), axis, draw.ints(count, 0, shape[axis] - 1, draw.pick(torch.int64, torch.int32))), {}


@draws("gather")
def gather(draw: Draw) -> Arguments:
    shape = draw.shape(0, 4)
    axis = draw.axis(len(shape))
    index = [draw.size(1, size) for size in shape]
    if shape:
        index[axis] = draw.size(1, 6)
    return (draw.numbers(shape), axis, draw.ints(index, 0, shape[axis] - 1 if shape else 0)), {}


@draws("index")
def index(draw: Draw) -> Arguments:
    shape = draw.shape(1, 4)
    rank, chosen = len(shape), {axis % len(shape) for axis in draw.axes(len(shape))}
    together = draw.shape(0, 2)
    given = [
        draw.ints(draw.broadcast(together), -shape[axis], shape[axis] - 1) if axis in chosen else None
        for axis in range(rank)
    ]
    while given[-1] is None:
        given.pop()
    if draw.chance(0.1):
        return (draw.floats(shape), [draw.bools(shape[:1])]), {}
    return (draw.numbers(shape), given), {}


# -- made from nothing ---------------------------------------------------------------------------------------------


def _kind(draw: Draw) -> Any:
    return draw.pick({}, {"dtype": torch.int64}, {"dtype": torch.float32}, {"dtype": torch.bool})


@draws("aten.full.default")
def full(draw: Draw) -> Arguments:
    return (draw.shape(empty=True), draw.pick(0, 2, 1.5, True, -torch.inf)), {}


@draws("aten.zeros.default", "aten.ones.default")
def zeros(draw: Draw) -> Arguments:
    return (draw.shape(empty=True),), _kind(draw)


@draws("aten.zeros_like.default", "aten.ones_like.default")
def zeros_like(draw: Draw) -> Arguments:
    return (draw.numbers(draw.shape(empty=True)),), _kind(draw)


@draws("aten.full_like.default")
def full_like(draw: Draw) -> Arguments:
    return (draw.numbers(draw.shape(empty=True)), draw.pick(0, 2, 3)), _kind(draw)


@draws("aten.new_zeros.default", "aten.new_ones.default")
def new_zeros(draw: Draw) -> Arguments:
    return (draw.numbers(draw.shape()), draw.shape(empty=True)), _kind(draw)


@draws("aten.new_full.default")
def new_full(draw: Draw) -> Arguments:
    return (draw.numbers(draw.shape()), draw.shape(empty=True), draw.pick(0, 2, 3)), _kind(draw)


@draws("aten.scalar_tensor.default")
def scalar_tensor(draw: Draw) -> Arguments:
    return (draw.pick(0, 2, 1.5, -torch.inf),), {}


@draws("aten.arange.default")
def arange(draw: Draw) -> Arguments:
    return (draw.pick(0, 1, 5, 4.5),), draw.pick({}, {"dtype": torch.float32}, {"dtype": torch.int64})


@draws("aten.arange.start")
def arange_start(draw: Draw) -> Arguments:
    start = draw.pick(0, -3, 2, 0.5)
    return (start, start + draw.pick(0, 1, 5, 4.5)), draw.pick({}, {"dtype": torch.float32}, {"dtype": torch.int64})


@draws("aten.arange.start_step")
def arange_step(draw: Draw) -> Arguments:
    start, step = draw.pick(0, -3, 2, 0.5, 0.1), draw.pick(1, 2, -1, 0.5, -0.25, 0.1, 0.3)
    return (start, start + step * draw.pick(0, 1, 3, 5, 7.5), step), draw.pick({}, {"dtype": torch.float32})


@draws("aten.tril.default", "aten.triu.default")
def triangle(draw: Draw) -> Arguments:
    shape = [*draw.shape(0, 2), draw.size(), draw.size()]
    x = draw.pick(draw.floats, draw.bools, draw.ints)(shape)
    return (x, draw.size(-4, 4)), {}


@draws("aten.one_hot.default")
def one_hot(draw: Draw) -> Arguments:
    return (draw.ints(draw.shape(), 0, 3), draw.pick(4, 5, 9, -1)), {}


@draws("aten.outer.default")
def outer(draw: Draw) -> Arguments:
    return (draw.floats([draw.size()]), draw.floats([draw.size()])), {}
