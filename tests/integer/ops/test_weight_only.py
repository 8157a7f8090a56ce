"""Weights that are stored quantized, in ops that compute in float: the numbers of the float model with other weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.config.config import QuantConfig
from quantc.errors import AnnotationError, CalibrationError, DataError
from quantc.ir.decisions import FLOAT
from quantc.ir.program import Program
from quantc.qdq.ops import belongs_to_qdq
from quantc.spec.formats import PerChannel, PerGroup, PerTensor, Timing
from quantc.spec.spec import (
    FP8_E4M3_WEIGHT,
    FP8_E5M2_WEIGHT,
    FP16_WEIGHT,
    INT2_GROUP,
    INT4_GROUP,
    INT4_GROUP_SYMMETRIC,
    INT8_WEIGHT_ONLY,
    QuantSpec,
)
from tests.support import fake_quantized as fake

pytestmark = pytest.mark.usefixtures("no_grad")


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def whole(*shape: int) -> Tensor:
    return torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(5))


LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(64, 24), floats(3, 64)),
    "linear-3d": (lambda: nn.Linear(64, 24, bias=False), floats(2, 3, 64)),
    "conv1d": (lambda: nn.Conv1d(32, 8, 3, padding=1), floats(2, 32, 9)),
    "conv2d": (lambda: nn.Conv2d(32, 8, 3, stride=2), floats(2, 32, 9, 9)),
    "conv2d-grouped": (lambda: nn.Conv2d(64, 8, 3, groups=2), floats(2, 64, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(32, 4, 2), floats(1, 32, 4, 4, 4)),
    "conv-transpose1d": (lambda: nn.ConvTranspose1d(32, 8, 3), floats(2, 32, 5)),
    "conv-transpose2d": (lambda: nn.ConvTranspose2d(32, 8, 2, stride=2), floats(2, 32, 5, 5)),
    "conv-transpose-grouped": (lambda: nn.ConvTranspose2d(64, 8, 2, groups=2), floats(2, 64, 5, 5)),
    "embedding": (lambda: nn.Embedding(40, 64), whole(3, 7)),
    "embedding-bag": (lambda: nn.EmbeddingBag(40, 64, mode="mean"), whole(3, 7)),
    "lstm": (lambda: nn.LSTM(64, 32, batch_first=True), floats(2, 5, 64)),
    "gru": (lambda: nn.GRU(64, 32, bidirectional=True), floats(5, 2, 64)),
    "lstm-cell": (lambda: nn.LSTMCell(64, 32), floats(3, 64)),
}
SUMMED_FIRST = ("conv-transpose1d", "conv-transpose2d", "conv-transpose-grouped")
"""The layers whose weight has its inputs on axis 0."""


def built(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(11)
    build, x = LAYERS[name]
    return build().eval(), x


def quantized(model: nn.Module, x: Tensor, spec: QuantSpec) -> Program:
    """With no batches: weights are all there is to know."""
    return qc.quantize(model, (x,), config=QuantConfig().set_all(spec)).program


def with_weights(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """The float model with other weights; biases stay."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        if parameter.dim() > 1:
            parameter.data = change(parameter.data)
    return other


def equal(found: Any, right: Any) -> bool:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(right), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# -- by hand -----------------------------------------------------------------------------------------------------


