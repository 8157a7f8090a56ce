"""Convolutions on x86: every kernel that offers itself for one, forced in turn, against the op of the integer form."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.backends.x86 import X86
from quantc.config.config import QuantConfig
from quantc.errors import AnnotationError, InputError
from quantc.integer.library import OPS
from quantc.spec.capability import Capability
from quantc.spec.formats import DType, Role, Scheme
from quantc.targets.kernels import costs
from quantc.targets.kernels.fbgemm_conv import ConvFbgemm
from quantc.targets.kernels.int8_conv import CURVES, Conv
from quantc.targets.kernels.int8_conv_transpose import Spreading
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_agreement import kernel_agreement
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernels_for
from quantc.targets.kernels.saturation import adds_in_16_bits
from tests.support.programs import Builder
from tests.targets.kernels.test_codegen import of_family

CLOSE = 2e-6
"""How far floats may be off, relative to the largest."""
MAX_LEVEL = 64
"""Of weights: two products by bytes then fit 16 bits, where processors without VNNI add them."""


@dataclass(frozen=True)
class Layer:
    """A convolution of bytes, as one op."""

    op: str
    shape: tuple[int, ...]
    """That of the weight."""
    window: tuple[Any, ...]
    out: tuple[Any, ...]
    """Zero point, bounds and dtype."""
    x_zero_point: int = 7
    bias: bool = True
    zero_points: int = 0
    """How large those of the weight may be; none if 0."""
    most: int = MAX_LEVEL
    """How large the levels of the weight may be."""
    factor: float = 1e-3
    seed: int = 0

    @property
    def outputs(self) -> int:
        groups = self.window[3]
        return self.shape[1] * groups if self.op == "conv_transpose" else self.shape[0]

    def arguments(self) -> tuple[Any, ...]:
        """What the op takes behind its input."""
        generator = torch.Generator().manual_seed(self.seed)
        weight = torch.randint(-self.most, self.most + 1, self.shape, generator=generator, dtype=torch.int8)
        transposed = self.op == "conv_transpose"
        scales = self.shape[1] if transposed and self.window[3] == 1 else 1 if transposed else self.shape[0]
        factors = (torch.rand(scales, generator=generator, dtype=torch.float64) + 0.5) * self.factor
        multiplier = factors.reshape(-1, *[1] * (len(self.shape) - 2))
        bias = torch.randint(-3000, 3000, [self.outputs], generator=generator, dtype=torch.int32)
        most, axis = self.zero_points, 1 if transposed else 0
        zeros = torch.randint(-most, most + 1, [self.shape[axis]], generator=generator) if most else None
        layer = (weight, zeros, bias if self.bias else None, *self.window, 1)
        return (self.x_zero_point, *layer, multiplier, None, *self.out)

    def input(self, *shape: int, seed: int = 1) -> Tensor:
        return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)

    def expected(self, x: Tensor) -> Tensor:
        made: Tensor = OPS[self.op].target(x, *self.arguments())
        return made

    def call(self, x: Tensor) -> Call:
        """A program with nothing but this op."""
        build = Builder()
        read = build.graph.placeholder("x")
        read.meta["val"] = x.to("meta")
        given = [
            build.constant(f"constant_{index}", value) if isinstance(value, Tensor) else value
            for index, value in enumerate(self.arguments())
        ]
        made = build.call(OPS[self.op].target, read, *given)
        return Call(build.program(made), made)

    def kernels(self, x: Tensor) -> tuple[list[Kernel], list[str]]:
        """Those that take it, and the reasons of the others."""
        taken: list[Kernel] = []
        reasons: list[str] = []
        for maker in kernels_for("x86")[self.op]:
            try:
                made = maker(self.call(x))
            except NoKernelError as refusal:
                reasons.append(str(refusal))
            else:
                assert isinstance(made, Kernel)
                taken.append(made)
        return taken, reasons

    def check(self, x: Tensor) -> list[str]:
        """All kernels against the op; the families that took it."""
        expected = self.expected(x)
        kernels, _ = self.kernels(x)
        for kernel in kernels:
            close(kernel(x), expected, kernel.name)
            weights = {name: kernel.get_buffer(name) for name in kernel.unpack(kernel._packed)}
            assert all(torch.equal(plain, weights[name]) for name, plain in kernel.unpack(kernel._packed).items())
        return [kernel.family for kernel in kernels]


def close(found: Tensor, expected: Tensor, what: str) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    if not expected.numel():
        return
    apart = float((found.double() - expected.double()).abs().max())
    if expected.dtype.is_floating_point:
        assert apart <= CLOSE * float(expected.abs().max()), what
    else:
        assert apart <= 1, what


FULL, RELU, NARROW = (11, 0, 255, torch.uint8), (11, 11, 255, torch.uint8), (100, 90, 180, torch.uint8)
FLOAT = (0, 0, 0, torch.float32)
ENDINGS = [FULL, RELU, NARROW, FLOAT]
ORDERS = ["in order", "channels last", "every second", "turned"]


def in_memory(x: Tensor, order: str) -> Tensor:
    """The same numbers, lying otherwise in memory."""
    if order == "channels last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if order == "every second":
        return torch.stack([x, x], dim=-1)[..., 0]
    return x.transpose(0, -1).contiguous().transpose(0, -1) if order == "turned" else x


@settings(max_examples=120)
@given(
    axes=st.integers(1, 3),
    groups=st.sampled_from(
        [(1, 3, 5), (1, 1, 4), (1, 8, 16), (2, 4, 6), (4, 4, 8), (8, 8, 8), (3, 9, 3), (16, 16, 16)]
    ),
    taps=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    stride=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    padding=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    dilation=st.lists(st.integers(1, 2), min_size=3, max_size=3),
    sizes=st.lists(st.sampled_from([1, 3, 5, 6, 7, 9]), min_size=3, max_size=3),
    batch=st.sampled_from([0, 1, 3]),
    out=st.sampled_from(ENDINGS),
    bias=st.booleans(),
    zero_point=st.sampled_from([0, 7, 128, 255]),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 99),
)
def test_convolutions(
    axes: int, groups: tuple[int, int, int], taps: Any, stride: Any, padding: Any, dilation: Any, sizes: Any,
    batch: int, out: Any, bias: bool, zero_point: int, order: str, seed: int,
) -> None:  # fmt: skip
    count, inputs, outputs = groups
    each = list(zip(taps, padding, dilation, sizes, strict=True))[:axes]
    each = [(k, pad, gap, max(n, gap * (k - 1) + 1 - 2 * pad)) for k, pad, gap, n in each]
    window = (stride[:axes], padding[:axes], dilation[:axes], count)
    layer = Layer("conv", (outputs, inputs // count, *taps[:axes]), window, out, zero_point, bias, seed=seed)
    x = in_memory(layer.input(batch, inputs, *(n for *_, n in each)), order)
    families = layer.check(x)
    usual = inputs > count and all(n >= gap and pad <= gap * (k - 1) for k, pad, gap, n in each)
    others = ["float32"] if out is FLOAT else ["fbgemm", "float32"]
    assert families in ([["onednn", *others]] if usual else [["onednn", *others], others[:-1]])


@settings(max_examples=60)
@given(
    axes=st.integers(1, 3),
    groups=st.sampled_from([(1, 3, 5), (1, 8, 4), (2, 4, 6), (4, 4, 4)]),
    taps=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    stride=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    padding=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    dilation=st.lists(st.integers(1, 2), min_size=3, max_size=3),
    output_padding=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    batch=st.sampled_from([0, 1, 2]),
    out=st.sampled_from(ENDINGS),
    bias=st.booleans(),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 99),
)
def test_transposed_convolutions(
    axes: int, groups: tuple[int, int, int], taps: Any, stride: Any, padding: Any, dilation: Any, output_padding: Any,
    sizes: Any, batch: int, out: Any, bias: bool, order: str, seed: int,
) -> None:  # fmt: skip
    count, inputs, outputs = groups
    reach = [gap * (k - 1) for k, gap in zip(taps, dilation, strict=True)]
    # the integer form pads what it has spread, which cannot be less than nothing
    padding = [min(pad, most) for pad, most in zip(padding, reach, strict=True)]
    rows = zip(output_padding, stride, dilation, strict=True)
    output_padding = [min(extra, max(step, gap) - 1) for extra, step, gap in rows]
    each = zip(sizes, stride, padding, reach, output_padding, strict=True)
    sizes = [max(n, 1 - (far + extra - 2 * pad) // step) for n, step, pad, far, extra in each]
    window = (stride[:axes], padding[:axes], output_padding[:axes], count, dilation[:axes])
    layer = Layer("conv_transpose", (inputs, outputs // count, *taps[:axes]), window, out, 7, bias, seed=seed)
    x = in_memory(layer.input(batch, inputs, *sizes[:axes]), order)
    families = layer.check(x)
    others = [] if out is FLOAT else ["fbgemm"]
    assert families in (
        [["onednn", *others]] if axes == 1 and not any(output_padding) else [["onednn", *others], others]
    )


def plain(out: Any = FULL, **more: Any) -> Layer:
    return Layer("conv", (6, 4, 3, 3), ([1, 1], [1, 1], [1, 1], 1), out, **more)


def test_single_items_and_wrong_ranks() -> None:
    layer = plain()
    x = layer.input(2, 4, 6, 5)
    for kernel in layer.kernels(x)[0]:
        assert torch.equal(kernel(x[0]), kernel(x)[0])
        with pytest.raises(InputError, match="goes over 2 axes"):
            kernel(x[0, 0])


def test_results_lie_in_order_unless_nobody_asks() -> None:
    layer = plain()
    x = layer.input(2, 4, 6, 5)
    for kernel in layer.kernels(x)[0]:
        assert kernel(x).is_contiguous()
        kernel.in_order = False
        assert kernel(x).is_contiguous(memory_format=torch.channels_last)
        close(kernel(x), layer.expected(x), kernel.name)


def test_sums_far_beyond_the_range_of_a_result() -> None:
    """fbgemm rounds to 32 bits before it cuts off: what does not fit would become the least level."""
    layer = plain(factor=2e4)
    x = layer.input(2, 4, 6, 5)
    kernels, reasons = layer.kernels(x)
    assert [kernel.family for kernel in kernels] == ["onednn", "float32"]
    assert any("32 bits do not hold" in reason for reason in reasons)
    layer.check(x)


def test_a_transposed_weight_can_be_had_back() -> None:
    spreading = Spreading((3, 4), (2, 3), (1, 0), (0, 1), (2, 1), 2, 3, 5)
    weight = torch.randint(-128, 128, (6, 5, 3, 4), dtype=torch.int8)
    assert torch.equal(spreading.weight(spreading.rows(weight)), weight)


def test_what_they_have_to_do_is_named() -> None:
    def work(layer: Layer, *shape: int) -> str:
        kernels, _ = layer.kernels(layer.input(*shape))
        assert len({str(kernel.work(layer.input(*shape))) for kernel in kernels}) == 1
        return str(kernels[0].work(layer.input(*shape)))

    assert work(plain(), 2, 4, 6, 5) == "conv2d 3x3 s1, 60 × 4→6, padding [1, 1]"
    depthwise = Layer("conv", (8, 1, 3, 3), ([2, 2], [1, 1], [1, 1], 8), FULL)
    assert work(depthwise, 1, 8, 8, 8) == "conv2d depthwise 3x3 s2, 16 × 8→8, padding [1, 1], 8 groups"
    spread = Layer("conv_transpose", (8, 2, 2, 2), ([2, 2], [0, 0], [0, 0], 1, [1, 1]), FULL)
    assert work(spread, 1, 8, 3, 3) == "conv_transpose2d 2x2 s2, 36 × 8→2"


# -- zero points of weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("groups", [(1, 4, 6), (2, 4, 6), (8, 8, 8)], ids=str)
@pytest.mark.parametrize("out", [FULL, RELU], ids=["all", "relu"])
def test_weights_with_a_zero_point_for_each_channel(axes: int, groups: tuple[int, int, int], out: Any) -> None:
    """Where levels minus zero points are bytes, those are multiplied; else only fbgemm takes the zero points itself."""
    count, inputs, outputs = groups
    window, shape = ([1] * axes, [1] * axes, [1] * axes, count), (outputs, inputs // count, *[3] * axes)
    near = Layer("conv", shape, window, out, zero_points=20, most=40)
    x = near.input(2, inputs, *[7] * axes)
    has_onednn = axes < 3 or inputs > count
    assert near.check(x) == (["onednn", "fbgemm", "float32"] if has_onednn else ["fbgemm"])
    far = Layer("conv", shape, window, out, zero_points=120)
    assert far.check(x) == (["fbgemm", "float32"] if has_onednn else ["fbgemm"])
    told = "zero points" if has_onednn else "groups of one channel over three axes"
    assert any(told in reason for reason in far.kernels(x)[1])


def test_transposed_weights_with_zero_points() -> None:
    window = ([2, 2], [1, 1], [1, 1], 1, [1, 1])
    near = Layer("conv_transpose", (4, 6, 3, 3), window, FULL, zero_points=20, most=40)
    x = near.input(2, 4, 5, 5)
    assert near.check(x) == ["onednn", "fbgemm"]
    assert not Layer("conv_transpose", (4, 6, 3, 3), window, FULL, zero_points=120).check(x)


def test_levels_that_could_saturate_are_not_centered_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `convert` has proven goes for the levels as they are stored."""
    layer = Layer("conv", (6, 4, 3, 3), ([1, 1], [1, 1], [1, 1], 1), FULL, zero_points=60)
    x = layer.input(2, 4, 6, 5)
    monkeypatch.setattr("quantc.targets.kernels.int8_conv_base.adds_in_16_bits", lambda: True)
    kernels, reasons = layer.kernels(x)
    assert [kernel.family for kernel in kernels] == ["float32"]
    assert sum("cut off on this processor" in reason for reason in reasons) == 2
    monkeypatch.setattr("quantc.targets.kernels.int8_conv_base.adds_in_16_bits", lambda: False)
    assert [kernel.family for kernel in layer.kernels(x)[0]] == ["onednn", "fbgemm", "float32"]


