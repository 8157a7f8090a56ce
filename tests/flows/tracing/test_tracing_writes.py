"""Writes in place that the tracing flow follows: those that no rule knows leave the ops around them quantized, and in training
those who share the memory see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantc.errors import CaptureError
from quantc.flows.tracing import convert, coverage, prepare, to_program
from quantc.flows.tracing.run import STATE
from tests.support.traced_runs import sqnr

TORCH: Any = torch
Step = Callable[[Any], Any]


def images() -> Tensor:
    return torch.randn(4, 4, 6, 6)


class Between(nn.Module):
    """A step between convolutions."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(4, 4, 1) for _ in range(3))
        self.step = step

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.second(F.relu(self.first(x))))
        given = self.step(y)
        return self.third(given if isinstance(given, Tensor) else y)


def put(y: Tensor) -> None:
    y[y > 1] = 0


def put_nothing_yet(y: Tensor) -> None:
    """Where the example has nothing to write."""
    y[y > 6] = 6


def put_rows(y: Tensor) -> None:
    y[y > 1] = y[y > 1] * 2


FIRST = torch.zeros(4, 1, 6, 6, dtype=torch.int64)
STEPS: dict[str, Step] = {
    "foreach": lambda y: TORCH._foreach_add_([y], 3),
    "foreach of several": lambda y: TORCH._foreach_mul_([y[0], y[1]], [2.0, 3.0]),
    "foreach that clamps": lambda y: TORCH._foreach_clamp_max_([y], 1.0),
    "foreach that copies": lambda y: TORCH._foreach_copy_([y], [y + 1]),
    "scatter_": lambda y: y.scatter_(1, FIRST, 1.0),
    "scatter_ to zeros": lambda y: torch.zeros_like(y).scatter_(1, FIRST, y),
    "index_put_": lambda y: y.index_put_((torch.tensor([0]),), torch.tensor(0.0)),
    "index_add_": lambda y: y.index_add_(0, torch.tensor([0]), torch.ones(1, 4, 6, 6)),
    "put_": lambda y: y.put_(torch.tensor([0]), torch.tensor([1.0])),
    "masked_fill_": lambda y: y.masked_fill_(y > 1, 0),
    "a mask": put,
    "a mask that is empty at first": put_nothing_yet,
    "a mask of rows": put_rows,
    "copy_": lambda y: y.copy_(y + 3),
    "copy_ to new memory": lambda y: torch.empty(0).resize_(y.shape).copy_(y),
    "normal_": lambda y: y.normal_(),
    "noise": lambda y: y + torch.empty_like(y).normal_(),
    "uniform_": lambda y: y.uniform_(),
    "exponential_": lambda y: y.exponential_(),
    "nn.init": nn.init.normal_,
    "nn.init of another": lambda y: y + nn.init.xavier_uniform_(torch.empty_like(y)),
    "apply_": lambda y: y.clone().apply_(lambda value: value + 1),
    "fill_diagonal_": lambda y: done(y[0, 0].fill_diagonal_(2)),
    "sparse": lambda y: y.to_sparse().to_dense(),
}


def done(made: Any) -> None:
    """Drop what a write gives."""


@pytest.mark.parametrize("how", STEPS)
def test_ops_around_a_write_that_no_rule_knows_are_quantized(how: str) -> None:
    torch.manual_seed(0)
    model = Between(STEPS[how]).eval()
    prepared: Any = prepare(model, images())
    products = [row for row in coverage(prepared).rows if row.op == "conv2d"]
    assert len(products) == 3
    assert len(prepared._modules[STATE].units) == 3
    with torch.no_grad():
        for seed in range(2):
            x = images() * 3
            torch.manual_seed(seed)
            expected = model(x)
            torch.manual_seed(seed)
            assert sqnr(expected, prepared(x)) > 80
        quantized = convert(prepared)
        for seed in range(4):
            x = images() * 2
            torch.manual_seed(seed)
            expected = model(x)
            torch.manual_seed(seed)
            assert sqnr(expected, quantized(x)) > 22


