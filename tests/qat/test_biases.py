"""Biases trained on the accumulator's grid: multiples of input scale times weight scale, with their own gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.ir.program import Program
from quantc.qat.biases import SnappedBias, snap_trained_biases
from quantc.qat.fake import GivenScale
from quantc.qat.removal import module_calls
from quantc.spec.numerics import QParams
from quantc.spec.spec import INT8_WEIGHT, UINT8
from tests.support.training import SMALL_BATCH, assert_converts_exactly, small_prepared


def scales() -> tuple[GivenScale, GivenScale]:
    x = GivenScale("linear:in0", UINT8, "", QParams(torch.tensor(0.5), torch.tensor(0)))
    weight = GivenScale("linear:in1", INT8_WEIGHT, "", QParams(torch.tensor([0.25, 1.0]), torch.tensor([0, 0])))
    return x, weight


def test_a_bias_is_rounded_to_the_product_of_both_scales() -> None:
    x, weight = scales()
    snap = SnappedBias(x, weight)
    bias = torch.tensor([0.3, 0.7], requires_grad=True)
    assert snap(bias) is bias  # nothing has gone through the factors yet
    x(torch.ones(1)), weight(torch.ones(2, 1))
    rounded = snap(bias)
    assert rounded.tolist() == [0.25, 0.5]  # multiples of 0.125 and of 0.5
    (rounded * torch.tensor([3.0, 5.0])).sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [3.0, 5.0]
    assert snap(None) is None


def test_its_factors_are_not_among_its_children() -> None:
    snap = SnappedBias(*scales())
    assert list(snap.state_dict()) == []
    assert list(snap.children()) == []


def snapped(program: Program) -> list[str]:
    return [node.name for node, module in module_calls(program) if isinstance(module, SnappedBias)]


def test_backends_that_add_biases_to_integers_train_them_so() -> None:
    program = small_prepared("onnx")
    assert snapped(program) == ["snap_conv2d_bias", "snap_linear_bias"]
    assert snapped(small_prepared("x86")) == []
    program(SMALL_BATCH[0])
    assert_converts_exactly(program, SMALL_BATCH[0])


def linears(config: qc.QuantConfig | None = None, *, bias: bool = True) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    return qc.prepare(qc.capture(model, (torch.randn(2, 3),)), "x86", qat=True, config=config)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (qc.QuantConfig(), 2),
        (qc.QuantConfig().set("3", qc.FLOAT), 1),
        (qc.QuantConfig().set("3", qc.UINT8_DYNAMIC.but(qmax=127)), 1),
        (qc.QuantConfig().set("3", qc.INT8_WEIGHT_ONLY), 1),
    ],
    ids=["all", "one float", "one dynamic", "one weight-only"],
)
def test_only_accumulators_of_a_known_scale_have_a_grid(config: qc.QuantConfig, count: int) -> None:
    program = linears(config)
    assert snap_trained_biases(program) == count
    assert len(snapped(program)) == count


def test_products_without_a_bias_are_left_out() -> None:
    assert snap_trained_biases(linears(bias=False)) == 1
