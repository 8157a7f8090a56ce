"""The decomposed style: ATen primitives and `out_dtype`, nothing else, with the bits of the fused ops."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._higher_order_ops.out_dtype import out_dtype
from torch._ops import OpOverload

import quantc as qc
from quantc.errors import QuantcError, RefusedError
from quantc.hooks import Guard, Truth, Verify
from quantc.integer.library import OPS, op_of
from quantc.integer.qdq_decomposition import SPELLED, open_boundaries
from quantc.ir.program import Program, Stage
from quantc.ir.size_expressions import evaluate
from quantc.ir.types import TensorType, type_of, type_of_value
from quantc.pipeline.numeric_guard import GuardRecorder
from quantc.pipeline.pipeline import Pipeline
from quantc.qdq import float_ops as float_formats
from quantc.qdq.registration import decomposed_ops
from quantc.text.parser import parse
from tests.support.integer_calls import CALLS, IDS, Call
from tests.support.integer_models import BACKENDS, NAMES, Multiplier, converted, prepared

PASS = Pipeline.parse("decompose-integer")
every_model = pytest.mark.parametrize("name", NAMES)


def calls(program: Program) -> list[Any]:
    return [node.target for node in program.nodes() if node.op == "call_function"]


def same_bits(left: Any, right: Any) -> bool:
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(same_bits(*pair) for pair in zip(left, right, strict=True))
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    wide = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
    kind = wide.get(left.dtype)
    return torch.equal(left, right) if kind is None else torch.equal(left.view(kind), right.view(kind))


# -- whole programs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "multiplier"), [*((name, "float64") for name in BACKENDS), ("qnnpack", "fixed")])
@every_model
def test_decomposed_is_aten_with_the_bits_of_fused(name: str, backend: str, multiplier: Multiplier) -> None:
    fused, inputs = converted(name, backend, "fused", multiplier=multiplier)
    decomposed, _ = converted(name, backend, "decomposed", multiplier=multiplier)
    decomposed.verify()
    assert any(op_of(target) is not None for target in calls(fused))
    for target in calls(decomposed):
        known = target in (out_dtype, operator.getitem, torch.ops.higher_order.cond)
        assert known or (isinstance(target, OpOverload) and target.namespace == "aten"), target
    for sign in (1, -1):
        given_inputs = tuple(sign * value for value in inputs)
        assert torch.equal(decomposed(*given_inputs), fused(*given_inputs))


@pytest.mark.parametrize(
    ("name", "backend", "multiplier"),
    [
        ("residual", "x86", "float64"),
        ("residual", "executorch", "fixed"),
        ("encoder", "qnnpack", "float64"),
        ("encoder", "qnnpack", "fixed"),
        ("pools", "qnnpack", "fixed"),
    ],
)
def test_a_dynamic_batch_stays_dynamic(name: str, backend: str, multiplier: Multiplier) -> None:
    fused, inputs = converted(name, backend, "fused", multiplier=multiplier, dynamic=True)
    decomposed, _ = converted(name, backend, "decomposed", multiplier=multiplier, dynamic=True)
    decomposed.verify()
    for rows in (1, 2, len(inputs[0])):
        part = tuple(value[:rows] for value in inputs)
        assert torch.equal(decomposed(*part), fused(*part))


def test_products_and_convolutions_say_in_which_type_they_add_up() -> None:
    decomposed, _ = converted("residual", "qnnpack", "decomposed")
    inner = [node.args[:2] for node in decomposed.nodes() if node.target is out_dtype]
    assert inner.count((torch.ops.aten.convolution.default, torch.int32)) == 3
    assert inner.count((torch.ops.aten.mm.default, torch.int32)) == 1


@pytest.mark.parametrize(
    ("name", "dynamic"), [("residual", False), ("encoder", False), ("pools", False), ("encoder", True)]
)
def test_types_are_those_of_the_values(name: str, dynamic: bool) -> None:
    program, inputs = converted(name, "qnnpack", "decomposed", multiplier="fixed", dynamic=dynamic)
    recorder = GuardRecorder(program)
    recorder.run(*inputs, enable_io_processing=False)
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        kind = type_of(node)
        assert kind is not None, node
        if isinstance(kind, TensorType):
            assert sized(kind, len(inputs[0])) == type_of_value(recorder.values[node.name]), node


def sized(kind: TensorType, batch: int) -> TensorType:
    shape = [evaluate(size, {"batch": batch}) if isinstance(size, str) else size for size in kind.shape]
    assert None not in shape, kind
    return TensorType(kind.dtype, tuple(int(size) for size in shape if size is not None))


@every_model
def test_names_rows_and_origins_follow(name: str) -> None:
    fused, _ = converted(name, "qnnpack", "fused")
    decomposed, _ = converted(name, "qnnpack", "decomposed")
    paths = {graph: path for path, graph in fused.graphs()}
    ops = [node for node in fused.nodes() if op_of(node.target) is not None]
    assert ops
    for node in ops:
        twin = decomposed.node(f"{paths[node.graph]}/{node.name}".lstrip("/"))
        assert type_of(twin) == type_of(node)
        ours, theirs = decomposed.plan, fused.plan
        assert ours.claims.get(twin) == theirs.claims.get(node)
        assert ours.lowered.get(twin) == theirs.lowered.get(node)
        assert decomposed.origins.get(twin) == fused.origins.get(node)
    assert any(fused.plan.lowered.get(node) is not None for node in ops)


def test_the_pass_keeps_every_bit_and_runs_once() -> None:
    fused, _ = converted("residual", "qnnpack", "fused")
    guard = Guard()
    written = PASS.run(fused.clone(), [Truth(), Verify(), guard])
    assert guard.checked == ["decompose-integer"]
    assert written.log[-1].changed
    again = PASS.run(written.clone(), [Truth()])
    assert not again.log[-1].changed
    assert str(again) == str(written)


def test_a_decomposed_program_is_saved_and_loaded(tmp_path: Any) -> None:
    decomposed, inputs = converted("residual", "qnnpack", "decomposed")
    decomposed.save(tmp_path / "program.qc")
    loaded = qc.load(tmp_path / "program.qc")
    assert torch.equal(loaded(*inputs), decomposed(*inputs))


# -- every op --------------------------------------------------------------------------------------------------


class Calling(nn.Module):
    """Calls one op; its first tensors are inputs, the others constants."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        for index, value in enumerate(call.args[1:], 1):
            if isinstance(value, Tensor):
                self.register_buffer(f"arg_{index}", value)

    def forward(self, *first: Tensor) -> Any:
        rest = [getattr(self, f"arg_{index}", value) for index, value in enumerate(self.call.args[1:], 1)]
        lead = list(first) if isinstance(self.call.args[0], list) else first[0]
        return self.call.target(lead, *rest)


