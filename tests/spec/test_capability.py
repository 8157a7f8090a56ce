"""What a backend's kernels accept, and the reasons against what they do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.errors import AnnotationError
from quantc.patterns import Rule, RuleTable, aten, const
from quantc.spec.capability import Capability, refusal
from quantc.spec.formats import DType, PerChannel, Role, Scheme, Timing
from quantc.spec.spec import INT4_GROUP, INT8, INT8_DYNAMIC, INT8_NARROW_WEIGHT, INT8_WEIGHT, UINT8, QuantSpec

ACT = Capability(role=Role.ACT, dtypes=(DType.INT8, DType.UINT8), min_eps=2**-12)
NARROW = Capability(
    role=Role.WEIGHT,
    dtypes=(DType.INT8,),
    schemes=(Scheme.SYMMETRIC,),
    granularities=("per-tensor", "per-channel"),
    qmin=-127,
)


def test_a_spec_whose_fields_are_all_listed_is_accepted() -> None:
    assert ACT.refusals(INT8) == ACT.refusals(UINT8) == []
    assert NARROW.refusals(INT8_NARROW_WEIGHT) == []
    assert NARROW.refusals(INT8_NARROW_WEIGHT.but(granularity="per-tensor")) == []


@pytest.mark.parametrize(
    ("capability", "spec", "told"),
    [
        (ACT, QuantSpec(dtype=DType.INT16), "dtype must be int8 or uint8, not int16"),
        (NARROW, INT8_NARROW_WEIGHT.but(scheme="affine"), "scheme must be symmetric, not affine"),
        (ACT, INT8.but(granularity=PerChannel(axis=1)), "granularity must be per-tensor, not per-channel"),
        (ACT, INT8_DYNAMIC, "timing must be static, not dynamic"),
        (NARROW, INT8_WEIGHT, "the range must lie in -127..127, not be -128..127"),
        (ACT, INT8.but(eps=2**-13), "at least 0.000244140625, not 0.0001220703125"),
    ],
    ids=["dtype", "scheme", "granularity", "timing", "range", "eps"],
)
def test_each_field_that_is_not_listed_is_one_reason(capability: Capability, spec: QuantSpec, told: str) -> None:
    (reason,) = capability.refusals(spec)
    assert told in reason


@pytest.mark.parametrize("spec", [INT8, UINT8, INT8_WEIGHT, INT8_NARROW_WEIGHT, INT4_GROUP, INT8_DYNAMIC], ids=str)
def test_the_capability_of_a_spec_accepts_it_and_narrower_ranges(spec: QuantSpec) -> None:
    capability = Capability.of(spec)
    assert capability.refusals(spec) == []
    assert capability.refusals(spec.but(eps=spec.eps / 2)) == []
    symmetric = spec.scheme is Scheme.SYMMETRIC
    assert capability.refusals(spec.but(qmax=3, **({"qmin": -3} if symmetric else {}))) == []


def test_the_reason_is_that_of_the_nearest_capability() -> None:
    far = Capability(role=Role.WEIGHT, dtypes=(DType.INT4,), schemes=(Scheme.AFFINE,))
    assert refusal((far, NARROW), INT8_WEIGHT) == "the range must lie in -127..127, not be -128..127"
    assert refusal((far, NARROW, Capability.of(INT8_WEIGHT)), INT8_WEIGHT) is None


def test_roles_and_techniques_come_first() -> None:
    assert refusal((ACT,), INT8_WEIGHT) == "it quantizes act, not weight"
    assert refusal((), INT8) == "it quantizes nothing, not act"
    both = (ACT, Capability(role=Role.ACT, dtypes=(DType.INT4,), timings=(Timing.STATIC,)))
    assert refusal(both, INT8_DYNAMIC) == "timing must be static, not dynamic"


def test_scales_and_observations_can_be_constrained() -> None:
    powers = Capability(role=Role.ACT, dtypes=(DType.INT8,), scale_bits=1, observes=("minmax",))
    assert powers.refusals(INT8.but(scale_bits=1)) == []
    (bits,) = powers.refusals(INT8)
    assert bits == "scales must be powers of two, not have 24 significant bits (scale_bits)"
    (observed,) = powers.refusals(INT8.but(scale_bits=1, observe="histogram"))
    assert observed == "the range must be found by minmax, not histogram (observe)"
    assert Capability.of(INT8.but(scale_bits=1)).scale_bits == 1


LINEAR = Rule(
    "linear",
    aten.linear("x", const("w"), const("b?")),
    {"x": "act", "w": "weight", "out": "act"},
    supports={"qdq"},
)
ACTS = INT8.but(scheme="symmetric", scale_bits=1, eps=0.001)
WEIGHTS = INT8_WEIGHT.but(scale_bits=8, eps=2.0**-20)
STRICT = Backend(
    "strict",
    RuleTable("strict", (LINEAR,)),
    roles={"act": ACTS, "weight": WEIGHTS},
    takes=(
        Capability(role=Role.ACT, dtypes=(DType.INT8,), scale_bits=1, min_eps=0.001, observes=("minmax", "mse")),
        Capability(
            role=Role.WEIGHT, dtypes=(DType.INT8,), granularities=("per-channel",), scale_bits=8, min_eps=2.0**-20
        ),
    ),
)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (ACTS.but(scale_bits=2), "scales must be powers of two, not have 2 significant bits (scale_bits)"),
        (ACTS.but(eps=2.0**-12), "the smallest scale (eps) must be at least 0.001, not 0.000244140625"),
        (ACTS.but(observe="percentile"), "the range must be found by minmax or mse, not percentile (observe)"),
        (WEIGHTS.but(scale_bits=9), "scales must have 8 significant bits, not have 9 significant bits (scale_bits)"),
        (WEIGHTS.but(eps=2.0**-23), "the smallest scale (eps) must be at least 9.5367431640625e-07"),
        (ACTS.but(observe="mse"), None),
        (WEIGHTS.but(scale_bits=1, observe="percentile"), None),
    ],
)
@pytest.mark.parametrize("qat", [False, True])
def test_configs_are_held_to_them_by_role(spec: QuantSpec, told: str | None, qat: bool) -> None:
    program = qc.capture(nn.Sequential(nn.Linear(4, 4)), (torch.ones(2, 4),))
    config = qc.QuantConfig().set(nn.Linear, spec)
    given = program if qat else program.eval()
    if told is None:
        if not (qat and spec.observe.name == "mse"):
            assert qc.prepare(given, STRICT, config=config, qat=qat).plan.claims.rows
        return
    with pytest.raises(AnnotationError) as caught:
        qc.prepare(given, STRICT, config=config, qat=qat)
    assert told in caught.value.what
    assert "linear (0 : Linear), by the config's rule" in str(caught.value.where)
    assert caught.value.advice == "choose another spec in the config, or FLOAT"


def test_roles_of_a_backend_are_held_to_them_too() -> None:
    program = qc.capture(nn.Linear(4, 4).eval(), (torch.ones(2, 4),))
    with pytest.raises(AnnotationError, match="smallest scale"):
        qc.prepare(program, STRICT.but(act=ACTS.but(eps=2.0**-12)))
