"""The dynamic linear layer that ends in a ReLU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as ao_intrinsic
import torch.ao.nn.intrinsic.quantized.dynamic as ao_intrinsic_dynamic
from torch import nn

from quantc.errors import SpecError
from quantc.nn import intrinsic
from quantc.nn import qconfig as qconfigs
from quantc.nn.intrinsic.quantized import dynamic as intrinsic_dynamic
from quantc.nn.quantized import dynamic
from tests.support.dynamic_cases import furthest
from tests.support.nn_cases import engine


def test_linear_that_ends_in_a_relu() -> None:
    with engine("x86"):
        inner = nn.Linear(24, 10)
        inner.qconfig = qconfigs.per_channel_dynamic_qconfig  # type: ignore[assignment]
        pair: list[Any] = [kind(inner, nn.ReLU()) for kind in (intrinsic.LinearReLU, ao_intrinsic.LinearReLU)]
        mine, other = pair
        mine.qconfig = other.qconfig = inner.qconfig
        ours, theirs = intrinsic_dynamic.LinearReLU.from_float(mine), ao_intrinsic_dynamic.LinearReLU.from_float(other)
        x = torch.randn(5, 24)
        assert furthest(ours(x), theirs(x)) < 1e-5
        assert float(ours(x).min()) == 0


@pytest.mark.parametrize("qconfig", [qconfigs.default_dynamic_qconfig, qconfigs.float16_dynamic_qconfig])
def test_it_is_the_plain_layer_with_a_relu(qconfig: Any) -> None:
    torch.manual_seed(0)
    inner: Any = nn.Linear(6, 4)
    inner.qconfig = qconfig
    fused: Any = intrinsic.LinearReLU(inner, nn.ReLU())
    made, plain = intrinsic_dynamic.LinearReLU.from_float(fused), dynamic.Linear.from_float(inner)
    x = torch.randn(5, 6)
    assert torch.equal(made(x), plain(x).relu())


def test_each_is_made_of_its_own_kind() -> None:
    fused, plain = intrinsic.LinearReLU(nn.Linear(6, 4), nn.ReLU()), nn.Linear(6, 4)
    with pytest.raises(SpecError, match="not of Linear"):
        intrinsic_dynamic.LinearReLU.from_float(plain)
    with pytest.raises(SpecError, match="not of LinearReLU"):
        dynamic.Linear.from_float(fused)