def test_every_op_has_a_call() -> None:
    assert {call.op for call in CALLS} == set(OPS)


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_every_op_can_be_written_out(call: Call) -> None:
    first = call.args[0]
    inputs = tuple(first) if isinstance(first, list) else (first,)
    program = qc.capture(Calling(call).eval(), inputs, method="export")
    program.stage = Stage.LOWERED
    PASS.run(program, [Truth(), Verify()])
    assert not [target for target in calls(program) if op_of(target) is not None]
    expected = call.target(*call.args)
    result = program(*inputs)
    assert same_bits(result, expected)
    assert same_bits(OPS[call.op].reference(*call.args), expected)


# -- quantize and dequantize -----------------------------------------------------------------------------------

ops = decomposed_ops()
NARROW = [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
RANGES = [(0, 255, torch.uint8), (-128, 127, torch.int8), (-127, 127, torch.int8), (-32768, 32767, torch.int16)]
scales = st.floats(2.0**-30, 2.0**20).map(lambda value: float(torch.tensor(value, dtype=torch.float32)))
ranges = st.sampled_from(RANGES)


def numbers(scale: float, dtype: torch.dtype, seed: int) -> Tensor:
    """Ordinary numbers, ties and their neighbours, huge ones, infinities, zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    ordinary = torch.randn(600, generator=generator) * scale * 100
    ties = (torch.arange(-300, 300) + 0.5) * scale
    beside = torch.nextafter(ties, torch.full_like(ties, math.inf))
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, 1e38, scale, -scale] * 6)
    return torch.cat([ordinary, ties, beside, special]).reshape(6, -1).to(dtype)


def levels(limits: tuple[int, int, torch.dtype], seed: int) -> Tensor:
    low, high, dtype = limits
    return torch.randint(low, high + 1, (6, 310), generator=torch.Generator().manual_seed(seed)).to(dtype)


def spelled(op: OpOverload) -> Any:
    return SPELLED[str(op).removeprefix("quantized_decomposed.")]


def test_every_op_of_torch_that_quantizes_is_spelled_out() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("quantized_decomposed::")]
    short = {name.removeprefix("quantized_decomposed::") for name in names}
    known = [name for name in short if not name.endswith("out")]  # which ExecuTorch adds, if anybody imports it
    wanted = [name for name in known if "quantize_per_" in name or name.startswith("choose_qparams")]
    own = {f"quantc.{name}.default" for name in ("choose_qparams", "quantize_float", "dequantize_float")}
    assert {name if "." in name else f"{name}.default" for name in wanted} | own == set(SPELLED)


@settings(max_examples=40)
@given(scales, ranges, st.sampled_from(FLOATS), st.integers(-200, 200), st.integers(0, 99))
def test_quantizing_a_whole_tensor(scale: float, limits: Any, dtype: torch.dtype, offset: int, seed: int) -> None:
    x, zero_point = numbers(scale, dtype, seed), max(limits[0], min(offset, limits[1]))
    expected = ops.quantize_per_tensor.default(x, scale, zero_point, *limits)
    assert same_bits(spelled(ops.quantize_per_tensor.default)(x, scale, zero_point, *limits), expected)
    for shape in ([], [1]):
        given_scale, given_zero = torch.tensor(scale).reshape(shape), torch.tensor(zero_point).reshape(shape)
        result = spelled(ops.quantize_per_tensor.tensor)(x, given_scale, given_zero, *limits)
        assert same_bits(result, expected)
    bounds = [torch.tensor(bound) for bound in limits[:2]]
    result = spelled(ops.quantize_per_tensor.tensor2)(x, given_scale, given_zero, *bounds, limits[2])
    assert same_bits(result, expected)


@settings(max_examples=40)
@given(scales, ranges, st.sampled_from([None, *FLOATS]), st.integers(-200, 200), st.integers(0, 99))
def test_dequantizing_a_whole_tensor(scale: float, limits: Any, out: Any, offset: int, seed: int) -> None:
    q, zero_point = levels(limits, seed), max(limits[0], min(offset, limits[1]))
    expected = ops.dequantize_per_tensor.default(q, scale, zero_point, *limits, out_dtype=out)
    result = spelled(ops.dequantize_per_tensor.default)(q, scale, zero_point, *limits, out_dtype=out)
    assert same_bits(result, expected)
    given_scale, given_zero = torch.tensor([scale]), torch.tensor([zero_point])
    result = spelled(ops.dequantize_per_tensor.tensor)(q, given_scale, given_zero, *limits, out_dtype=out)
    assert same_bits(result, expected)


@settings(max_examples=30)
@given(scales, ranges, st.sampled_from(FLOATS), st.sampled_from([0, 1, -1]), st.integers(0, 99))
def test_channels(scale: float, limits: Any, dtype: torch.dtype, axis: int, seed: int) -> None:
    x = numbers(scale, dtype, seed)
    count = x.shape[axis]
    steps = torch.linspace(0.5, 3, count) * scale
    zeros = torch.arange(count).remainder(limits[1] - limits[0]) + limits[0]
    args = (steps, zeros, axis, *limits)
    q = ops.quantize_per_channel.default(x, *args)
    assert same_bits(spelled(ops.quantize_per_channel.default)(x, *args), q)
    for offsets in (zeros, None):
        args = (steps, offsets, axis, *limits)
        expected = ops.dequantize_per_channel.default(q, *args)
        assert same_bits(spelled(ops.dequantize_per_channel.default)(q, *args), expected)


@settings(max_examples=30)
@given(scales, ranges, st.sampled_from(FLOATS), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 99))
def test_tokens_and_groups(scale: float, limits: Any, dtype: torch.dtype, wide: torch.dtype, seed: int) -> None:
    x = numbers(scale, dtype, seed)
    steps = (torch.linspace(0.5, 3, 6) * scale).reshape(6, 1).to(wide)
    zeros = (torch.arange(6) * 3).reshape(6, 1)
    q = ops.quantize_per_token.default(x, steps, zeros, *limits)
    assert same_bits(spelled(ops.quantize_per_token.default)(x, steps, zeros, *limits), q)
    expected = ops.dequantize_per_token.default(q, steps, zeros, *limits, torch.float32)
    assert same_bits(spelled(ops.dequantize_per_token.default)(q, steps, zeros, *limits, torch.float32), expected)
    for size, groups in ((x.shape[1] // 2, 2), (5000, 1)):
        args = (torch.cat([steps] * groups, 1), torch.cat([zeros] * groups, 1), *limits, size)
        q = ops.quantize_per_channel_group.default(x, *args)
        assert same_bits(spelled(ops.quantize_per_channel_group.default)(x, *args), q)
        expected = ops.dequantize_per_channel_group.default(q, *args, torch.float32)
        assert same_bits(spelled(ops.dequantize_per_channel_group.default)(q, *args, torch.float32), expected)


@settings(max_examples=30)
@given(scales, st.sampled_from(NARROW), st.sampled_from([None, 0, 1, -1]), st.integers(0, 99))
def test_narrower_floats(scale: float, dtype: torch.dtype, axis: int | None, seed: int) -> None:
    x = numbers(scale, torch.float32, seed)
    steps = None if dtype == torch.float16 else torch.tensor(scale)
    if steps is not None and axis is not None:
        steps = torch.linspace(0.5, 3, x.shape[axis]) * scale
    q = float_formats.QUANTIZE(x, steps, axis, dtype)
    assert same_bits(SPELLED["quantc.quantize_float.default"](x, steps, axis, dtype).float(), q.float())
    expected = float_formats.DEQUANTIZE(q, steps, axis)
    assert same_bits(SPELLED["quantc.dequantize_float.default"](q, steps, axis), expected)


class Twice(nn.Module):
    """Quantizes by channel, and dequantizes the result twice in the same way and once in another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.1, 0.2, 0.3]))
        self.register_buffer("zero", torch.tensor([1, 0, -3]))

    def forward(self, x: Tensor) -> Any:
        q = ops.quantize_per_channel.default(x, self.scale, self.zero, 1, -128, 127, torch.int8)
        same = [ops.dequantize_per_channel.default(q, self.scale, self.zero, 1, -128, 127, torch.int8) for _ in "ab"]
        return same[0] + same[1] * ops.dequantize_per_tensor.default(q, 0.5, 3, -128, 127, torch.int8)


