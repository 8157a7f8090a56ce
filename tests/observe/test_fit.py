"""Fitted weight scales as an observation: merging, saving, what is refused, and programs that have them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.errors import DataError, LoadError, ObservationError, SpecError
from quantc.observe import Fit, MinMax, State, Statistics
from quantc.spec.formats import PerChannel, PerGroup, PerTensor
from quantc.spec.granularity import Share
from quantc.spec.numerics import qparams_of
from quantc.spec.spec import (
    INT2_GROUP,
    INT4_GROUP,
    INT8,
    INT8_TENSOR_WEIGHT,
    INT8_WEIGHT,
    QuantSpec,
)
from tests.support.fitting import (
    SHAPE,
    SHARED,
    decibels,
    errors,
    fitted,
    gaussian,
    laplace,
    student,
)
from tests.support.specs import tensors

FITTED_GROUP = INT4_GROUP.but(observe="fit")


def bits_of(observation: Fit | MinMax) -> dict[str, object]:
    state = observation.to_state()
    tensors = {name: x.view(torch.int32) for name, x in state.tensors.items()}
    return {**{name: x.tolist() for name, x in tensors.items()}, **state.values}


def seen(share: Share, parts: list[Tensor]) -> Fit:
    observation = Fit.empty(share, {})
    for part in parts:
        observation.update(part)
    return observation


@settings(max_examples=30)
@given(st.sampled_from(SHARED), st.lists(tensors(SHAPE), min_size=3, max_size=3), st.permutations(range(3)))
def test_any_order_and_split_of_weights_that_share_scales_gives_the_same_bits(
    share: Share, weights: list[Tensor], order: list[int]
) -> None:
    spec = FITTED_GROUP.but(granularity=share)
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
    expected, observation = fitted(weight, FITTED_GROUP), seen(FITTED_GROUP.granularity, [weight])
    weight.mul_(100)
    assert observation.qparams(FITTED_GROUP).equals(expected)


def test_half_precision_and_other_layouts_are_read_as_they_are() -> None:
    spec = FITTED_GROUP.but(granularity=PerGroup(axis=0, size=4))
    weight = gaussian(8, 6, 3).bfloat16()
    expected = fitted(weight.float(), spec)
    assert fitted(weight, spec).equals(expected)
    assert fitted(weight.permute(2, 1, 0).contiguous().permute(2, 1, 0), spec).equals(expected)


def test_it_is_saved_and_read_back(tmp_path: Path) -> None:
    share = FITTED_GROUP.granularity
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
    share = FITTED_GROUP.granularity
    with pytest.raises(ObservationError, match="nothing was observed"):
        seen(share, [torch.zeros(0, 32)]).qparams(FITTED_GROUP)
    for bad in (math.nan, math.inf):
        with pytest.raises(DataError, match="1 of 33 observed values are NaN or infinite") as caught:
            seen(PerTensor(), [torch.cat([gaussian(32), torch.tensor([bad])])]).qparams(
                FITTED_GROUP.but(granularity=PerTensor()), where="fc.weight"
            )
        assert caught.value.where == "fc.weight"
    with pytest.raises(DataError, match=r"groups of 32 do not divide the 33 elements"):
        seen(share, [gaussian(2, 33)])
    with pytest.raises(ObservationError, match="the spec asks for per-tensor"):
        seen(share, [gaussian(2, 32)]).qparams(FITTED_GROUP.but(granularity=PerTensor()))
    with pytest.raises(DataError, match="wider than float32 can measure"):
        seen(share, [torch.tensor([[3e38, -3e38] * 16])]).qparams(FITTED_GROUP)


# -- in the engine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["INT4_GROUP", "INT2_GROUP", "INT4_GROUP_SYMMETRIC"])
@pytest.mark.parametrize("ending", ["toml", "json"])
def test_fitted_group_specs_go_through_text_and_files(name: str, ending: str, tmp_path: Path) -> None:
    named = QuantSpec.parse(name)
    assert named.observe.name == ("fit" if name == "INT2_GROUP" else "minmax")
    spec = named.but(observe="fit")
    assert QuantSpec.parse(str(spec)) == spec
    assert QuantSpec.model_validate_json(spec.model_dump_json()) == spec
    assert QuantSpec.model_validate_json(spec.model_dump_json()).but(observe="minmax") == spec.but(observe=None)
    config = qc.QuantConfig().set("0", spec.but(granularity=PerGroup(axis=1, size=64)))
    config.save(tmp_path / f"config.{ending}")
    assert qc.QuantConfig.load(tmp_path / f"config.{ending}") == config


@pytest.mark.parametrize(
    "spec",
    [FITTED_GROUP, INT2_GROUP, INT8_WEIGHT.but(observe="fit", timing="weight-only")],
    ids=str,
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
        warnings.filterwarnings("ignore", ".*below [12]0 dB")  # two bits are few
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
