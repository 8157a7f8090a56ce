"""Odd eager models: prepared, they compute what they did; converted, nearly so; time after time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quantc.flows.tracing import convert, prepare
from tests.support.traced_runs import sqnr


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)


@dataclass
class Found:
    inner: Tensor
    outer: Tensor


class GivesDataclass(Pair):
    def forward(self, x: Tensor) -> Found:
        y = self.first(x)
        return Found(y, self.second(y))


class OnlyKeywords(Pair):
    def forward(self, *, x: Tensor, scale: float = 1.0) -> Any:
        return self.second(F.relu(self.first(x) * scale))


class Generates(nn.Module):
    """The generator is run by a builtin, whose calls Python makes in another way once it has seen some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(3))

    def results(self, x: Tensor) -> Iterator[Tensor]:
        for layer in self.layers:
            x = F.relu(layer(x))
            yield x

    def forward(self, x: Tensor) -> Any:
        return sum(self.results(x))


class Checkpointed(Pair):
    def forward(self, x: Tensor) -> Any:
        return self.second(checkpoint(lambda y: F.relu(self.first(y)), x, use_reentrant=False))


class NestedModes(Pair):
    def forward(self, x: Tensor) -> Any:
        with torch.inference_mode():
            y = F.relu(self.first(x))
        with torch.enable_grad():
            return self.second(y.clone()).detach()


class ComputedWeight(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> Any:
        return self.second(F.relu(F.conv2d(x, self.first.weight * self.gain)))


class Normalized(Pair):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.first)

    def forward(self, x: Tensor) -> Any:
        return self.second(F.relu(self.first(x)))


def twice(_: nn.Module, __: Any, made: Any) -> Any:
    return made * 2


def one_more(_: nn.Module, given: Any) -> Any:
    return (given[0] + 1,)


class Hooked(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(twice)
        self.second.register_forward_pre_hook(one_more)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


class SharedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)
        self.layers = nn.ModuleList([self.layer, self.layer, nn.Conv2d(4, 4, 1)])

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class OtherThread(Pair):
    def forward(self, x: Tensor) -> Any:
        y, found = self.first(x), list[Tensor]()
        thread = threading.Thread(target=lambda: found.append(y * 2))
        thread.start()
        thread.join()
        return self.second(found[0])


class GivesBackItsInput(Pair):
    """Dropout gives what it was given, so that both names are one tensor."""

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        F.dropout(y, training=False).mul_(2)
        return self.second(y)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        y = self.body(x)
        name = y
        y += x
        self.relu(y)
        return name + x


MODELS: tuple[type[nn.Module], ...] = (
    GivesDataclass, OnlyKeywords, Generates, Checkpointed, NestedModes, ComputedWeight, Normalized, Hooked, SharedLayers,
    OtherThread, GivesBackItsInput, Residual,
)  # fmt: skip


def called(model: nn.Module, x: Tensor) -> Tensor:
    made = model(x=x) if isinstance(model, OnlyKeywords) else model(x)
    return torch.cat([made.inner, made.outer]) if isinstance(made, Found) else made


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", MODELS)
def test_odd_models(kind: type[nn.Module], mode: Any) -> None:
    torch.manual_seed(0)
    model, example = kind().eval(), torch.randn(4, 4, 6, 6)
    prepared = prepare(model, {"x": example} if kind is OnlyKeywords else example)
    with mode():
        for _ in range(12):
            x = torch.randn(4, 4, 6, 6)
            assert sqnr(called(model, x.clone()), called(prepared, x.clone())) > 80
        quantized = convert(prepared)
        for _ in range(12):
            x = torch.randn(4, 4, 6, 6)
            assert sqnr(called(model, x.clone()), called(quantized, x.clone())) > 25


def test_calibration_may_change_its_mode() -> None:
    torch.manual_seed(0)
    model = Hooked().eval()
    prepared = prepare(model, torch.randn(4, 4, 6, 6))
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            prepared(torch.randn(4, 4, 6, 6))
    x = torch.randn(4, 4, 6, 6)
    with torch.no_grad():
        assert sqnr(model(x), convert(prepared)(x)) > 25
