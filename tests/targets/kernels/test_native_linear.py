"""Linear layers on quantc's own kernels, with each set of instructions: as close to float64 as float32 is, with bits that
depend neither on threads nor on other rows."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import quantc as qc
from quantc import QuantSpec
from quantc.errors import DataError, InputError
from quantc.spec.formats import PerGroup, PerTensor
from quantc.targets.kernels import costs, native_linear
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.native_library import SWITCH
from quantc.targets.kernels.native_linear import NativeW4, NativeW8
from quantc.targets.kernels.stored_weight import StoredWeight
from tests.support.native import needs_compiler, sets_here
from tests.support.stored_weights import (
    assert_as_good_as_float,
    assert_rounded_only,
    kernels,
    lowered,
    real,
    seeded,
    threads,
)

pytestmark = needs_compiler
W8 = {
    "channels": qc.INT8_WEIGHT_ONLY,
    "whole": qc.INT8_WEIGHT_ONLY.but(granularity=PerTensor()),
    "affine": qc.INT8_WEIGHT_ONLY.but(scheme="affine"),
}
W4 = {
    "short scales": qc.INT4_GROUP,
    "long scales": qc.INT4_GROUP_SYMMETRIC,
    "groups of 64": qc.INT4_GROUP.but(granularity=PerGroup(axis=1, size=64)),
    "two bits": qc.INT2_GROUP,
}
SPECS = {**W8, **W4}
INPUTS, OUTPUTS = 512, 520


@pytest.fixture(autouse=True)
def _without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kernel that can is taken, whatever the setting outside."""
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(costs, "cost_table", lambda target: {})


@pytest.fixture(params=sets_here())
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SWITCH, request.param)
    return str(request.param)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_large_layers_run_on_them(spec: QuantSpec, instructions: str) -> None:
    torch.manual_seed(0)
    x, has_bias = torch.randn(5, INPUTS), spec in (qc.INT8_WEIGHT_ONLY, qc.INT4_GROUP)
    program, module = lowered(nn.Linear(INPUTS, OUTPUTS, bias=has_bias), x, spec)
    (kernel,) = kernels(module)
    assert type(kernel) is (NativeW8 if spec in W8.values() else NativeW4)
    found = module(x)
    assert kernel._packed[-1] == instructions
    weight, bias = real(kernel), kernel.state_dict().get("bias")
    assert_rounded_only(found, x, weight, bias)
    assert_as_good_as_float(found, x, weight, bias)
    for _ in range(3):  # recorded and replayed
        assert torch.equal(module(x), found)
    assert "recorded for one shape" in str(module)
    assert kernel._dropped  # held once, and whole again where it is asked for
    assert torch.equal(module.program(x), program(x))
    assert torch.equal(copy.deepcopy(module)(x), found)


@pytest.mark.parametrize(("spec", "share"), [(qc.INT8_WEIGHT_ONLY, 0.26), (qc.INT4_GROUP, 4.75 / 32 + 0.01)], ids=str)
def test_a_weight_is_held_once(spec: QuantSpec, share: float) -> None:
    _, module = lowered(nn.Linear(1024, 512, bias=False), torch.randn(1, 1024), spec)
    module(torch.randn(1, 1024))
    assert module.memory().share < share