def fp8(w: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale for each row that brings its largest weight to the largest number of the format."""
    largest = torch.finfo(dtype).max
    scale = (w.abs().amax(dim=tuple(range(1, w.dim())), keepdim=True) / largest).clamp(min=2.0**-23)
    return (w * (1.0 / scale)).clamp(-largest, largest).to(dtype).float() * scale


@pytest.mark.parametrize("name", LAYERS)
def test_bytes_by_channel(name: str) -> None:
    model, x = built(name)
    axis = 1 if name in SUMMED_FIRST[:2] else 0
    right = with_weights(model, lambda w: fake.weight_by_channel(w, axis))(x)
    assert equal(quantized(model, x, INT8_WEIGHT_ONLY.but(qmin=-127))(x), right)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("bits", "size"), [("int4", 32), ("int4", 16), ("int2", 8), ("int8", 32)])
def test_few_bits_by_group(name: str, bits: str, size: int) -> None:
    model, x = built(name)
    spec = INT4_GROUP_SYMMETRIC.but(dtype=bits, granularity=PerGroup(size=size), observe="minmax")
    axis = 0 if name in SUMMED_FIRST else 1
    right = with_weights(model, lambda w: fake.weight_by_group(w, size, spec.qmin, spec.qmax, axis=axis))(x)
    assert equal(quantized(model, x, spec)(x), right)


@pytest.mark.parametrize("name", LAYERS)
def test_halves(name: str) -> None:
    model, x = built(name)
    assert equal(quantized(model, x, FP16_WEIGHT)(x), with_weights(model, lambda w: w.half().float())(x))


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in SUMMED_FIRST])
@pytest.mark.parametrize(
    ("spec", "dtype"), [(FP8_E4M3_WEIGHT, torch.float8_e4m3fn), (FP8_E5M2_WEIGHT, torch.float8_e5m2)], ids=str
)
def test_floats_of_a_byte(name: str, spec: QuantSpec, dtype: torch.dtype) -> None:
    model, x = built(name)
    assert equal(quantized(model, x, spec)(x), with_weights(model, lambda w: fp8(w, dtype))(x))


def stored(program: Program) -> dict[str, np.ndarray]:
    """What a program keeps, by name, as NumPy has it."""
    return {name: np.asarray(tensor) for name, tensor in program.module.state_dict().items()}


@pytest.mark.parametrize("spec", [INT4_GROUP, INT2_GROUP], ids=str)
@pytest.mark.parametrize("name", ["linear", "embedding", "lstm", "conv2d"])
def test_what_is_stored_is_all_there_is(name: str, spec: QuantSpec) -> None:
    """Levels, scales and zero points taken out of the program, put together in NumPy: the same numbers."""
    model, x = built(name)
    program = quantized(model, x, spec)
    kept = stored(program)
    by_hand = copy.deepcopy(model)
    for path, parameter in by_hand.named_parameters():
        if parameter.dim() < 2:
            continue
        rows = [key for key in kept if key.endswith("quantized") and path.replace(".", "_") in key.replace(".", "_")]
        (levels,) = (kept[key].astype(np.float64) for key in rows)
        scale, zero = (kept[f"{path}_{what}"].astype(np.float64) for what in ("scale", "zero_point"))
        assert levels.min() >= spec.qmin
        assert levels.max() <= spec.qmax
        mantissa, _ = np.frexp(scale)
        assert np.all(mantissa * 2**7 == np.round(mantissa * 2**7)), "seven bits, as bfloat16 holds them"
        groups = levels.reshape(*scale.shape, -1)
        real = ((groups - zero[..., None]) * scale[..., None]).astype(np.float32).reshape(levels.shape)
        moved = torch.from_numpy(real)
        if parameter.dim() > 2:
            shape = parameter.movedim(1, -1).shape
            moved = moved.reshape(shape).movedim(-1, 1)
        parameter.data = moved
    assert equal(program(x), by_hand(x))


GROUP_LAWS = settings(max_examples=30)


@GROUP_LAWS
@given(
    rows=st.integers(1, 6),
    groups=st.integers(1, 4),
    size=st.sampled_from([2, 4, 16, 32]),
    bits=st.sampled_from(["int2", "int4", "int8"]),
    scheme=st.sampled_from(["affine", "symmetric"]),
    exponent=st.integers(-12, 12),
)
def test_no_weight_is_farther_than_half_a_step(
    rows: int, groups: int, size: int, bits: str, scheme: str, exponent: int
) -> None:
    """Whatever the size, the bits and the scale; groups do not know of each other."""
    generator = torch.Generator().manual_seed(rows * 100 + groups)
    layer = nn.Linear(groups * size, rows, bias=False).eval()
    scales = 2.0 ** torch.randint(-6, 6, (rows, groups, 1), generator=generator).float()
    layer.weight.data = (torch.randn(rows, groups, size, generator=generator) * scales * 2.0**exponent).flatten(1)
    share = PerGroup(size=size)
    spec = INT4_GROUP_SYMMETRIC.but(dtype=bits, scheme=scheme, granularity=share, observe="minmax")
    program = quantized(layer, torch.eye(groups * size), spec)
    found = program(torch.eye(groups * size)).t().reshape(rows, groups, size)
    weight = layer.weight.reshape(rows, groups, size)
    if scheme == "affine":
        spread = weight.clamp(min=0).amax(-1, keepdim=True) - weight.clamp(max=0).amin(-1, keepdim=True)
    else:
        spread = 2 * weight.abs().amax(-1, keepdim=True)
    step = (spread / (spec.levels - 1)).clamp(min=2.0**-23)
    # a symmetric range has one level more below zero than above: the largest weight may be half a step beyond
    assert bool(((found - weight).abs() <= step * (0.5 if scheme == "affine" else 1.0) * 1.01).all())


# -- what is left alone ------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)
        self.a, self.b = nn.Linear(72, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.norm(self.conv(x))).mean(1).flatten(1)
        return self.b(torch.sigmoid(self.a(torch.cat([y, y], 1))) * 2)


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
def test_the_mode_needs_no_data_and_touches_weights_alone(backend: str) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), floats(2, 4, 8, 8)
    result = qc.quantize(model, (x,), backend=backend, mode="weight-only")
    techniques = {row.node: row.technique for row in result.report.coverage.rows}
    assert {name for name, technique in techniques.items() if technique} == {"conv2d", "linear", "linear_1"}
    assert set(techniques.values()) == {"weight-only", ""}
    assert all(row.reason for row in result.report.coverage.rows)
    ops = [node for node in result.program.nodes() if node.op == "call_function" and not belongs_to_qdq(node)]
    for node in ops:
        assert all(
            read.op != "call_function" or belongs_to_qdq(read) or not _is_stored(read) for read in node.all_input_nodes
        )
    assert result.report.calibration is None
    assert result.report.comparison is not None
    assert result.report.comparison.sqnr > 40


def _is_stored(node: fx.Node) -> bool:
    return "quantize" in str(node.target)


def test_a_layer_that_is_used_twice_is_stored_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(40, 32)

        def forward(self, x: Tensor) -> Any:
            return nn.functional.linear(self.words(x), self.words.weight)

    model, x = Tied().eval(), whole(2, 5)
    for spec in (INT8_WEIGHT_ONLY, INT4_GROUP, FP16_WEIGHT):
        program = quantized(model, x, spec)
        assert len([name for name in stored(program) if name.endswith("quantized")]) == 1
        table = program.module.state_dict()
        assert not [
            name for name, tensor in table.items() if tensor.shape == (40, 32) and tensor.dtype == torch.float32
        ]


# -- bad input ---------------------------------------------------------------------------------------------------


def refused(model: nn.Module, x: Tensor, config: QuantConfig, **how: Any) -> AnnotationError:
    with pytest.raises(AnnotationError) as caught:
        qc.quantize(model, (x,), config=config, **how)
    return caught.value


def test_groups_that_do_not_divide_are_all_named_at_once_and_those_that_would() -> None:
    model = nn.Sequential(nn.Linear(48, 40), nn.Linear(40, 64), nn.Linear(64, 8)).eval()
    error = refused(model, floats(2, 48), QuantConfig().set_all(INT4_GROUP))
    assert "groups of 32 do not divide the 48 elements of axis 1 of f32[40,48]" in error.what
    assert "linear_1 (1 : Linear): groups of 32 do not divide the 40 elements" in str(error.where)
    assert "linear_2" not in str(error.where)
    assert "groups of 8 or 4 or 2 divide all of them" in str(error.advice)
    fitting = INT4_GROUP.but(granularity=PerGroup(size=8))
    qc.quantize(model, (floats(2, 48),), config=QuantConfig().set_all(fitting))


def test_groups_of_a_depthwise_convolution_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 32, 1)).eval()
    error = refused(model, floats(1, 8, 6, 6), QuantConfig().set_all(INT4_GROUP.but(granularity=PerGroup(size=8))))
    assert "groups of 8 do not divide the only element of axis 1 of f32[8,1,3,3]" in error.what
    assert "conv2d (0 : Conv2d)" in str(error.where)
    assert "conv2d_1" not in str(error.where)
    assert "INT8_WEIGHT_ONLY" in str(error.advice)


def test_executorch_takes_no_narrow_floats() -> None:
    model, x = built("linear")
    error = refused(model, x, QuantConfig().set_all(FP16_WEIGHT), backend="executorch")
    assert "dtype must be int8 or int4, not fp16" in error.what


class Computed(nn.Module):
    """A layer whose weight comes from another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Any:
        return nn.functional.linear(self.a(x), self.b(x).mean(0).reshape(8, 8))


def test_a_weight_that_is_computed_stays_float_unless_it_is_asked_for() -> None:
    model, x = Computed().eval(), floats(4, 8)
    result = qc.quantize(model, (x,), mode="weight-only")
    rows = {row.node: row for row in result.report.coverage.rows}
    assert rows["linear_2"].technique == ""
    assert "no weight" in rows["linear_2"].reason
    assert rows["linear"].technique == rows["linear_1"].technique == "weight-only"
    error = refused(model, x, QuantConfig().set_node("linear_2", INT8_WEIGHT_ONLY), batches=[x])
    assert "nothing came of the config's rule node linear_2" in error.what
    assert "weights are constants" in str(error.advice)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("spec", [INT8_WEIGHT_ONLY, INT4_GROUP, FP16_WEIGHT, FP8_E4M3_WEIGHT], ids=str)
def test_a_weight_that_is_not_finite_is_named(spec: QuantSpec, bad: float) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)).eval()
    model[1].weight.data[2, 3] = bad  # type: ignore[operator]
    with pytest.raises(DataError) as caught:
        qc.quantize(model, (floats(2, 32),), config=QuantConfig().set_all(spec))
    assert "1 of 128 values of 1.weight are NaN or infinite" in caught.value.what
    assert "correct the model" in str(caught.value.advice)
    with pytest.raises(
        DataError, match=r"1 of 128 values of 1\.weight are NaN or infinite"
    ):  # float layers are no exception
        qc.quantize(model, (floats(2, 32),), config=QuantConfig().set_all(spec).set("1", FLOAT))


