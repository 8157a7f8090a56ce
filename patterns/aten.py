"""The shared vocabulary: patterns over single ops, from which rules are built.

Operands are named as in the dialect, except that the scale and shift of a norm are `gamma` and `beta`: a name binds one
value, and a convolution before the norm has its own `w` and `b`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantc.errors import suggest
from quantc.ir.dialect import DROPOUTS, OVERLOADS, ops_in
from quantc.ir.op_row import Family
from quantc.patterns.dsl import op

conv = op(*ops_in(Family.CONV), args="x w b?")
conv_transpose = op(*ops_in(Family.CONV_TRANSPOSE), args="x w b?")
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
softmax = op(*ops_in(Family.SOFTMAX), args="x")
activation = op(
    *ops_in(Family.ACTIVATION),
    args="x",
)

batch_norm = op("batch_norm", args="x gamma? beta? mean? var?")
layer_norm = op("layer_norm", args="x _ gamma? beta?")
group_norm = op("group_norm", args="x _ gamma? beta?")
instance_norm = op("instance_norm", args="x gamma? beta?")
rms_norm = op("rms_norm", args="x _ gamma?")
dropout = op(*DROPOUTS, args="x")

max_pool = op(*ops_in(Family.MAX_POOL), args="x")
avg_pool = op(*ops_in(Family.AVERAGE_POOL), args="x")
adaptive_avg_pool = op(*ops_in(Family.ADAPTIVE_POOL), args="x")
mean = op("mean", args="x")
total = op("sum", args="x")
extreme = op(*ops_in(Family.EXTREME), args="x")

cat = op("cat", args="xs*")
stack = op("stack", args="xs*")
split = op("split", "split_sizes", args="x")
chunk = op("chunk", args="x")
topk = op("topk", args="x")

reshape = op(*ops_in(Family.VIEW), args="x")
squeeze = op(*OVERLOADS[Family.VIEW], args="x")
transpose = op(*ops_in(Family.PERMUTE), args="x")
expand = op(*ops_in(Family.EXPAND, overloads=True), args="x")
cut = op(*ops_in(Family.SLICE), args="x")
part = op(*ops_in(Family.SPLIT), args="x")
pick = op(*ops_in(Family.GATHER), args="x")
move = op(*ops_in(Family.FLIP), args="x")
shuffle = op(*ops_in(Family.SHUFFLE), args="x")
copy = op(*ops_in(Family.COPY), args="x")
pad = op("pad", args="x")
upsample = op(*ops_in(Family.RESIZE), args="x")
upsample_linear = op(*ops_in(Family.INTERPOLATE, overloads=True), args="x")

if not TYPE_CHECKING:  # hidden from type checkers: unknown names are errors there

    def __getattr__(name: str) -> Any:
        """Raise AttributeError for an unknown pattern, with similar names."""
        known = [found for found, value in globals().items() if type(value) is type(linear)]
        hint = "" if name.startswith("_") else f": {suggest(name, known, noun='patterns')}"
        raise AttributeError(f"quantc.patterns.aten has no {name!r}{hint}", name=name)