def stored(kind: str, outputs: int, inputs: int, exponent: int, generator: torch.Generator) -> StoredWeight:
    """Levels of any value, with scales of any size."""
    if kind.startswith("w8"):
        w = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
        scale = (torch.rand(outputs, generator=generator) + 0.5) * 2.0**exponent
        zero = torch.randint(-128, 128, (outputs,), generator=generator) if "zero" in kind else None
        made = StoredWeight(w, scale, zero, 0, None)
        return StoredWeight(w.t().contiguous(), scale, zero, 1, None, transposed=True) if "transposed" in kind else made
    size = 8 if inputs % 32 else 32
    w = torch.randint(-8, 8, (outputs, inputs), generator=generator).to(torch.int8)
    w[torch.rand(outputs, generator=generator) < 0.2] = 0
    scale = (torch.rand(outputs, inputs // size, generator=generator) + 0.5) * 2.0**exponent
    zero = torch.randint(-8, 8, scale.shape, generator=generator) if "zero" in kind else None
    return StoredWeight(w, scale.bfloat16().float() if "short" in kind else scale, zero, 1, size)


KINDS = ["w8", "w8 zero", "w8 transposed", "w4", "w4 short", "w4 zero", "w4 short zero"]


@settings(max_examples=40)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 150),
    st.integers(1, 24),
    st.integers(0, 19),
    st.integers(-60, 60),
    st.integers(0, 999),
)
def test_products_are_rounded_only(
    instructions: str, kind: str, outputs: int, eights: int, rows: int, exponent: int, seed: int
) -> None:
    generator = seeded(seed)
    weight = stored(kind, outputs, 8 * eights, exponent, generator)
    bias = torch.randn(outputs, generator=generator) * 2.0**exponent if seed % 2 else None
    kernel: Kernel = (NativeW8 if kind.startswith("w8") else NativeW4)(weight, bias)
    x = torch.randn(rows, 8 * eights, generator=generator)
    found = kernel(x)
    assert found.shape == (rows, outputs)
    assert_rounded_only(found, x, weight.rows(weight.real()), bias)
    for row in range(rows):  # whatever the other rows
        assert torch.equal(kernel(x[row : row + 1])[0], found[row])
    plain = kernel.unpack(kernel._packed)
    assert torch.equal(plain["w"], weight.w)
    for name, expected in (("scale", weight.scale), ("zero_point", weight.zero_point)):
        assert name not in plain or (expected is not None and torch.equal(plain[name], expected))


@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_change_bits(kind: str, instructions: str) -> None:
    kernel: Kernel = (NativeW8 if kind.startswith("w8") else NativeW4)(stored(kind, 300, 512, 0, seeded(1)), None)
    for rows in (1, 3, 21):
        x = torch.randn(rows, 512, generator=seeded(2))
        alone = kernel(x)
        with threads(2):
            assert torch.equal(kernel(x), alone)


@pytest.mark.parametrize("shape", [(512,), (1, 512), (0, 512), (2, 3, 512), (2, 0, 512)])
@pytest.mark.parametrize("kind", ["w8", "w4"])
def test_inputs_of_any_rank_and_strides(kind: str, shape: tuple[int, ...]) -> None:
    weight = stored(kind, 70, 512, 0, seeded(1))
    kernel: Kernel = (NativeW8 if kind == "w8" else NativeW4)(weight, None)
    x = torch.randn(*shape[:-1], 1024)[..., ::2]
    found = kernel(x)
    assert found.shape == (*shape[:-1], 70)
    assert torch.allclose(found, F.linear(x, weight.real()), rtol=1e-4, atol=1e-3)
    assert torch.equal(found, kernel(x.contiguous()))


@pytest.mark.parametrize("spec", [qc.INT8_WEIGHT_ONLY, W8["affine"], qc.INT4_GROUP], ids=str)
def test_what_is_not_finite_has_the_bits_of_the_integer_form(spec: QuantSpec, instructions: str) -> None:
    program, module = lowered(nn.Linear(INPUTS, OUTPUTS), torch.randn(5, INPUTS), spec)
    for value in (math.nan, math.inf, -math.inf):
        x = torch.randn(5, INPUTS)
        x[2, 7] = value
        (found,), expected = module.module(x), program.module(x)
        assert torch.equal(found.nan_to_num(9), expected.nan_to_num(9))
        with pytest.raises(InputError):
            module(x)