def test_a_model_that_writes_to_its_input_is_quantized_and_writes() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Any:
            x += self.first(x)
            return self.second(x)

    torch.manual_seed(0)
    model = Adds().eval()
    prepared: Any = prepare(model, images())
    assert sum(unit.is_product for unit in prepared._modules[STATE].units) == 2
    with pytest.raises(CaptureError, match="writes to its input"):
        to_program(prepared)
    with torch.no_grad():
        prepared(images())
        quantized = convert(prepared)
        for _ in range(4):
            ours = images()
            theirs = ours.clone()
            assert sqnr(model(theirs), quantized(ours)) > 25
            assert sqnr(theirs, ours) > 25


# -- training ----------------------------------------------------------------------------------------------------------


class Shares(nn.Module):
    """Quantized ops that write in place; with `is_on`, which no example shows, somebody else has the memory."""

    def __init__(self, op: str, share: Step) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(4, 4, 1) for _ in range(3))
        self.op, self.share, self.is_on = op, share, False

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        y = y - 0.1  # of its own: not part of what follows
        shared = self.share(y) if self.is_on else None
        if self.op == "relu_":
            F.relu_(y)
        elif self.op == "add_":
            y += self.second(x)
        elif self.op == "add_ and relu_":
            y += self.second(x)
            F.relu_(y)
        else:
            y += y
        return with_shared(self.third(y), shared)


def with_shared(made: Tensor, shared: Tensor | None) -> Tensor:
    """A result in which what others have counts."""
    return made if shared is None else made + shared.reshape(-1)[: made.numel() // 2].repeat(2).view(made.shape)


def by_hand(model: Shares, x: Tensor, fakes: dict[str, Any]) -> Tensor:
    """The same in torch's own words, rounded on the ranges that were found."""

    def rounded(x: Tensor, *names: str) -> Tensor:
        found = next((fakes[name] for name in names if name in fakes), None)
        if found is None:
            return x
        low, high = min(float(found.low), 0.0), max(float(found.high), 0.0)
        scale = (high - low) / 255
        return torch.fake_quantize_per_tensor_affine(x, scale, round(-low / scale), 0, 255)

    def conv(layer: nn.Conv2d, x: Tensor, name: str) -> Tensor:
        limit = fakes[name].spec.qmax
        scale = layer.weight.detach().abs().amax((1, 2, 3)) / limit
        zeros = torch.zeros(4, dtype=torch.int32)
        weight = torch.fake_quantize_per_channel_affine(layer.weight, scale, zeros, 0, -limit, limit)
        return F.conv2d(x, weight, layer.bias)

    has_second = model.op.startswith("add_") and "itself" not in model.op
    x = rounded(x, "conv2d_in0")
    y = conv(model.first, x, "conv2d_in1") - 0.1
    shared = model.share(y)
    if model.op == "relu_":
        y.copy_(torch.relu(rounded(y.clone(), "relu__in0")))
    elif has_second:
        made = rounded(y.clone(), "add__in0") + conv(model.second, x, "conv2d_1_in1")
        y.copy_(torch.relu(made) if "relu_" in model.op else made)
    else:
        once = rounded(y.clone(), "add__in0")
        y.copy_(once + once)
    last = "conv2d_2" if has_second else "conv2d_1"
    return with_shared(conv(model.third, rounded(y, f"{last}_in0"), f"{last}_in1"), shared)


SHARES: dict[str, Step] = {
    "a slice": lambda y: y[:2],
    "a view": lambda y: y.view(-1),
    "a view of a view": lambda y: y.view(-1)[10:].view(2, -1),
    "a transposed one": lambda y: y.permute(1, 0, 2, 3),
    "itself": lambda y: y,
    "detached": lambda y: y.detach(),
}


@pytest.mark.parametrize("op", ["relu_", "add_", "add_ and relu_", "add_ of itself"])
@pytest.mark.parametrize("share", SHARES)
def test_training_writes_to_memory_that_others_share(share: str, op: str) -> None:
    torch.manual_seed(0)
    model = Shares(op, SHARES[share])
    prepared: Any = prepare(model, images(), qat=True)
    prepared.is_on = True
    x = images()
    found = prepared(x)
    expected: Any = by_hand(model, x, prepared._modules[STATE].fake_quants)
    assert sqnr(expected.detach(), found.detach()) > 60
    expected.pow(2).sum().backward()
    found.pow(2).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert sqnr(parameter.grad, prepared.get_parameter(name).grad) > 60
