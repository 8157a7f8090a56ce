"""Run-time scales, weights alone, groups of weights, tables and recurrent layers in ExecuTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.spec.formats import PerGroup
from quantc.targets.executorch.delegation import RunsOn
from tests.support.executorch_models import NEAR, linear_layer, relative, sqnr, weights_in, without_data

pytest.importorskip("executorch")
GROUPS = PerGroup(axis=1, size=32)
OTHERS: dict[str, tuple[str, qc.QuantSpec]] = {
    "groups of int4": ("weight-only", qc.INT4_GROUP),
    "groups of int8": ("weight-only", qc.INT8_WEIGHT_ONLY.but(granularity=GROUPS)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_other_groups_are_brought_back_to_float_as_it_runs(case: str) -> None:
    x = torch.randn(2, 3, 64)
    program = weights_in(linear_layer(), x, *OTHERS[case])
    lowered = qc.lower(program, "executorch")
    (row,) = lowered.delegation().fallen_back
    assert row.place is RunsOn.PORTABLE
    assert "a scale for each channel" in row.why
    assert relative(program(x), lowered(x)) < NEAR
    assert len(lowered.content) < 0.9 * 64 * 48 * 4  # levels are stored, and not floats


@pytest.mark.slow
def test_scales_of_groups_that_the_delegate_would_round_are_named() -> None:
    x = torch.randn(5, 64)
    program = weights_in(linear_layer(), x, "dynamic", qc.INT4_GROUP_SYMMETRIC.but(timing="static"))
    with pytest.warns(UserWarning, match=r"bfloat16.*scale_bits=8"):
        lowered = qc.lower(program, "executorch")
    assert sqnr(program(x), lowered(x)) > 40


@pytest.mark.slow
def test_a_convolution_with_a_quantized_weight_alone_is_float_in_the_delegate() -> None:
    x = torch.randn(2, 3, 8, 8)
    program = without_data(nn.Conv2d(3, 8, 3), x, mode="weight-only")
    lowered = qc.lower(program, "executorch")
    assert [row.place for row in lowered.delegation().rows] == [RunsOn.DELEGATE_FLOAT]
    assert relative(program(x), lowered(x)) < NEAR


@pytest.mark.slow
def test_one_run_time_scale_for_several_rows_is_named() -> None:
    x = torch.randn(5, 64)
    program = weights_in(linear_layer(), x, "dynamic", qc.INT8_DYNAMIC)
    with pytest.warns(UserWarning, match="a scale for each row"):
        lowered = qc.lower(program, "executorch")
    exact = linear_layer()(x)
    assert sqnr(exact, lowered(x)) > sqnr(exact, program(x)) - 1


def test_an_embedding_is_looked_up_in_int8() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(100, 16), nn.Linear(16, 4)

        def forward(self, ids: Tensor) -> Any:
            return self.head(self.table(ids))

    ids = torch.randint(0, 100, (2, 6))
    config = qc.QuantConfig().set_op("embedding", qc.INT8_WEIGHT_ONLY)
    program = without_data(Words(), ids, mode="dynamic", config=config)
    lowered = qc.lower(program, "executorch")
    row = lowered.delegation().row("embedding")
    assert row is not None
    assert row.place is RunsOn.KERNEL
    # what is looked up lies on a grid: halfway between two levels of the next one it may go to either
    assert relative(program(ids), lowered(ids)) < 2 / 127


# -- recurrent layers ----------------------------------------------------------------------------------------------