AFFINE = qc.INT8_WEIGHT.but(scheme=Scheme.AFFINE)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.add_(0.1)  # type: ignore[operator]
    return model.eval()


def test_the_backend_refuses_zero_points_of_weights() -> None:
    config = QuantConfig().set_op("conv2d", AFFINE, role="weight")
    program = qc.capture(small_model(), (torch.randn(2, 4, 9, 9),))
    with pytest.raises(AnnotationError, match="scheme must be symmetric, not affine"):
        qc.prepare(program, "x86", config=config)


def test_programs_of_other_backends_may_have_them() -> None:
    weights = Capability(role=Role.WEIGHT, dtypes=(DType.INT8,), granularities=("per-tensor", "per-channel"))
    backend = replace(X86, takes=(*X86.takes, weights))
    x = torch.randn(2, 4, 9, 9)
    config = QuantConfig().set_op("conv2d", AFFINE, role="weight")
    prepared = qc.prepare(qc.capture(small_model(), (x,)), backend, config=config)
    qc.calibrate(prepared, [x])
    module = qc.lower(qc.convert(prepared, reduce_range="activations"), "x86")
    rows = [row for row in module.placed if row.op == "conv"]
    assert [row.kernel for row in rows] == ["fbgemm qconv", "fbgemm qconv", ""]
    assert "with its zero points" in rows[-1].reason
    assert all(gap.steps <= 1 and gap.relative <= CLOSE for gap in kernel_agreement(module, x))