@pytest.mark.parametrize("spec", [qc.INT8_WEIGHT_ONLY, qc.INT4_GROUP], ids=str)
def test_large_activations_overflow_where_float_does(spec: QuantSpec, instructions: str) -> None:
    """Sums of levels overflow before they are brought to their scale."""
    torch.manual_seed(0)
    x = torch.full((3, INPUTS), 1e37)
    model = nn.Linear(INPUTS, OUTPUTS)
    with torch.no_grad():
        model.weight.abs_().mul_(0.1)
    program, module = lowered(model, x, spec)
    found = module(x)
    assert bool(found.isfinite().all())
    assert torch.equal(found, program(x))
    assert not torch.isfinite(x @ kernels(module)[0].state_dict()["w"].float().t()).all()


class Product(nn.Module):
    """A product whose weight has its outputs on the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(INPUTS, OUTPUTS, generator=seeded(1)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_products_with_outputs_last() -> None:
    x = torch.randn(2, 3, INPUTS)
    program, module = lowered(Product(), x, qc.INT8_WEIGHT_ONLY)
    assert [type(kernel) for kernel in kernels(module)] == [NativeW8]
    assert torch.allclose(module(x), program(x), rtol=1e-4, atol=1e-3)
    assert torch.equal(module.program(x), program(x))


REFUSED = {
    "scales of groups of 12": (qc.INT4_GROUP.but(granularity=PerGroup(axis=1, size=12)), "12 weights"),
    "eight bits in groups": (qc.INT8_WEIGHT_ONLY.but(granularity=PerGroup(axis=1, size=16)), "more than four bits"),
}


@pytest.mark.parametrize(("spec", "why"), REFUSED.values(), ids=REFUSED)
def test_what_they_cannot_read_is_said(spec: QuantSpec, why: str) -> None:
    x = torch.randn(2, 528)
    program, module = lowered(nn.Linear(528, 528), x, spec)
    assert "native" not in module.placed[0].kernel
    assert why in module.placed[0].reason
    assert torch.allclose(module(x), program(x), rtol=1e-4, atol=1e-5)


def test_wrong_inputs_are_refused() -> None:
    (kernel,) = kernels(lowered(nn.Linear(INPUTS, OUTPUTS), torch.randn(5, INPUTS), qc.INT8_WEIGHT_ONLY)[1])
    with pytest.raises(InputError, match="columns"):
        kernel(torch.randn(5, INPUTS - 1))
    with pytest.raises(InputError, match="float64"):
        kernel(torch.randn(5, INPUTS).double())


def test_results_have_no_gradient() -> None:
    kernel = NativeW8(stored("w8", 70, 512, 0, seeded(1)), None)
    found = kernel(torch.randn(2, 512, requires_grad=True))
    assert not found.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        found.sum().backward()


def test_a_default_dtype_changes_nothing() -> None:
    weight, x = stored("w4", 70, 512, 0, seeded(1)), torch.randn(2, 512)
    kernel, fresh = NativeW4(weight, None), NativeW4(weight, None)
    expected = kernel(x)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(kernel(x), expected)
        assert torch.equal(fresh(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_state_dict_with_wider_weights_is_refused() -> None:
    x = torch.randn(2, INPUTS)
    (kernel,) = kernels(lowered(nn.Linear(INPUTS, OUTPUTS), x, qc.INT4_GROUP)[1])
    kernel(x)
    state = {name: tensor.clone() for name, tensor in kernel.state_dict().items()}
    kernel.load_state_dict({**state, "w": state["w"] * 10})
    with pytest.raises(DataError, match="four bits"):
        kernel(x)
    kernel.load_state_dict(state)
    assert kernel(x).shape == (2, OUTPUTS)


def test_small_layers_are_left_to_others() -> None:
    side = math.isqrt(native_linear.MIN_WEIGHTS)
    _, module = lowered(nn.Linear(side, side), torch.randn(2, side), qc.INT8_WEIGHT_ONLY)
    assert "native" not in module.placed[0].kernel
    assert module.placed[0].reason == ""
