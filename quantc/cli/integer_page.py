"""Generator of docs/integer-form.md: its tables are made from the ops and their semantics."""

from __future__ import annotations

from collections.abc import Iterator

from quantc.annotate.quantizer import Backend
from quantc.cli.reference_pages import table
from quantc.integer.library import NAMESPACE, OPS
from quantc.integer.semantics import DYNAMIC, MODULES, SEMANTICS, Semantics, load
from quantc.pipeline.registry import BACKENDS
from quantc.spec.formats import Timing

INTRO = """\
# The integer form

Made by `quantc ops --markdown`; the formulas stand beside the code they describe, so change them there. Why it is built
this way: [decision 12](decisions/0012-integer-form.md).

`qc.convert(prepared)` gives a program in Q/DQ form: float ops between quantize and dequantize ops.
`qc.convert(prepared, to="integer")` goes on from there, to a program that computes on integers. It says to the last bit
what a quantized op means, so it is what kernels and hardware are checked against.

```python
import torch
from torch import nn

import quantc as qc

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)).eval()
batches = [torch.randn(4, 3, 8, 8) for _ in range(4)]

prepared = qc.prepare(qc.capture(model, (batches[0],)), "qnnpack")
qc.calibrate(prepared, batches)
integer = qc.convert(prepared, to="integer")
print(integer)
```

Nodes keep the names of the ops they stand for. The `conv2d` that is printed computes the convolution, the relu after it
and the rounding to the result's grid; the pool and the flatten are the ops they were, on uint8:

```python
assert str(integer.node("conv2d").target) == "quantc.conv.default"
assert str(integer.node("max_pool2d").target) == "aten.max_pool2d.default"

coverage = integer.coverage()
assert coverage.integer_ops == 4
assert coverage.counts["float"] == 0
print(integer.explain("conv2d"))  # with its formula
```

The program is an ordinary one: it runs, `torch.export` and `torch.compile` take its `module`, `save` and `qc.load` keep it
bit for bit. `qc.quantize(…, to="integer")` and `quantc quantize --to integer` make it in one go.

## Numbers

`xq` is an integer tensor, `sx` its scale and `xz` its zero point: it stands for `(xq − xz) · sx`. `so` and `zo` are those
of the result. Scales are float32 values; all real arithmetic is float64. Sums of products of integers are exact, in
int32 (the proof that they fit is part of `convert`; `coverage()` shows it). Each result is rounded once, half to even,
then the zero point is added and the result clamped to the range of its grid:

    out = clamp(round(acc · M) + zo, qmin, qmax)

A relu or a clamp after an op narrows that range and costs nothing. A bias is an integer of the accumulator's scale. A
result that is read in float is `f32(acc · sx·sw)`; there the integers end.

The multiplier `M` has three forms. It is a float64 number; with `multiplier="fixed"` what hardware has, an int32 mantissa
and a shift, `M ≈ mantissa · 2^-shift`, multiplied and rounded in 64-bit integers; with "shift" a power of two alone, where
scales are. A target may compute otherwise: its `arithmetic` (`quantc.spec.arithmetic.Arithmetic`) has the form of the
multiplier, the rounding (half to even, half up, half away from zero, truncate, floor), the width of the accumulator, and
whether results saturate. The integer form of a program prepared for its backend is that one, and says so in its ops.

```python
fixed = qc.convert(prepared, to="integer", multiplier="fixed")
constants = dict(fixed.module.named_buffers())
assert constants["conv2d_mantissa"].dtype == torch.int32
assert torch.equal(fixed(batches[0]), integer(batches[0]))  # here; near ties they may be a step apart
```

The default style is "fused": one op of `torch.ops.quantc` for each match. With `style="decomposed"` no such op is left: each
is written out in ATen primitives, with `out_dtype` for matrix products and convolutions, and the same bits. That is the
form to hand on: a `.pt2` file of it loads without quantc, one of the fused style only after `import quantc`. The proof of
the accumulators is for the fused style.

```python
decomposed = qc.convert(prepared, to="integer", style="decomposed")
assert not any("quantc" in str(node.target) for node in decomposed.graph.nodes)
assert torch.equal(decomposed(batches[0]), integer(batches[0]))
```

## What stays in float

Ops that no rule took, and those below that have no integer form, stay float. Quantize and dequantize ops around them are
written out in ATen. `coverage()` lists these ops with the reason, and nothing of what was written out. A move (a reshape, a
pool, a join on one grid) whose result is read in float still computes on integers, which are dequantized after it: the bits
are the same.

Where integers begin, a float32 `x` is quantized as the Q/DQ form does it, in float32: `round(x · (1/s)) + z`, clamped. NaN
would become some integer there, in both forms: so a program that is called with NaN or infinity in an input refuses it.

How far the two forms are apart, op by op, each fed the same integers, is for `qc.agreement` to say:

```python
print(qc.agreement(qc.convert(prepared), integer, batches))
```

Whole programs are another matter: float32 turns a few roundings of the Q/DQ form over, and the ops that follow multiply
them. Computed in float64, and with biases on the accumulator's grid (the pass `snap-bias`), the Q/DQ form of ResNet-18,
MobileNetV2 and BERT-like encoders on qnnpack, where nothing is left in float, gives the results of the integer form to the
last bits of float32.

## Single ops

`quantc.reference` has `quantized_linear`, `quantized_conv2d` and `quantized_add` as functions of integers and scales, without
a program:

```python
from quantc.reference import quantized_add

x, y = torch.tensor([10, 20, 127], dtype=torch.int8), torch.tensor([1, 2, 3], dtype=torch.int8)
assert quantized_add(x, 0.5, 0, y, 0.25, 0, 0.5, 0).tolist() == [10, 21, 127]  # 5.25 / 0.5 is a tie: to even
```
"""

