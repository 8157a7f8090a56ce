"""Calls that are part of one fused op, and what lies between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantc.flows.tracing import convert
from quantc.flows.tracing.fused_calls import Stage
from quantc.flows.tracing.traced_tensor import floats_of, value_of
from tests.support.traced_runs import (
    calibrated,
    images,
    sqnr,
)


class Looked(nn.Module):
    """Somebody looks at what lies between a convolution and its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 8, 3), nn.ReLU()
        self.seen: list[float] = []
        self.looks = False

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        z = self.act(y)
        if self.looks:
            self.seen.append(float(y.min()))
        return z


def test_what_lies_inside_of_a_fused_op_can_be_looked_at() -> None:
    torch.manual_seed(0)
    model = Looked().eval()
    quantized: Any = convert(calibrated(model, [(images(),)]))
    quantized.looks = model.looks = True
    x = images()
    with torch.no_grad():
        expected, found = model(x), quantized(x)
    assert sqnr(expected, found) > 25
    assert model.seen[0] < -0.1  # it is what comes before the activation
    assert abs(quantized.seen[-1] - model.seen[0]) < 0.05


def looked(function: Any = None) -> tuple[Looked, Any, list[Any]]:
    """A converted model, with what its convolution gave each time."""
    torch.manual_seed(0)
    model = Looked().eval()
    quantized: Any = convert(calibrated(model, [(images(),)]))
    seen: list[Any] = []
    plain = quantized.act.forward

    def forward(x: Any) -> Any:
        seen.append(x)
        return plain(x if function is None else function(x))

    quantized.act.forward = forward
    return model, quantized, seen


def test_what_a_layer_gives_knows_its_shape_before_it_is_computed() -> None:
    model, quantized, seen = looked()
    x = images()
    with torch.no_grad():
        quantized(x)
        expected = model.conv(x)
    (inside,) = seen
    assert isinstance(value_of(inside), Stage)
    assert inside.shape == expected.shape
    assert inside.dtype is torch.float32
    assert sqnr(expected, floats_of(inside)) > 25


def test_another_tensor_in_between_is_computed_in_float() -> None:
    model, quantized, _ = looked(lambda x: x * 1.5)
    x = images()
    with torch.no_grad():
        assert sqnr(torch.relu(1.5 * model.conv(x)), quantized(x)) > 25


def test_a_result_that_is_used_twice_is_two_tensors() -> None:
    _, quantized, _ = looked()
    x = images()
    with torch.no_grad():
        first, second = quantized(x), quantized(x)
        first.zero_()
        assert float(second.abs().sum()) > 0
        assert torch.equal(quantized(x), second)


def test_under_autocast_results_have_its_dtype_inside() -> None:
    model, quantized, seen = looked()
    x = images()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model.conv(x)
        quantized(x)
    assert seen[0].dtype is expected.dtype is torch.bfloat16


def test_each_call_of_the_last_function_gives_a_tensor_of_its_own() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act = nn.Conv2d(3, 4, 1), nn.ReLU()

        def forward(self, x: Tensor) -> Any:
            y = self.conv(x)
            first, second = [self.act(y) for _ in range(2)]
            first.add_(100)
            return second

    torch.manual_seed(0)
    model, x = Again().eval(), images()
    quantized = convert(calibrated(model, [(x,)]))
    with torch.no_grad():
        assert sqnr(model(x), quantized(x)) > 25