def test_a_config_that_makes_something_static_asks_for_batches() -> None:
    model, x = built("linear")
    with pytest.raises(CalibrationError, match="no batches were given, and the scales of linear:in0 come from data"):
        qc.quantize(model, (x,), mode="weight-only", config=QuantConfig().set_op("linear", qc.UINT8))


def test_the_axis_is_the_op_s_whatever_the_config_says() -> None:
    """Channels of a transposed convolution lie on axis 1; with groups on none, and then any axis serves a float op."""
    for name, axis in (("conv-transpose2d", 1), ("conv-transpose-grouped", 0), ("linear", 0)):
        model, x = built(name)
        prepared = qc.prepare(qc.capture(model, (x,)), "x86", config=QuantConfig().set_all(INT8_WEIGHT_ONLY))
        (group,) = prepared.plan.groups
        assert group.outcome.spec.granularity == PerChannel(axis=axis)  # type: ignore[union-attr]
        assert next(iter(prepared.plan.claims.rows.values())).timing is Timing.WEIGHT_ONLY
    whole_spec = INT8_WEIGHT_ONLY.but(granularity=PerTensor())
    model, x = built("linear")
    w = model.weight
    assert isinstance(w, Tensor)
    program = quantized(model, x, whole_spec)
    assert len({float(value) for value in np.unique(np.round(stored_levels(program), 6))}) <= 256


def stored_levels(program: Program) -> np.ndarray:
    (levels,) = (value for name, value in stored(program).items() if name.endswith("quantized"))
    return levels.astype(np.float64)