# -- activations ---------------------------------------------------------------------------------------------------


def lowered(model: nn.Module, x: Tensor, **options: Any) -> qc.Lowered:
    prepared = qc.prepare(qc.capture(model.eval(), (x,)), "x86")
    qc.calibrate(prepared, [x])
    made: qc.Lowered = qc.lower(qc.convert(prepared, reduce_range="weights"), "x86", **options)
    return made


def kernels_in(module: qc.Lowered) -> list[Kernel]:
    return [kernel for kernel in module.modules() if isinstance(kernel, Kernel)]


def is_curved(kernel: Kernel) -> bool:
    """Whether a convolution rounds what a curve makes of its result."""
    return isinstance(kernel, Conv) and kernel.post_op in CURVES.values() and not kernel.ending.is_float


@pytest.mark.parametrize("curve", [nn.Hardswish, nn.SiLU])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("axes", [1, 2])
def test_curves_after_transposed_convolutions(axes: int, groups: int, curve: Any) -> None:
    """These run as ordinary convolutions, whose results are put side by side after the curve."""
    torch.manual_seed(0)
    spread, after = ((nn.ConvTranspose1d, nn.Conv1d), (nn.ConvTranspose2d, nn.Conv2d))[axes - 1]
    model = nn.Sequential(spread(4, 8, 3, stride=2, output_padding=1, groups=groups), curve(), after(8, 4, 1))
    module, x = of_family(model, "onednn", 2, 4, *[5] * axes)  # which family it is by itself depends on the processor
    is_refused = adds_in_16_bits() and any("may be cut off on this processor" in row.why for row in module.placed)
    assert [is_curved(kernel) for kernel in kernels_in(module)].count(True) == (0 if is_refused else 1)
    found = kernel_agreement(module, x)
    assert all(gap.steps <= 1 and gap.relative <= CLOSE for gap in found), "\n".join(map(str, found))


