"""Kernels on stored weights: as close to float64 as float32 is, for any weights, shapes and inputs."""

from __future__ import annotations

import copy
import io
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import quantc as qc
from quantc import QuantConfig, QuantSpec
from quantc.decomposed import decomposed_ops
from quantc.errors import DataError
from quantc.formats import PerGroup, PerTensor
from quantc.integer.library import OPS
from quantc.kernels import engines
from quantc.kernels.lowered import Lowered
from quantc.kernels.packed import Kernel
from quantc.kernels.weight_halves import are_exact, exact_halves
from quantc.kernels.weight_lookup import Lookup
from quantc.kernels.weight_only import FloatLinear, HalfLinear, HalfLinearThreads
from quantc.kernels.weight_stored import StoredWeight

needs_fbgemm = pytest.mark.skipif(not engines.has_halves(), reason="this build of torch has no fbgemm")
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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


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


# -- products ------------------------------------------------------------------------------------------------------------


@needs_fbgemm
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("spec", EXACT.values(), ids=EXACT)
def test_weights_that_float16_holds_run_on_fbgemm(spec: QuantSpec, bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 96)
    program, module = lowered(nn.Linear(96, 130, bias=bias), x, spec)
    (kernel,) = kernels(module)
    assert type(kernel) is HalfLinear
    found, shift = module(x), kernel.state_dict().get("bias")
    assert_rounded_only(found, x, real(kernel), shift)
    assert_as_good_as_float(found, x, real(kernel), shift)
    assert torch.allclose(found, program(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(module.program(x), program(x))


@pytest.mark.parametrize("spec", INEXACT.values(), ids=INEXACT)
def test_weights_that_it_does_not_hold_have_the_bits_of_float(spec: QuantSpec) -> None:
    x = torch.randn(9, 96)
    program, module = lowered(nn.Linear(96, 130), x, spec)
    assert [type(kernel) for kernel in kernels(module)] == [FloatLinear]
    assert module.placed[0].reason == "its weights are not exact in float16"
    assert "float32" in module.placed[0].kernel
    assert torch.equal(module(x), program(x))


@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
def test_qnnpack_has_the_bits_of_float(spec: QuantSpec) -> None:
    x = torch.randn(9, 96)
    program, module = lowered(nn.Linear(96, 130), x, spec, "qnnpack")
    assert [type(kernel) for kernel in kernels(module)] == [FloatLinear]
    assert torch.equal(module(x), program(x))


def test_few_outputs_stay_float() -> None:
    x = torch.randn(9, 96)
    program, module = lowered(nn.Linear(96, 100), x, qc.INT8_WEIGHT_ONLY)
    assert module.placed[0].reason == "with less than 128 outputs float is faster"
    assert torch.equal(module(x), program(x))


@needs_fbgemm
@pytest.mark.parametrize("spec", [qc.INT8_WEIGHT_ONLY, qc.INT4_GROUP], ids=str)
def test_several_threads_have_a_kernel_of_their_own(spec: QuantSpec) -> None:
    x = torch.randn(9, 768)
    with threads(2):
        _, small = lowered(nn.Linear(96, 130), torch.randn(9, 96), spec)
        program, module = lowered(nn.Linear(768, 768), x, spec)
        assert [type(kernel) for kernel in kernels(small)] == [FloatLinear]
        assert "2 threads" in small.placed[0].reason
        (kernel,) = kernels(module)
        assert type(kernel) is HalfLinearThreads
        assert_rounded_only(module(x), x, real(kernel), kernel.state_dict()["bias"])
        assert torch.allclose(module(x), program(x), rtol=1e-5, atol=1e-5)


class Product(nn.Module):
    """A product whose weight has its outputs on the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(96, 130, generator=seeded(1)))
        self.shift = nn.Parameter(torch.randn(130, generator=seeded(2)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, torch.addmm(self.shift, x.reshape(-1, 96), self.weight)


@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
def test_products_with_outputs_last(spec: QuantSpec) -> None:
    x = torch.randn(2, 9, 96)
    program, module = lowered(Product(), x, spec)
    assert len(kernels(module)) == 2
    for found, expected in zip(module(x), program(x), strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=2e-5)


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


@settings(max_examples=150, deadline=None)
@given(stored_weights())
def test_halves_are_exactly_the_weights(weight: StoredWeight) -> None:
    assert are_exact(weight)
    halves = exact_halves(weight)
    assert halves is not None
    assert torch.equal(halves.matrix.half().float(), halves.matrix)
    # in float64, so that nothing is rounded
    levels, scale = weight.w.double(), weight.scale
    if weight.group_size is not None:
        assert scale is not None
        assert weight.zero_point is not None
        wide, zero = (part.double().repeat_interleave(weight.group_size, 1) for part in (scale, weight.zero_point))
        levels = (levels - zero) * wide
    else:
        offset = 0 if weight.zero_point is None else weight.zero_point.double().unsqueeze(1)
        factor = 1.0 if scale is None else scale.double().reshape(-1, 1)
        levels = (levels - offset) * factor
    factor = torch.ones(()) if halves.factor is None else halves.factor.unsqueeze(1)
    assert torch.equal(halves.matrix.double() * factor.double(), levels)


@needs_fbgemm
@settings(max_examples=60, deadline=None)
@given(stored_weights(), st.integers(0, 5), st.booleans(), st.integers(0, 2**20))
def test_products_are_rounded_only(weight: StoredWeight, rows: int, has_bias: bool, seed: int) -> None:
    x = torch.randn(rows, weight.inputs, generator=seeded(seed))
    bias = torch.randn(weight.outputs, generator=seeded(seed + 1)) if has_bias else None
    kernel = HalfLinear(weight, bias)
    found, exact = kernel(x), weight.real()
    assert found.shape == (rows, weight.outputs)
    if rows:
        assert_rounded_only(found, x, exact, bias)


def test_groups_too_far_apart_are_not_exact() -> None:
    w = torch.full((128, 32), 3, dtype=torch.int8)
    scale = torch.tensor([[2.0**-30, 1.0]]).repeat(128, 1)
    assert exact_halves(StoredWeight(w, scale, None, None, 16)) is not None  # a power of two for all
    scale = torch.tensor([[101 * 2.0**-40, 101.0]]).repeat(128, 1)
    assert exact_halves(StoredWeight(w, scale, None, None, 16)) is None


@needs_fbgemm
@pytest.mark.parametrize("size", [1e-30, 1e-38, 1e30])
@pytest.mark.parametrize("spec", [qc.INT8_WEIGHT_ONLY, qc.INT4_GROUP, qc.FP8_E4M3_WEIGHT], ids=str)
def test_tiny_and_huge_weights(spec: QuantSpec, size: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 128, bias=False)
    with torch.no_grad():
        model.weight.mul_(size)
        model.weight[3] = 0
    x = torch.randn(7, 64)
    program, module = lowered(model, x, spec.but(eps=2.0**-126))
    (kernel,) = kernels(module)
    assert type(kernel) is HalfLinear
    assert_rounded_only(module(x), x, real(kernel), None)
    assert not module(x)[:, 3].any()
    assert torch.equal(module.program(x), program(x))


@needs_fbgemm
@pytest.mark.parametrize("spec", EXACT.values(), ids=EXACT)
def test_large_activations_overflow_where_float_does(spec: QuantSpec) -> None:
    """The sums are as large as those of the weights themselves: nothing overflows on the way."""
    torch.manual_seed(0)
    model = nn.Linear(64, 128)
    x = torch.randn(7, 64) * 1e36
    program, module = lowered(model, x, spec)
    found, expected = module(x), program(x).detach()
    assert bool(found.isfinite().all())
    assert torch.allclose(found, expected, rtol=1e-4, atol=float(expected.abs().max()) * 1e-6)


@needs_fbgemm
@pytest.mark.parametrize("shape", [(96,), (1, 96), (0, 96), (2, 3, 96), (2, 0, 96), (2, 1, 3, 96)])
@pytest.mark.parametrize("spec", [qc.INT8_WEIGHT_ONLY, qc.INT4_GROUP], ids=str)
def test_inputs_of_any_rank(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    model = nn.Linear(96, 128)
    x = torch.randn(shape)
    weight = lowered(model, torch.randn(2, 96), spec)[1]
    (kernel,) = kernels(weight)
    found = kernel(x)
    assert found.shape == (*shape[:-1], 128)
    assert torch.allclose(found, F.linear(x, real(kernel), model.bias), rtol=1e-5, atol=1e-5)


@needs_fbgemm
def test_inputs_that_do_not_lie_in_order() -> None:
    (kernel,) = kernels(lowered(nn.Linear(96, 128), torch.randn(2, 96), qc.INT8_WEIGHT_ONLY)[1])
    x = torch.randn(96, 2, 8)[:, :, ::2].permute(2, 1, 0)
    assert torch.equal(kernel(x), kernel(x.contiguous()))


@needs_fbgemm
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", EXACT.values(), ids=EXACT)
def test_what_is_not_finite_is_as_in_float(spec: QuantSpec, value: float) -> None:
    x = torch.randn(5, 96)
    x[2, 7] = value
    program, module = lowered(nn.Linear(96, 128), torch.randn(5, 96), spec)
    found, expected = module(x), program(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_wrong_columns_are_refused() -> None:
    (kernel,) = kernels(lowered(nn.Linear(96, 128), torch.randn(5, 96), qc.INT8_WEIGHT_ONLY)[1])
    with pytest.raises(RuntimeError):
        kernel(torch.randn(5, 95))


# -- convolutions and recurrent layers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
def test_convolutions_read_a_float_weight_that_is_made_once(spec: QuantSpec) -> None:
    x = torch.randn(2, 32, 9, 9)
    program, module = lowered(nn.Conv2d(32, 40, 3), x, spec)
    assert [row.kernel for row in module.placed] == ["float32 weight made once"]
    assert torch.allclose(module(x), program(x), rtol=1e-5, atol=1e-5)
    (kernel,) = kernels(module)
    assert kernel() is kernel()


# -- tables --------------------------------------------------------------------------------------------------------------


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest float32 tensor that any op makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for item in made if isinstance(made, tuple | list) else [made]:
            if isinstance(item, Tensor) and item.dtype == torch.float32:
                self.largest = max(self.largest, item.numel())
        return made


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 32)
        self.bag = nn.EmbeddingBag(500, 32, mode="mean", padding_idx=3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.table(x) + self.bag(x).unsqueeze(1)
        return found


@pytest.mark.parametrize("target", ["x86", "qnnpack"])
@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
def test_tables_have_the_bits_of_float_and_never_become_float(spec: QuantSpec, target: str) -> None:
    x = torch.randint(0, 500, (3, 7))
    x[1] = 3
    program, module = lowered(Tables(), x, spec, target)
    assert [type(kernel).__name__ for kernel in kernels(module)] == ["Lookup", "BagLookup"]
    assert torch.equal(module(x), program(x))
    with Sizes() as sizes:  # type: ignore[no-untyped-call]
        module(x)
        module.program(x)
    assert 0 < sizes.largest < 500 * 32


@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (2, 0)])
def test_indices_of_any_shape(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    program, module = lowered(nn.Embedding(50, 32), torch.randint(0, 50, (3, 7)), spec)
    (kernel,) = kernels(module)
    x = torch.randint(0, 50, shape)
    plain = [node for node in program.nodes() if "dequantize" in str(node.target)]
    table = plain[0].target(*(program.tensor(arg) if isinstance(arg, torch.fx.Node) else arg for arg in plain[0].args))
    assert torch.equal(kernel(x), F.embedding(x, table))


def test_indices_beyond_the_table_are_refused() -> None:
    (kernel,) = kernels(lowered(nn.Embedding(50, 32), torch.randint(0, 50, (3, 7)), qc.INT4_GROUP)[1])
    with pytest.raises(IndexError):
        kernel(torch.tensor([50]))


def test_empty_bags() -> None:
    op = OPS["embedding_bag_weight_only"]
    w, scale = torch.ones(4, 3, dtype=torch.int8), torch.ones(4)
    none, offsets = torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0])
    arguments = (w, scale, None, 0, None, none, offsets, 0, None, False, None)
    assert torch.equal(op.target(*arguments), op.reference(*arguments))
    assert torch.equal(op.target(*arguments), torch.zeros(2, 3))


# -- as modules ----------------------------------------------------------------------------------------------------------


@needs_fbgemm
@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
def test_copies_and_state_dicts_hold_what_is_stored(spec: QuantSpec) -> None:
    x = torch.randn(5, 96)
    _, module = lowered(nn.Linear(96, 128), x, spec)
    expected = module(x)
    (kernel,) = kernels(module)
    assert kernel._packed is not None
    plain = kernel.state_dict()
    assert plain["w"].dtype == spec.dtype.storage
    assert all(type(tensor) is Tensor for tensor in plain.values())
    (twin,) = kernels(copy.deepcopy(module))
    assert twin._packed is None
    assert torch.equal(twin(x), expected)
    with io.BytesIO() as file:
        torch.save(kernel, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(x), expected)


@needs_fbgemm
def test_another_state_dict_is_packed_anew() -> None:
    x = torch.randn(5, 96)
    torch.manual_seed(0)
    (one,) = kernels(lowered(nn.Linear(96, 128), x, qc.INT8_WEIGHT_ONLY)[1])
    (other,) = kernels(lowered(nn.Linear(96, 128), x, qc.INT8_WEIGHT_ONLY)[1])
    assert not torch.equal(one(x), other(x))
    one.load_state_dict(other.state_dict())
    assert torch.equal(one(x), other(x))


@needs_fbgemm
def test_weights_that_became_inexact_are_refused() -> None:
    x = torch.randn(5, 96)
    (kernel,) = kernels(lowered(nn.Linear(96, 128), x, qc.INT4_GROUP)[1])
    kernel.load_state_dict({**kernel.state_dict(), "scale": torch.rand(128, 3) + 0.1})
    with pytest.raises(DataError, match="not exact in float16"):
        kernel(x)


@needs_fbgemm
def test_threads_may_call_it_at_once() -> None:
    x = torch.randn(3, 256)
    _, module = lowered(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)), x, qc.INT8_WEIGHT_ONLY)
    batches = [torch.randn(3, 256) for _ in range(4)]
    expected = [copy.deepcopy(module)(batch) for batch in batches]
    wrong: list[int] = []

    def work(index: int) -> None:
        wrong.extend(index for _ in range(20) if not torch.equal(module(batches[index]), expected[index]))

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@needs_fbgemm
def test_inputs_that_want_gradients_are_computed_with() -> None:
    x = torch.randn(5, 96)
    for spec in (qc.INT8_WEIGHT_ONLY, qc.INT4_GROUP):
        (kernel,) = kernels(lowered(nn.Linear(96, 128), x, spec)[1])
        assert torch.equal(kernel(x.clone().requires_grad_()).detach(), kernel(x))


@needs_fbgemm
def test_what_is_returned_is_the_callers() -> None:
    x = torch.randn(5, 96)
    _, module = lowered(nn.Linear(96, 128), x, qc.INT8_WEIGHT_ONLY)
    first = module(x)
    kept = first.clone()
    module(torch.randn(5, 96)).zero_()
    assert torch.equal(first, kept)


def test_saved_and_loaded_it_is_the_same(tmp_path: Any) -> None:
    x = torch.randn(5, 96)
    for spec in FORMATS.values():
        _, module = lowered(nn.Linear(96, 128), x, spec)
        module.save(tmp_path / "net.qc")
        again = qc.lower(qc.load(tmp_path / "net.qc"), "x86")
        assert [row.kernel for row in again.placed] == [row.kernel for row in module.placed]
        assert torch.equal(again(x), module(x))


def test_a_table_of_fp8_is_kept_in_float16_only_where_it_is_packed() -> None:
    _, module = lowered(nn.Embedding(50, 32), torch.randint(0, 50, (3, 7)), qc.FP8_E4M3_WEIGHT)
    (kernel,) = kernels(module)
    assert isinstance(kernel, Lookup)
    assert kernel.pack().rows.dtype == torch.float16
    assert kernel.state_dict()["w"].dtype == torch.float8_e4m3fn
