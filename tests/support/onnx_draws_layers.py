"""Arguments of products, pools, norms and recurrent layers, drawn from what their schemas allow."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.onnx_calls import Arguments, Draw, draws


def _listed(draw: Draw, count: int, *options: int) -> Any:
    return draw.pick([draw.pick(*options)] * count, [draw.pick(*options) for _ in range(count)])


def _batch(draw: Draw) -> Any:
    return draw.pick([2], [1], [3], [])


for count in (1, 2, 3):

    @draws(f"conv{count}d", weighted=True)
    def conv(draw: Draw, count: int = count) -> Arguments:
        groups = draw.pick(1, 1, 1, 2, 3)
        own, made = draw.size(1, 3), draw.size(1, 3)
        kernel = [draw.size(1, 3) for _ in range(count)]
        x = draw.floats([*_batch(draw), groups * own, *(draw.size(5, 8) for _ in range(count))])
        w = draw.floats([groups * made, own, *kernel])
        b = draw.pick(None, draw.floats([groups * made]))
        strides, pads, spread = (_listed(draw, count, *each) for each in ((1, 2, 3), (0, 1, 2), (1, 2)))
        return (x, w, b, strides, pads, spread, groups), {}

    @draws(f"conv_transpose{count}d", weighted=True)
    def conv_transpose(draw: Draw, count: int = count) -> Arguments:
        groups = draw.pick(1, 1, 2)
        own, made = draw.size(1, 3), draw.size(1, 3)
        kernel = [draw.size(2, 3) for _ in range(count)]
        x = draw.floats([*_batch(draw), groups * own, *(draw.size(3, 5) for _ in range(count))])
        w = draw.floats([groups * own, made, *kernel])
        b = draw.pick(None, draw.floats([groups * made]))
        strides, pads, spread = (_listed(draw, count, *each) for each in ((2, 3), (0, 1), (1, 2)))
        return (x, w, b, strides, pads, _listed(draw, count, 0, 1), groups, spread), {}

    def _window(draw: Draw, count: int) -> tuple[torch.Tensor, Any, Any, Any]:
        kernel = _listed(draw, count, 1, 2, 3, 4)
        padding = [draw.size(0, each // 2) for each in kernel]
        stride = draw.pick([], _listed(draw, count, 1, 2, 3), list(kernel))
        x = draw.floats([*_batch(draw), draw.size(1, 3), *(draw.size(5, 8) for _ in range(count))])
        return x, kernel, stride, padding

    @draws(f"max_pool{count}d", *(["max_pool2d_with_indices"] if count == 2 else []))
    def max_pool(draw: Draw, count: int = count) -> Arguments:
        return (*_window(draw, count), _listed(draw, count, 1, 1, 2), draw.chance()), {}

    @draws(f"avg_pool{count}d")
    def avg_pool(draw: Draw, count: int = count) -> Arguments:
        own = (draw.pick(None, None, 3),) if count > 1 else ()
        return (*_window(draw, count), draw.chance(), draw.chance(), *own), {}

    @draws(f"adaptive_avg_pool{count}d", f"aten.adaptive_max_pool{count}d.default")
    def adaptive(draw: Draw, count: int = count) -> Arguments:
        x = draw.floats([*_batch(draw), draw.size(1, 3), *(draw.pick(4, 6, 5) for _ in range(count))])
        return (x, draw.pick([1] * count, [2] * count, [draw.pick(1, 2, 3) for _ in range(count)])), {}

    @draws(f"upsample_nearest{count}d")
    def nearest(draw: Draw, count: int = count) -> Arguments:
        x = draw.floats([draw.size(1, 2), draw.size(1, 3), *(draw.size(2, 5) for _ in range(count))])
        sizes = [draw.size(1, 9) for _ in range(count)]
        return draw.pick((x, sizes, None), (x, None, [draw.pick(2.0, 1.5, 0.5, 3.0, 1.0) for _ in range(count)])), {}


@draws("upsample_linear1d")
def linear1d(draw: Draw) -> Arguments:
    return _linear(draw, 1)


@draws("upsample_bilinear2d")
def bilinear2d(draw: Draw) -> Arguments:
    return _linear(draw, 2)


def _linear(draw: Draw, count: int) -> Arguments:
    x = draw.floats([draw.size(1, 2), draw.size(1, 3), *(draw.size(2, 5) for _ in range(count))])
    sizes, factors = [draw.size(1, 9) for _ in range(count)], [draw.pick(2.0, 1.5, 0.5, 3.0) for _ in range(count)]
    return draw.pick((x, sizes, draw.chance(), None), (x, None, draw.chance(), factors)), {}


@draws("linear", weighted=True)
def linear(draw: Draw) -> Arguments:
    deep, made = draw.size(), draw.size()
    b = draw.pick(None, draw.floats([made]))
    return (draw.floats([*draw.shape(0, 3), deep]), draw.floats([made, deep]), b), {}


@draws("matmul")
def matmul(draw: Draw) -> Arguments:
    deep, batch = draw.size(), draw.shape(0, 2)
    left = draw.pick([deep], [draw.size(), deep], [*batch, draw.size(), deep])
    right = draw.pick([deep], [deep, draw.size()], [*draw.broadcast(batch), deep, draw.size()])
    return (draw.floats(left), draw.floats(right)), {}


@draws("aten.bmm.default")
def bmm(draw: Draw) -> Arguments:
    batch, deep = draw.size(), draw.size()
    return (draw.floats([batch, draw.size(), deep]), draw.floats([batch, deep, draw.size()])), {}


@draws("aten.mm.default")
def mm(draw: Draw) -> Arguments:
    deep = draw.size()
    return (draw.floats([draw.size(), deep]), draw.floats([deep, draw.size()])), {}


@draws("aten.mv.default")
def mv(draw: Draw) -> Arguments:
    deep = draw.size()
    return (draw.floats([draw.size(), deep]), draw.floats([deep])), {}


@draws("aten.dot.default")
def dot(draw: Draw) -> Arguments:
    deep = draw.size()
    return (draw.floats([deep]), draw.floats([deep])), {}


def _factors(draw: Draw) -> dict[str, Any]:
    return {"beta": draw.pick(1, 1, 0.5, 2, 0), "alpha": draw.pick(1, 1, 0.5, -2)}


@draws("addmm", weighted=True)
def addmm(draw: Draw) -> Arguments:
    rows, deep, made = draw.size(), draw.size(), draw.size()
    b = draw.floats(draw.broadcast([rows, made]))
    return (b, draw.floats([rows, deep]), draw.floats([deep, made])), _factors(draw)


@draws("baddbmm")
def baddbmm(draw: Draw) -> Arguments:
    batch, rows, deep, made = (draw.size() for _ in range(4))
    b = draw.floats(draw.broadcast([batch, rows, made]))
    return (b, draw.floats([batch, rows, deep]), draw.floats([batch, deep, made])), _factors(draw)


@draws("einsum")
def einsum(draw: Draw) -> Arguments:
    sizes = {letter: draw.size(1, 3) for letter in "abcd"}
    equation = draw.pick(
        "ab,bc->ac", "abc, cd -> abd", "ab,ab", "aa->a", "abc->cab", "...a,ab->...b", "ab,ab->", "Ab,bC->AC"
    )
    terms = equation.replace(" ", "").replace("...", ".").partition("->")[0].split(",")
    shapes = [[2 if letter == "." else sizes[letter.lower()] for letter in term] for term in terms]
    return (equation, [draw.floats(shape) for shape in shapes]), {}


@draws("bilinear", weighted=True)
def bilinear(draw: Draw) -> Arguments:
    left, right, made = draw.size(), draw.size(), draw.size()
    front = draw.shape(1, 3)
    b = draw.pick(None, draw.floats([made]))
    return (draw.floats([*front, left]), draw.floats([*front, right]), draw.floats([made, left, right]), b), {}


@draws("sdpa")
def attention(draw: Draw) -> Arguments:
    front, rows, keys, deep = draw.shape(0, 2), draw.size(), draw.size(), draw.size()
    q = draw.floats([*front, rows, deep])
    is_shared = len(front) == 2 and draw.chance(0.2)
    if is_shared:
        q = draw.floats([front[0], front[1] * 2, rows, deep])
    k, v = draw.floats([*front, keys, deep]), draw.floats([*front, keys, draw.size()])
    kind = draw.pick("none", "causal", "bool", "float")
    mask = None
    if kind == "bool":
        mask = draw.bools([rows, keys]) if draw.chance(0.7) else torch.zeros(rows, keys, dtype=torch.bool)
    if kind == "float":
        mask = draw.floats([rows, keys])
    named = {"scale": draw.pick(None, 0.3), "enable_gqa": is_shared}
    return (q, k, v, mask, 0.0, kind == "causal"), named


@draws("embedding", weighted=True)
def embedding(draw: Draw) -> Arguments:
    rows = draw.size(1, 6)
    indices = draw.ints(draw.shape(empty=True), 0, rows - 1, draw.pick(torch.int64, torch.int32))
    return (draw.floats([rows, draw.size()]), indices, draw.pick(-1, 0)), {}


# -- norms ---------------------------------------------------------------------------------------------------------


def _or_none(draw: Draw, *tensors: torch.Tensor) -> list[Any]:
    return [draw.pick(None, tensor, tensor) for tensor in tensors]


@draws("batch_norm", weighted=True)
def batch_norm(draw: Draw) -> Arguments:
    channels = draw.size()
    x = draw.floats([draw.size(), channels, *draw.shape(0, 3)])
    w, b = _or_none(draw, draw.floats([channels]), draw.floats([channels]))
    stats = (draw.floats([channels]), draw.floats([channels], positive=True))
    return (x, w, b, *stats, False, 0.1, draw.pick(1e-5, 1e-3), False), {}


@draws("instance_norm", weighted=True)
def instance_norm(draw: Draw) -> Arguments:
    channels = draw.size()
    x = draw.floats([draw.size(1, 3), channels, *(draw.size(2, 4) for _ in range(draw.size(1, 3)))])
    w, b = _or_none(draw, draw.floats([channels]), draw.floats([channels]))
    return (x, w, b, None, None, True, 0.1, draw.pick(1e-5, 1e-2), False), {}


@draws("group_norm", weighted=True)
def group_norm(draw: Draw) -> Arguments:
    groups = draw.size(1, 3)
    channels = groups * draw.size(1, 3)
    x = draw.floats([draw.size(1, 3), channels, *(draw.size(1, 4) for _ in range(draw.size(0, 3)))])
    w, b = _or_none(draw, draw.floats([channels]), draw.floats([channels]))
    return (x, groups, w, b, draw.pick(1e-5, 1e-2)), {}


@draws("layer_norm", weighted=True)
def layer_norm(draw: Draw) -> Arguments:
    shape = draw.shape(1)
    own = shape[draw.size(0, len(shape) - 1) :]
    w, b = _or_none(draw, draw.floats(own), draw.floats(own))
    return (draw.floats(shape), own, w, b, draw.pick(1e-5, 1e-2)), {}


@draws("rms_norm", weighted=True)
def rms_norm(draw: Draw) -> Arguments:
    shape = draw.shape(1)
    own = shape[draw.size(0, len(shape) - 1) :]
    return (draw.floats(shape), own, *_or_none(draw, draw.floats(own)), draw.pick(None, 1e-5, 1e-2)), {}


# -- recurrent -----------------------------------------------------------------------------------------------------

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
for name, gates in GATES.items():

    @draws(name, weighted=True)
    def recurrent(draw: Draw, name: str = name, gates: int = gates) -> Arguments:
        layers, directions = draw.size(1, 2), draw.size(1, 2)
        deep, hidden, batch, steps = (draw.size(1, 4) for _ in range(4))
        has_biases, is_first = draw.chance(), draw.chance()
        params = []
        for layer in range(layers):
            for _ in range(directions):
                read = deep if layer == 0 else hidden * directions
                sizes = [[gates * hidden, read], [gates * hidden, hidden], *[[gates * hidden]] * (2 * has_biases)]
                params += [draw.floats(size).clamp(-1, 1) for size in sizes]
        single = gates == 1 and draw.chance(0.1)
        is_first = is_first and not single
        x = [steps, deep] if single else [batch, steps, deep] if is_first else [steps, batch, deep]
        state = [layers * directions, *([] if single else [batch]), hidden]
        hx: Any = [draw.floats(state), draw.floats(state)] if name == "lstm" else draw.floats(state)
        return (draw.floats(x), hx, params, has_biases, layers, 0.0, False, directions == 2, is_first), {}

    @draws(f"{name}_cell", weighted=True)
    def cell(draw: Draw, name: str = name, gates: int = gates) -> Arguments:
        deep, hidden, batch = (draw.size(1, 4) for _ in range(3))
        state = [batch, hidden]
        hx: Any = [draw.floats(state), draw.floats(state)] if name == "lstm" else draw.floats(state)
        sizes = [[gates * hidden, deep], [gates * hidden, hidden], *[[gates * hidden]] * (2 * draw.chance())]
        return (draw.floats([batch, deep]), hx, *(draw.floats(size).clamp(-1, 1) for size in sizes)), {}


# -- quantize ops --------------------------------------------------------------------------------------------------

BYTES = ((0, 255, torch.uint8), (0, 127, torch.uint8), (-128, 127, torch.int8), (-127, 127, torch.int8))
DECOMPOSED = "quantized_decomposed"


def _off_ties(draw: Draw, shape: list[int]) -> torch.Tensor:
    """Numbers that are not half-way between two levels of the scales below."""
    return draw.ints(shape, -400, 400) * 0.25 + 0.05


@draws(f"{DECOMPOSED}.quantize_per_tensor.default")
def quantize(draw: Draw) -> Arguments:
    return (_off_ties(draw, draw.shape(empty=True)), 0.5, draw.size(0, 9), *draw.pick(*BYTES[:2])), {}


@draws(f"{DECOMPOSED}.dequantize_per_tensor.default")
def dequantize(draw: Draw) -> Arguments:
    low, high, dtype = draw.pick(*BYTES[:2])
    return (draw.ints(draw.shape(empty=True), low, high, dtype), 0.5, draw.size(0, 9), low, high, dtype), {}


@draws(f"{DECOMPOSED}.quantize_per_channel.default", weighted=True)
def quantize_channels(draw: Draw) -> Arguments:
    shape, (low, high, dtype) = draw.shape(1), draw.pick(*BYTES)
    axis = draw.size(0, len(shape) - 1)
    scales = torch.tensor([draw.pick(0.5, 1.0, 2.0) for _ in range(shape[axis])])
    zero_points = draw.ints([shape[axis]], 0, 9)
    return (_off_ties(draw, shape), scales, zero_points, axis, low, high, dtype), {}


@draws(f"{DECOMPOSED}.dequantize_per_channel.default", weighted=True)
def dequantize_channels(draw: Draw) -> Arguments:
    (x, scales, zero_points, axis, low, high, dtype), _ = quantize_channels(draw)
    return (draw.ints(x.shape, low, high, dtype), scales, zero_points, axis, low, high, dtype), {}