@settings(max_examples=12)
@given(
    axes=st.integers(1, 3),
    groups=st.sampled_from([1, 4]),
    curve=st.sampled_from([nn.Hardswish, nn.SiLU]),
    spread=st.sampled_from([0.1, 1.0, 8.0]),
    seed=st.integers(0, 9),
)
def test_curves_are_done_before_anything_is_rounded(
    axes: int, groups: int, curve: Any, spread: float, seed: int
) -> None:
    torch.manual_seed(seed)
    make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    model = nn.Sequential(make(4, 8, 3, groups=groups), curve(), make(8, 4, 1), curve())
    x = torch.randn(2, 4, *[6] * axes) * spread
    module = lowered(model, x)
    found = kernel_agreement(module, x)
    assert all(gap.steps <= 1 and gap.relative <= CLOSE for gap in found), "\n".join(map(str, found))
    fused = [kernel for kernel in kernels_in(module) if is_curved(kernel)]
    assert len(fused) == (1 if axes < 3 else 0)
    left = {str(node.target) for node in module.module.graph.nodes if node.op == "call_function"}
    assert axes == 3 or not any("silu" in name or "hardswish" in name for name in left)


def test_a_curve_that_others_read_stays() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Any:
            y = nn.functional.silu(self.first(x))
            return self.second(y), y

    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 6)
    module = lowered(Both(), x)
    assert not any(is_curved(kernel) for kernel in kernels_in(module))
    assert all(gap.steps <= 1 and gap.relative <= CLOSE for gap in kernel_agreement(module, x))


