"""Fake quantizers: each kind of scale, what it learns from data, and what it refuses to give."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization.observer import MovingAverageMinMaxObserver

import quantc as qc
from quantc.backends.qnnpack import QNNPACK
from quantc.errors import DataError, TrainingError
from quantc.qat.fake import (
    DerivedScale,
    FakeQuantizer,
    FollowedRange,
    GivenScale,
    HandedOn,
    LearnedScale,
    OwnRange,
    RunTimeScale,
)
from quantc.spec.formats import PerToken
from quantc.spec.numerics import QParams, fake_quantize, qparams_of
from quantc.spec.spec import INT8_NARROW_WEIGHT, INT8_WEIGHT, UINT8, QuantSpec
from tests.support import fake_quantized
from tests.support.training import CONFIGS, assert_converts_exactly, batches, prepared, trained


def test_learned_scales_are_parameters_that_learn() -> None:
    program = prepared(config=CONFIGS["learned"])
    program(batches(1)[0][0])
    before = {
        fake.group: (fake.scale.detach().clone(), fake.zero_point.detach().clone())
        for fake in program.root.modules()
        if isinstance(fake, LearnedScale)
    }
    trained(program, 3)
    named = dict(program.named_parameters())
    for fake in (fake for fake in program.root.modules() if isinstance(fake, LearnedScale)):
        scale, zero_point = before[fake.group]
        assert any(parameter is fake.scale for parameter in named.values())
        assert not torch.equal(fake.scale, scale)
        assert fake.zero_point.requires_grad == (fake.spec.observe.name == "lsq-plus")
        assert fake.zero_point.requires_grad or torch.equal(fake.zero_point, zero_point)
    converted = qc.convert(program)
    qparams = converted.plan.qparams["linear:in1"]
    learned = next(
        fake for fake in program.root.modules() if isinstance(fake, FakeQuantizer) and fake.group == "linear:in1"
    )
    assert torch.equal(qparams.scale, learned.find(torch.empty(0)).scale)


def test_learned_scales_stay_positive() -> None:
    program = prepared(config=CONFIGS["learned"])
    program(batches(1)[0][0])
    for fake in (fake for fake in program.root.modules() if isinstance(fake, LearnedScale)):
        with torch.no_grad():
            fake.scale.mul_(-1.0)
            fake.zero_point.add_(1000.0)
    assert_converts_exactly(program, batches(1)[0][0])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def followed(rate: float | None = None, spec: QuantSpec = UINT8) -> FollowedRange:
    return FollowedRange("relu:out0", spec, "relu of Net", torch.Size(()), rate)


def given(scale: float, zero_point: int = 0) -> GivenScale:
    return GivenScale("x:in0", UINT8, "", QParams(torch.tensor(scale), torch.tensor(zero_point)))


def test_weights_are_rounded_by_their_own_range_as_torch_rounds_them() -> None:
    weight = noise(4, 6)
    spec = INT8_NARROW_WEIGHT
    fake = OwnRange("linear:in1", spec)
    assert torch.equal(fake(weight), fake_quantized.weight_by_channel(weight, eps=spec.eps))
    assert torch.equal(fake(weight * 3), fake_quantized.weight_by_channel(weight * 3, eps=spec.eps))  # nothing is kept
    assert fake.trained() is None


def test_only_even_ranges_of_exact_scales_clip_nothing() -> None:
    assert not OwnRange("w", INT8_NARROW_WEIGHT).clips
    for spec in (INT8_WEIGHT, INT8_NARROW_WEIGHT.but(scale_bits=4), INT8_NARROW_WEIGHT.but(observe="fit")):
        assert OwnRange("w", spec).clips, str(spec)


def test_a_range_that_grows_is_that_of_all_batches() -> None:
    fake, parts = followed(), [noise(8), noise(8, seed=1) * 3, noise(8, seed=2)]
    for part in parts:
        fake(part)
    assert fake.trained().equals(qparams_of(torch.cat(parts), UINT8))
    assert int(fake.batches) == 3


def test_a_range_that_follows_is_torch_s_moving_average() -> None:
    fake = followed(0.25)
    theirs = MovingAverageMinMaxObserver(averaging_constant=0.25, eps=UINT8.eps)
    for seed in range(4):
        x = noise(16, seed=seed) * (seed + 1)
        fake(x)
        theirs(x)
    scale, zero_point = theirs.calculate_qparams()
    assert fake.trained().one == (scale.item(), zero_point.item())


@pytest.mark.parametrize("how", ["eval", "frozen"])
def test_a_range_that_does_not_learn_stays_and_rounds(how: str) -> None:
    fake = followed()
    fake(torch.tensor([0.0, 2.55]))
    fake.eval() if how == "eval" else setattr(fake, "frozen", True)
    rounded = fake(torch.tensor([0.014, 100.0]))
    assert rounded.tolist() == pytest.approx([0.01, 2.55])
    assert int(fake.batches) == 1


def test_what_has_seen_no_batch_gives_no_scale() -> None:
    for fake in (followed(), LearnedScale("w", INT8_WEIGHT, "", torch.Size((2,)), learns_zero_point=False)):
        assert fake.trained_by_data
        for ask in (fake.trained, lambda fake=fake: fake.eval()(torch.ones(2, 3))):
            with pytest.raises(TrainingError, match="no batch has gone through it"):
                ask()


def test_numbers_that_are_not_finite_are_refused_and_leave_no_trace() -> None:
    fake = followed()
    fake(torch.tensor([0.0, 1.0]))
    with pytest.raises(DataError, match="1 of 2 values") as caught:
        fake(torch.tensor([math.nan, 5.0]))
    assert "relu:out0" in str(caught.value.where)
    assert float(fake.high) == 1.0


def test_empty_tensors_pass_through_every_kind() -> None:
    kinds: list[FakeQuantizer] = [
        followed(),
        OwnRange("w", INT8_WEIGHT),
        RunTimeScale("x", UINT8),
        LearnedScale("w", UINT8, "", torch.Size(()), learns_zero_point=True),
    ]
    for fake in kinds:
        assert fake(torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("spec", [UINT8, qc.UINT8_DYNAMIC, UINT8.but(granularity=PerToken())], ids=str)
def test_run_time_scales_are_of_the_tensor_at_hand_and_pass_all_gradients(spec: QuantSpec) -> None:
    x = noise(3, 8).requires_grad_()
    rounded = RunTimeScale("linear:in0", spec)(x)
    per_token = isinstance(spec.granularity, PerToken)
    expected = (
        fake_quantized.by_token(x.detach(), eps=spec.eps)
        if per_token
        else fake_quantized.as_it_comes(x.detach(), eps=spec.eps)
    )
    assert torch.equal(rounded, expected)
    rounded.sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 1).all())
    with pytest.raises(TrainingError, match="linear:in0"):
        RunTimeScale("linear:in0", spec).find(x)


def test_derived_scales_are_products_of_what_went_through_their_parents() -> None:
    parents = given(0.5), given(0.25)
    fake = DerivedScale("linear:in2", qc.INT32_BIAS, "", parents)
    with pytest.raises(TrainingError, match="linear:in2"):
        fake(torch.ones(2))
    for parent in parents:
        parent(torch.ones(2))
    assert fake(torch.tensor([0.3, -0.7])).tolist() == [0.25, -0.75]  # multiples of an eighth
    assert list(fake.children()) == []


def test_a_tensor_that_is_handed_on_is_rounded_in_eval_mode_alone() -> None:
    again = HandedOn(given(0.5))
    x = torch.tensor([0.3])
    assert again(x) is x
    assert again.eval()(x).tolist() == [0.5]
    assert list(again.state_dict()) == []


def test_learned_scales_start_at_the_first_tensor_and_are_kept_by_the_state_dict() -> None:
    fake = LearnedScale("x", UINT8.but(observe="lsq"), "", torch.Size(()), learns_zero_point=False)
    x = noise(64)
    assert torch.equal(fake(x), fake_quantize(x, qparams_of(x, UINT8), UINT8))
    first = fake.trained()
    fake(x * 10)
    assert fake.trained().equals(first)  # later tensors move it by gradients alone
    other = LearnedScale("x", UINT8.but(observe="lsq"), "", torch.Size(()), learns_zero_point=False)
    other.load_state_dict(fake.state_dict())
    assert other.eval()(x).equal(fake(x))


def test_frozen_learned_scales_get_no_gradient() -> None:
    fake = LearnedScale("x", UINT8.but(observe="lsq-plus"), "", torch.Size(()), learns_zero_point=True)
    x = noise(64)
    fake(x * 2).square().sum().backward()
    assert fake.scale.grad is not None
    assert float(fake.scale.grad) != 0
    fake.frozen, fake.scale.grad = True, None
    fake(x.requires_grad_()).square().sum().backward()
    assert fake.scale.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("bits", [1, 3])
@pytest.mark.parametrize("eps", [None, 0.0103, 0.25])
@pytest.mark.parametrize(
    ("act", "weight"), [(None, None), ("lsq", "lsq"), ("lsq-plus", "lsq"), ("moving-average", None)]
)
def test_trained_scales_have_the_bits_and_the_size_of_the_spec(
    bits: int, eps: float | None, act: str | None, weight: str | None
) -> None:
    floor = {} if eps is None else {"eps": eps}
    scheme = "affine" if act == "lsq-plus" else "symmetric"
    acts = qc.INT8.but(scale_bits=bits, observe=act, scheme=scheme, **floor)
    weights = INT8_WEIGHT.but(scale_bits=bits, observe=weight, **floor)
    backend = replace(QNNPACK.but(act=acts, weight=weights), takes=())
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    program = qc.prepare(qc.capture(net, (x,)), backend, qat=True)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.05)
    for _ in range(6):
        optimizer.zero_grad()
        (program(x) - x).pow(2).mean().backward()
        optimizer.step()
    converted = qc.convert(program.eval())
    assert torch.equal(converted(x), program(x))
    scales = [found.scale for name, found in converted.plan.qparams.items() if not _is_bias(converted, name)]
    assert len(scales) == 5
    for scale in scales:
        mantissa = torch.frexp(scale).mantissa.double() * 2.0**bits
        assert torch.equal(mantissa, mantissa.round())
        assert eps is None or bool((scale >= torch.tensor(eps)).all())


def _is_bias(program: qc.Program, group: str) -> bool:
    (found,) = (each for each in program.plan.groups if each.name == group)
    return found.outcome.kind == "derived"
