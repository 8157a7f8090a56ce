"""Number formats and granularities: what torch stores, and how they are written."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter

from quantc.errors import SpecError
from quantc.spec.formats import FACTS, DType, Granularity, PerChannel, PerGroup, PerTensor, PerToken, Role
from quantc.spec.spec import INT8


@pytest.mark.parametrize("dtype", list(DType))
def test_bounds_are_those_of_the_storage(dtype: DType) -> None:
    facts = FACTS[dtype]
    if dtype.is_float:
        assert facts.qmax == torch.finfo(facts.storage).max
        return
    limits = torch.iinfo(facts.storage)
    assert limits.min <= facts.qmin < facts.qmax <= limits.max
    assert facts.qmax - facts.qmin + 1 == 2**facts.bits


def test_granularities_print() -> None:
    assert [str(share) for share in (PerTensor(), PerChannel(axis=1), PerGroup(axis=1, size=64), PerToken())] == [
        "per-tensor",
        "per-channel(axis=1)",
        "per-group(axis=1,size=64)",
        "per-token",
    ]
    assert INT8.but(granularity="per-channel", role=Role.WEIGHT).granularity == PerChannel(axis=0)


def test_integers_are_twos_complement_but_for_uint8() -> None:
    assert [(dtype.qmin, dtype.qmax) for dtype in (DType.INT2, DType.INT4, DType.INT8, DType.UINT8, DType.INT16)] == [
        (-2, 1),
        (-8, 7),
        (-128, 127),
        (0, 255),
        (-32768, 32767),
    ]
    assert [dtype for dtype in DType if not dtype.is_signed] == [DType.UINT8]


def test_every_format_has_facts_and_narrow_ones_share_a_byte() -> None:
    assert set(FACTS) == set(DType)
    narrow = {dtype for dtype in DType if dtype.bits < 8}
    assert {dtype.storage for dtype in narrow} == {torch.int8}
    assert {dtype.value for dtype in DType if dtype.is_float} == {"fp16", "fp8_e4m3", "fp8_e5m2"}
    assert [dtype.bits for dtype in (DType.INT3, DType.FP16, DType.FP8_E5M2, DType.INT32)] == [3, 16, 8, 32]


GRANULARITY: TypeAdapter[PerTensor | PerChannel | PerGroup | PerToken] = TypeAdapter(Granularity)


def test_a_name_alone_is_the_granularity_with_its_defaults() -> None:
    assert GRANULARITY.validate_python("per-group") == PerGroup(axis=1, size=32)
    assert GRANULARITY.validate_python("per-channel") == PerChannel(axis=0)
    assert GRANULARITY.validate_python({"kind": "per-channel", "axis": -1}) == PerChannel(axis=-1)
    for share in (PerTensor(), PerChannel(axis=2), PerGroup(size=8), PerToken()):
        assert GRANULARITY.validate_json(GRANULARITY.dump_json(share)) == share


def test_groups_have_at_least_two_elements_and_axes_are_whole_numbers() -> None:
    with pytest.raises(SpecError, match="size"):
        PerGroup(size=1)
    with pytest.raises(SpecError, match="axis"):
        PerChannel.model_validate({"axis": 1.0})
    with pytest.raises(SpecError, match="axis"):
        PerTensor.model_validate({"axis": 0})