@pytest.mark.parametrize("dynamic", [False, True])
def test_boundaries_of_a_program_are_opened_and_those_that_agree_merged(dynamic: bool) -> None:
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(3))
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    program = qc.capture(Twice().eval(), (x,), dynamic_shapes=shapes)
    expected = program(x)
    assert open_boundaries(program) == 4
    program.verify()
    targets = calls(program)
    assert all(target.namespace == "aten" for target in targets)
    assert targets.count(torch.ops.aten.sub.Tensor) == 2
    assert torch.equal(program(x), expected)
    assert open_boundaries(program) == 0


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "known"), [("style", "decomposed, fused"), ("multiplier", "fixed, float64")])
def test_an_unknown_option_lists_the_known(option: str, known: str) -> None:
    program, _ = prepared("branches", "qnnpack")
    chosen: dict[str, Any] = {option: "other"}
    with pytest.raises(QuantcError, match=f"unknown {option} 'other'") as caught:
        qc.convert(program, to="integer", **chosen)
    assert known in str(caught.value)
    with pytest.raises(
        QuantcError, match=f"integer does not take {option}=other: .*{known.split(', ', maxsplit=1)[0]}"
    ):
        Pipeline.parse(f"integer{{{option}=other}}")


def test_the_style_is_an_option_of_the_pipeline() -> None:
    assert "decompose-integer" in str(qc.pipelines.integer(style="decomposed"))
    assert "decompose-integer" not in str(qc.pipelines.integer())
    assert Pipeline.parse("integer{style=decomposed}") == qc.pipelines.integer(style="decomposed")


UNKNOWN = """program "Unknown" stage=lowered method=export mode=eval
  input %x
  const %m = "m" : f64[] buffer
  %requantize : u8[2] = quantc.linear.default(%x, 3, %x, None, None, 0, %m, None, 0, 0, 255, u8)
  output (%requantize,)
"""


def test_unknown_types_are_refused() -> None:
    with pytest.raises(RefusedError, match="the type of x is unknown"):
        PASS.run(parse(UNKNOWN))