@pytest.mark.parametrize("name", ["relu", "hardswish", "silu"])
def test_float_results_take_an_activation(name: str) -> None:
    layer = plain(FLOAT)
    x = layer.input(2, 4, 6, 5)
    kernel = next(kernel for kernel in layer.kernels(x)[0] if isinstance(kernel, Conv))
    assert not kernel.absorb("gelu")
    assert kernel.absorb(name)
    assert not kernel.absorb(name)
    close(kernel(x), getattr(nn.functional, name)(layer.expected(x)), name)


# -- choosing ------------------------------------------------------------------------------------------------------


def forget(monkeypatch: pytest.MonkeyPatch, fastest: str) -> None:
    """A table in which one family is the fastest everywhere."""

    def nearest(target: str, work: Any) -> costs.Measured:
        families = ("onednn", "fbgemm", "float32")
        return costs.Measured(work, {family: 1.0 if family == fastest else 2.0 for family in families})

    monkeypatch.setattr("quantc.targets.kernels.selection.nearest", nearest)


@pytest.mark.parametrize("family", ["onednn", "fbgemm", "float32"])
def test_whole_models_on_one_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, family)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU6(), nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.ReLU(), nn.Conv2d(8, 16, 1),
        nn.ReLU(), nn.ConvTranspose2d(16, 4, 2, 2), nn.ReLU(), nn.Conv2d(4, 4, 3),
    )  # fmt: skip
    x = torch.randn(2, 3, 13, 13)
    module = lowered(model, x, allow_float=True)
    chosen = [kernel for kernel in kernels_in(module) if kernel.work(torch.zeros(1, 3, 13, 13)) is not None]
    assert sum(kernel.family == family for kernel in chosen) >= 3
    found = kernel_agreement(module, x)
    assert all(gap.steps <= 1 and gap.relative <= CLOSE for gap in found), "\n".join(map(str, found))
    before = module.program(x)
    fast = module(x)
    assert float((fast - before).norm() / before.norm()) < 0.02
    assert torch.equal(module.program(x), before)  # its weights were packed and unpacked again


def test_float_is_not_taken_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, "float32")
    x = torch.randn(2, 4, 9, 9)
    assert not any(kernel.computes_in_float for kernel in kernels_in(lowered(small_model(), x)))


def test_plain_weights_are_let_go_of() -> None:
    x = torch.randn(2, 4, 9, 9)
    module = lowered(small_model(), x)
    module(x)
    held = [kernel for kernel in kernels_in(module) if isinstance(kernel, Conv | ConvFbgemm)]
    assert len(held) == 3
    assert all(kernel._buffers["weight"] is None for kernel in held)


def test_the_table_is_of_kinds_and_families_that_there_are() -> None:
    rows = json.loads((Path(costs.__file__).parent / "costs_x86.json").read_text(encoding="utf-8"))["rows"]
    kinds = {row["kind"] for row in rows}
    assert {"conv2d 1x1 s1", "conv2d 3x3 s1", "conv2d depthwise 3x3 s1", "conv2d depthwise 3x3 s2", "linear"} <= kinds
    assert all(time > 0 for row in rows for time in row["microseconds"].values())
    assert {family for row in rows for family in row["microseconds"]} <= {"onednn", "fbgemm", "float32", "torch"}
    assert len({(row["kind"], row["size"], *row["channels"]) for row in rows}) == len(rows)
