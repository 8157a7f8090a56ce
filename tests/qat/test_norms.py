"""Batch norms folded into the weight before them while they are trained: torch's numbers, rounded weights in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import quantc as qc
from quantc.ir.dialect import is_op
from quantc.qat.norms import FoldNorm, LiveNorm, UnfoldNorm
from quantc.rewrite.affine_folding import Channels
from tests.support.training import assert_converts_exactly, batches


@pytest.mark.parametrize(
    "product", ["conv1d", "conv2d", "conv3d", "transposed1d", "transposed2d", "transposed3d", "linear"]
)
def test_norms_behind_every_product_are_folded(product: str) -> None:
    torch.manual_seed(0)
    rank = 0 if product == "linear" else int(product[-2])
    layers: dict[str, nn.Module] = {
        "linear": nn.Linear(4, 6),
        **{f"conv{n}d": getattr(nn, f"Conv{n}d")(4, 6, 3, groups=2, bias=False) for n in (1, 2, 3)},
        **{f"transposed{n}d": getattr(nn, f"ConvTranspose{n}d")(4, 6, 3, groups=2) for n in (1, 2, 3)},
    }
    norm = getattr(nn, f"BatchNorm{max(rank, 1)}d")(6)
    model = nn.Sequential(layers[product], norm, nn.ReLU())
    x = torch.randn(5, 4, *[5] * rank)
    program = qc.prepare(qc.capture(model.eval(), (x,)), "x86", qat=True)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        program(x).square().mean().backward()
        optimizer.step()
    assert program.state_dict()["1.num_batches_tracked"] == 3
    converted = assert_converts_exactly(program, x)
    assert not any(is_op(node, "batch_norm") for node in converted.nodes())


def test_a_norm_whose_weight_others_read_stays_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)
            self.one, self.two = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.two(self.conv(self.one(self.conv(x))))

    torch.manual_seed(0)
    x = batches(1)[0][0]
    program = qc.prepare(qc.capture(Twice().eval(), (x,)), "x86", qat=True)
    assert any("stays" in note for entry in program.log for note in entry.notes)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.05)
    program(x).square().mean().backward()
    optimizer.step()
    assert_converts_exactly(program, x)


def test_a_frozen_norm_of_the_model_stays_frozen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    model.train()
    model[1].eval()
    x = batches(1)[0][0]
    program = qc.prepare(qc.capture(model, (x,)), "x86", qat=True)
    mean = program.state_dict()["1.running_mean"].clone()
    program(x)
    assert torch.equal(mean, program.state_dict()["1.running_mean"])
    assert_converts_exactly(program, x)


def test_a_norm_that_is_switched_off_divides_nothing_by_zero() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    nn.init.zeros_(model[1].weight)  # type: ignore[arg-type]
    x = batches(1)[0][0]
    program = qc.prepare(qc.capture(model.eval(), (x,)), "x86", qat=True)
    program(x).sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in program.parameters() if parameter.grad is not None)
    assert_converts_exactly(program, x)


def norm(channels: int = 4) -> nn.BatchNorm2d:
    torch.manual_seed(0)
    made = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.3)
    with torch.no_grad():
        for tensor in (made.weight, made.bias, made.running_mean):
            assert tensor is not None
            tensor.uniform_(-1, 1)
        assert made.running_var is not None
        made.running_var.uniform_(0.5, 2)
    return made


def parts(made: nn.BatchNorm2d) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert made.running_mean is not None
    assert made.running_var is not None
    return made.weight, made.bias, made.running_mean, made.running_var


@pytest.mark.parametrize("transposed", [False, True])
def test_in_eval_mode_the_product_is_that_of_conv_and_norm(transposed: bool) -> None:
    made = norm().eval()
    conv = nn.ConvTranspose2d(6, 4, 3, groups=2) if transposed else nn.Conv2d(6, 4, 3, groups=2)
    fold = FoldNorm(Channels(transposed, 2 if transposed else 1), made.eps).eval()
    assert conv.bias is not None
    weight, bias, factor = fold(conv.weight, conv.bias, *parts(made))
    assert factor is None
    x = torch.randn(2, 6, 5, 5)
    call = functional.conv_transpose2d if transposed else functional.conv2d
    assert torch.allclose(call(x, weight, bias, groups=2), made(conv(x)), atol=1e-5)


def test_in_training_the_weight_is_multiplied_and_divided_again() -> None:
    made, w, b = norm(), torch.randn(4, 3, 2, 2), torch.randn(4)
    gamma, beta, mean, var = parts(made)
    folded, bias, factor = FoldNorm(Channels(), made.eps)(w, b, gamma, beta, mean, var)
    assert bias is b
    for channel in range(4):
        expected = w[channel] * float(gamma[channel]) / (float(var[channel]) + 1e-3) ** 0.5
        assert torch.allclose(folded[channel], expected)
    unfold = UnfoldNorm(Channels())
    assert torch.allclose(unfold(folded, factor), w, atol=1e-6)
    assert unfold(folded, None) is folded


def test_a_norm_without_scale_and_shift_is_folded_too() -> None:
    _, _, mean, var = parts(norm())
    w = torch.randn(4, 3)
    folded, bias, factor = FoldNorm(Channels(), 1e-3)(w, None, None, None, mean, var)
    assert factor is not None
    assert bias is None
    assert torch.allclose(folded, w / torch.sqrt(var + 1e-3).unsqueeze(1))


@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_live_norm_is_torch_s_in_training(momentum: float | None) -> None:
    theirs = norm()
    theirs.momentum = momentum
    ours = copy.deepcopy(theirs)
    live = LiveNorm(ours.eps, momentum)
    for _ in range(3):
        x = torch.randn(5, 4, 3, 3)
        assert torch.equal(live(x, *parts(ours), ours.num_batches_tracked), theirs(x))
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_norm_that_is_folded_is_the_identity_and_keeps_its_statistics(is_frozen: bool) -> None:
    made = norm()
    live = LiveNorm(made.eps, made.momentum)
    live.frozen = is_frozen
    live.train(is_frozen)
    before = copy.deepcopy(made.state_dict())
    x = torch.randn(5, 4, 3, 3)
    assert live(x, *parts(made), made.num_batches_tracked) is x
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())
    assert ("frozen" in repr(live)) is is_frozen
