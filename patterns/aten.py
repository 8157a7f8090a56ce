"""The shared vocabulary: patterns over single ops, from which rules are built.

Operands are named as in the dialect, except that the scale and shift of a norm are `gamma` and `beta`: a name binds one
value, and a convolution before the norm has its own `w` and `b`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantc.errors import suggest
from quantc.patterns.dsl import op

conv = op("conv1d", "conv2d", "conv3d", args="x w b?")
conv_transpose = op("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", args="x w b?")
linear = op("linear", args="x w b?")
matmul = op("matmul", args="x y")
addmm = op("addmm", args="b x y")
baddbmm = op("baddbmm", args="b x y")
sdpa = op("sdpa", args="q k v mask?")
embedding = op("embedding", args="w indices")
embedding_bag = op("embedding_bag", args="w indices offsets?")
lstm = op("lstm", args="x hx* params*")
gru = op("gru", args="x hx params*")
rnn = op("rnn_tanh", "rnn_relu", args="x hx params*")
lstm_cell = op("lstm_cell", args="x hx* w_ih w_hh b_ih? b_hh?")
gru_cell = op("gru_cell", args="x hx w_ih w_hh b_ih? b_hh?")
rnn_cell = op("rnn_tanh_cell", "rnn_relu_cell", args="x hx w_ih w_hh b_ih? b_hh?")

add = op("add", args="x y", where={"alpha": 1})
sub = op("sub", args="x y", where={"alpha": 1})
rsub = op("rsub", args="x y", where={"alpha": 1})
mul = op("mul", args="x y")
div = op("div", args="x y")
maximum = op("maximum", args="x y")
minimum = op("minimum", args="x y")

relu = op("relu", args="x")
clamp = op("relu", "clamp", args="x")
hardswish = op("hardswish", args="x")
hardsigmoid = op("hardsigmoid", args="x")
silu = op("silu", args="x")
gelu = op("gelu", args="x")
leaky_relu = op("leaky_relu", args="x")
elu = op("elu", "selu", "celu", args="x")
prelu = op("prelu", args="x slope")
sigmoid = op("sigmoid", args="x")
tanh = op("tanh", args="x")
softmax = op("softmax", "log_softmax", args="x")
activation = op(
    *("relu", "clamp", "hardswish", "hardsigmoid", "silu", "mish", "gelu", "leaky_relu"),
    *("elu", "selu", "celu", "sigmoid", "tanh", "softplus"),
    args="x",
)

batch_norm = op("batch_norm", args="x gamma? beta? mean? var?")
layer_norm = op("layer_norm", args="x _ gamma? beta?")
group_norm = op("group_norm", args="x _ gamma? beta?")
instance_norm = op("instance_norm", args="x gamma? beta?")
rms_norm = op("rms_norm", args="x _ gamma?")
dropout = op("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", args="x")

max_pool = op("max_pool1d", "max_pool2d", "max_pool3d", args="x")
avg_pool = op("avg_pool1d", "avg_pool2d", "avg_pool3d", args="x")
adaptive_avg_pool = op("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", args="x")
mean = op("mean", args="x")
total = op("sum", args="x")
extreme = op("amax", "amin", args="x")

cat = op("cat", args="xs*")
stack = op("stack", args="xs*")
split = op("split", "split_sizes", args="x")
chunk = op("chunk", args="x")
topk = op("topk", args="x")

reshape = op("reshape", "flatten", "unflatten", "squeeze", "unsqueeze", args="x")
squeeze = op("aten.squeeze.default", "aten.squeeze.dims", args="x")
transpose = op("transpose", "permute", args="x")
expand = op("expand", "repeat", "aten.repeat_interleave.self_int", args="x")
cut = op("slice", "select", "narrow", args="x")
part = op("split", "split_sizes", "chunk", "unbind", args="x")
pick = op("index", "index_select", "gather", args="x")
move = op("flip", "roll", args="x")
shuffle = op("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", args="x")
copy = op("contiguous", "clone", "detach", args="x")
pad = op("pad", args="x")
upsample = op("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", args="x")
upsample_linear = op("upsample_linear1d", "upsample_bilinear2d", "aten.upsample_trilinear3d.vec", args="x")

if not TYPE_CHECKING:  # hidden from type checkers: unknown names are errors there

    def __getattr__(name: str) -> Any:
        """Raise AttributeError for an unknown pattern, with similar names."""
        known = [found for found, value in globals().items() if type(value) is type(linear)]
        hint = "" if name.startswith("_") else f": {suggest(name, known, noun='patterns')}"
        raise AttributeError(f"quantc.patterns.aten has no {name!r}{hint}", name=name)