SEMANTICS_INTRO = """\
## What each op computes

By the op a match begins with; a clamp or another activation after it is part of it. *Deviation* is the most by which a result
can be off beyond the rounding of the exact value; where there is none, it is not off at all.
"""

DYNAMIC_INTRO = """\
## With scales found as the program runs

Ops that are quantized dynamically read float and yield float. Each finds the scale of what it reads, quantizes it, sums
integers exactly and brings the sum back: `f32((acc + bias_q) · (sx·sw))`. One scale serves the whole tensor, or one each
row along the last axis (per token), where that is the axis that is summed over. Fused, all of it is one op: no integers go
from op to op. `multiplier="fixed"` changes nothing here. Quantizing is as in the Q/DQ form, in float32: `round(x · (1/sx)) +
xz`, and per token `round(x · (1/sx) + xz)`, as torch's op for tokens has it.

How many steps a bias is depends on the input, so it is added in float64, whatever its size. What is added and is no
constant vector is added in float. An empty batch, where sizes allow one, gives an empty result. NaN, infinity, and a range wider than float32 can
measure have no scale: all that shares it becomes NaN.
"""

OPS_INTRO = f"""\
## The ops of `torch.ops.{NAMESPACE}`

`multiplier`, `shift`, `out_zero_point`, `qmin`, `qmax` and `dtype` say how the accumulator becomes the result; `shift` is
there in the fixed form only, and with the dtype float32 the result is `f32(acc · multiplier)`. `rounding` and `saturate` are
given where the target has others than half to even, and clamping. Each op is defined by a
reference in ATen primitives, which is what it is decomposed into; `parts` says into how many parts a kernel splits a sum to
keep it exact in float32, and never changes a bit.
"""

RULES_INTRO = """\
## Rules without an integer form

All other rules of these backends have one. An op of theirs still stays in float where it could not be exact, such as a
clamp that is read in float and whose bounds do not lie on the grid, or where a size that it takes is not known before it
runs; `coverage()` says so.
"""


def integer_page(provider: str = "quantc") -> str:
    """docs/integer-form.md, with the rules of one distribution's backends."""
    return "\n".join([INTRO, *_semantics(), *_ops(), *_rules(provider)])


def semantics_rows() -> list[Semantics]:
    """Every row of the tables once, in the order of the modules that fill them."""
    load()
    rows = list(dict.fromkeys([*SEMANTICS.values(), *DYNAMIC.values()]))
    return sorted(rows, key=lambda row: MODULES.index(row.write.__module__.removeprefix("quantc.integer.")))


def _semantics() -> Iterator[str]:
    for intro, timing in ((SEMANTICS_INTRO, Timing.STATIC), (DYNAMIC_INTRO, Timing.DYNAMIC)):
        yield intro
        found = [row for row in semantics_rows() if row.timing is timing]
        rows = [(", ".join(f"`{name}`" for name in row.ops), row.formula, row.deviation) for row in found]
        yield from table(("ops", "on integers", "deviation"), rows)


def _ops() -> Iterator[str]:
    yield OPS_INTRO
    rows = [(f"`{op.schema}`", op.summary, op.formula, op.deviation) for _, op in sorted(OPS.items())]
    yield from table(("schema", "what it is", "formula", "deviation"), rows)


def _rules(provider: str) -> Iterator[str]:
    from quantc.backends.rules import NOT_INTEGER

    yield RULES_INTRO
    backends = [backend for _, backend in BACKENDS.provided_by(provider)]
    rows = [
        (backend.name, f"`{rule.name}`", NOT_INTEGER.get(rule.name, ""))
        for backend in backends
        if isinstance(backend, Backend)
        for rule in backend.table
        if "integer" not in rule.supports
    ]
    yield from table(("backend", "rule", "why"), rows)
