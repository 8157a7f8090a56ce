"""The Fisher information without labels, against that in closed form."""

from __future__ import annotations

import torch
from torch import nn

import quantc as qc
from quantc.calibration.collect import Collect
from quantc.observe import Fisher
from tests.support.calibration import batch, prepared
from tests.support.small_backend import SMALL


def fisher_of(program: qc.Program, site: str) -> Fisher:
    found = program.plan.collected[f"fisher {site}"].whole()
    assert isinstance(found, Fisher)
    return found


def test_it_is_that_of_softmax() -> None:
    """Of logits z, it is diag(p) − ppᵀ: its diagonal is p (1 − p)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5)).eval()
    x = torch.randn(1, 6).expand(40_000, 6).contiguous()
    program = qc.prepare(qc.capture(model, (x[:2],)), SMALL)
    qc.calibrate(program, [x], collect="fisher")
    p = torch.softmax(model(x[:1]), dim=-1)[0].double().detach()
    found = fisher_of(program, "linear:out0")
    assert found.seen == 40_000
    assert torch.allclose(found.mean_square()[0], p * (1 - p), rtol=0.05)
    assert torch.allclose(found.mean()[0], torch.zeros(5, dtype=torch.float64), atol=0.01)


def test_gradients_are_those_of_autograd_for_each_layer() -> None:
    program = prepared()
    qc.calibrate(program, [batch(0)], collect="fisher")
    assert {name.partition(":")[0] for name in program.plan.collected} == {
        "fisher conv2d",
        "fisher conv2d_1",
        "fisher linear",
    }
    assert fisher_of(program, "conv2d:out0").mean_square().shape == (1, 8)
    assert fisher_of(program, "conv2d:out0").seen == 2 * 8 * 8
    assert fisher_of(program, "linear:out0").seen == 2
    # what reaches the head reaches the convolutions through it
    assert bool((fisher_of(program, "conv2d_1:out0").mean_square() > 0).any())


def test_the_axis_of_the_classes_can_be_another() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1)).eval()
    x = torch.randn(2, 3, 5, 5)
    program = qc.prepare(qc.capture(model, (x,)), SMALL)
    qc.calibrate(program, [x], collect=Collect(statistics="fisher{axis=1}"))
    # a row of softmax gradients adds up to zero over the classes
    assert abs(float(fisher_of(program, "conv2d:out0").mean().sum())) < 1e-4
