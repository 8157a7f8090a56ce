"""Formats of weights that are stored quantized, their kernels, and what these are held to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import quantc as qc
from quantc import QuantConfig, QuantSpec
from quantc.qdq.registration import decomposed_ops
from quantc.spec.formats import PerGroup, PerTensor
from quantc.targets.kernels import packing
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.lowered import Lowered
from quantc.targets.kernels.stored_weight import StoredWeight

needs_fbgemm = pytest.mark.skipif(not packing.has_halves(), reason="this build of torch has no fbgemm")
EXACT = {
    "int8": qc.INT8_WEIGHT_ONLY,
    "int8 whole": qc.INT8_WEIGHT_ONLY.but(granularity=PerTensor()),
    "int8 affine": qc.INT8_WEIGHT_ONLY.but(scheme="affine"),
    "int4": qc.INT4_GROUP,
    "int2": qc.INT2_GROUP,
    "fp16": qc.FP16_WEIGHT,
    "fp8 e4m3": qc.FP8_E4M3_WEIGHT,
    "fp8 e5m2": qc.FP8_E5M2_WEIGHT,
}
INEXACT = {
    "int4 with scales of 24 bits": qc.INT4_GROUP_SYMMETRIC,
    "int8 in groups": qc.INT8_WEIGHT_ONLY.but(granularity=PerGroup(axis=1, size=16)),
}
FORMATS = {**EXACT, **INEXACT}
ROUNDING = 2.0**-24


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def lowered(model: nn.Module, x: Any, spec: QuantSpec, target: str = "x86") -> tuple[Any, Lowered]:
    """The Q/DQ form of a model, and the module on kernels."""
    config = QuantConfig().set_all(spec)
    program = qc.convert(qc.prepare(qc.capture(model.eval(), (x,)), target, config=config))
    return program, qc.lower(program, target)


def kernels(module: nn.Module) -> list[Kernel]:
    return [found for found in module.modules() if isinstance(found, Kernel)]


def assert_rounded_only(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, roundings: int = 6) -> None:
    """Hold a product to float64: no more than one rounding for each term of a sum, and a few."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    sizes = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    allowed = (x.shape[-1] + roundings) * ROUNDING * sizes + 2.0**-149
    assert found.shape == exact.shape
    assert bool(((found.double() - exact).abs() <= allowed).all())


def assert_as_good_as_float(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Hold the error of a product to that of float32, on the whole."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    mine, theirs = ((result.double() - exact).square().mean() for result in (found, F.linear(x, weight, bias)))
    assert float(mine) <= 2 * float(theirs)


def real(kernel: Kernel) -> Tensor:
    """What a kernel's plain tensors stand for, by torch's own ops."""
    plain = kernel.state_dict()
    w, scale, zero = plain["w"], plain.get("scale"), plain.get("zero_point")
    axis, group, *_ = kernel._rest  # type: ignore[misc]
    if w.is_floating_point():
        wide: Tensor = w.float()
        return wide if scale is None else wide * (scale.unsqueeze(1) if scale.dim() else scale)
    assert scale is not None
    zero = torch.zeros_like(scale, dtype=torch.int64) if zero is None else zero
    ops = decomposed_ops()
    if group is not None:
        return ops.dequantize_per_channel_group(w, scale, zero, -128, 127, torch.int8, group, torch.float32)  # type: ignore[no-any-return]
    if not scale.dim():
        return ops.dequantize_per_tensor(w, float(scale), int(zero), -128, 127, torch.int8)  # type: ignore[no-any-return]
    return ops.dequantize_per_channel(w, scale, zero, axis, -128, 127, torch.int8)  # type: ignore[no-any-return]


@st.composite
def stored_weights(draw: st.DrawFn) -> StoredWeight:
    """Levels and scales of any size: per tensor, per row, or in groups whose scales have few bits."""
    seed = draw(st.integers(0, 2**20))
    rows, columns, size = draw(st.integers(1, 40)), draw(st.integers(1, 6)), draw(st.sampled_from([2, 16, 33]))
    exponent = draw(st.integers(-120, 100))
    kind = draw(st.sampled_from(["whole", "rows", "affine rows", "groups", "fp16", "e4m3", "e5m2"]))
    generator = seeded(seed)
    shape = (rows, columns * size)
    spread = torch.randint(-6, 7, (rows, columns), generator=generator)
    if kind in ("fp16", "e4m3", "e5m2"):
        dtype = {"fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
        reals = torch.randn(shape, generator=generator) * 2.0 ** draw(st.integers(-14, 6))
        scale = None if kind == "fp16" else _scales(rows, generator) * 2.0**exponent
        return StoredWeight(reals.to(dtype), scale, None, None if kind == "fp16" else 0, None)
    high = 8 if kind == "groups" else 128
    w = torch.randint(-high, high, shape, generator=generator).to(torch.int8)
    w[draw(st.integers(0, rows - 1))] = 0
    if kind == "whole":
        return StoredWeight(w, _scales(1, generator)[0] * 2.0**exponent, None, None, None)
    if kind == "groups":
        scale = torch.randint(64, 128, (rows, columns), generator=generator) * 2.0**exponent * 2.0**spread
        zero = torch.randint(-8, 8, (rows, columns), generator=generator)
        return StoredWeight(w, scale, zero, None, size)
    zero_point = torch.randint(-128, 128, (rows,), generator=generator) if kind == "affine rows" else None
    return StoredWeight(w, _scales(rows, generator) * 2.0**exponent, zero_point, 0, None)


def _scales(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator) + 0.5
