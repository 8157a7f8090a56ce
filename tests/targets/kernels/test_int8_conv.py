"""Convolutions on x86: every kernel that offers itself for one, forced in turn, against torch's in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.backends.x86 import X86
from quantc.config.config import QuantConfig
from quantc.errors import AnnotationError
from quantc.spec.capability import Capability
from quantc.spec.formats import DType, Role, Scheme
from quantc.targets.kernels import costs
from quantc.targets.kernels.fbgemm_conv import ConvFbgemm
from quantc.targets.kernels.int8_conv import Conv
from quantc.targets.kernels.kernel_agreement import kernel_agreement
from tests.support.byte_convs import (
    CLOSE,
    ENDINGS,
    FLOAT,
    FULL,
    ORDERS,
    RELU,
    Layer,
    close,
    in_memory,
    is_curved,
    kernels_in,
    plain,
)


@settings(max_examples=70)
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
