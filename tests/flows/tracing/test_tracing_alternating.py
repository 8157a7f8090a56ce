"""Converted models that go several ways, call after call."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantc.flows.tracing import UnseenOpError, convert, prepare
from tests.support.traced_blocks import fresh, images
from tests.support.traced_runs import sqnr


def test_errors_that_the_model_catches() -> None:
    """The model goes on after an error in one of its modules, and on another way from then on."""

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
            self.inner = Fails()

        def forward(self, x: Tensor, fails: bool) -> Any:
            x = F.relu(self.first(x))
            try:
                x = self.inner(x, fails)
            except ZeroDivisionError:
                x = x * 1.0
            return self.second(x)

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor, fails: bool) -> Any:
            x = F.relu(self.conv(x))
            if fails:
                raise ZeroDivisionError
            return x

    torch.manual_seed(0)
    model = Careful().eval()
    prepared = prepare(model, [(images(), False), (images(), True)])
    with torch.no_grad():
        for fails in (True, False):
            prepared(images(), fails)
        quantized, x = convert(prepared), images()
        for turn in range(12):
            output = quantized(x, turn % 3 == 2)
            assert torch.equal(output, copy.deepcopy(quantized)(x, turn % 3 == 2))
            assert sqnr(model(x, turn % 3 == 2), output) > 25


def test_calls_that_fail_count_as_calls() -> None:
    """What may follow a call may follow it if it fails, and only then."""

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maybe, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)

        def forward(self, x: Tensor, other: Tensor | None) -> Any:
            more: Any = 0.0
            if other is not None:
                with contextlib.suppress(RuntimeError):
                    more = self.maybe(other).mean()
            return self.last(x) + more

    torch.manual_seed(0)
    model = Tries().eval()
    x, other, small = images(), images(), torch.randn(1, 3, 2, 2)
    prepared = prepare(model, (x, other))
    with torch.no_grad():
        prepared(x, other)
        quantized = convert(prepared)
        for _ in range(6):
            for given in (small, other, small):
                assert sqnr(model(x, given), quantized(x, given)) > 25
            with pytest.raises(UnseenOpError, match="expected conv2d"):
                quantized(x, None)


def test_ways_that_alternate() -> None:
    """Branches and turns of loops: what was never seen is refused."""

    class Ways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.more, self.head = (
                nn.Conv2d(3, 8, 3, padding=1),
                nn.Conv2d(8, 8, 3, padding=1),
                nn.Linear(8, 4),
            )
            self.turns = 0
            self.skips_head = False

        def forward(self, x: Tensor) -> Any:
            x = F.relu(self.stem(x))
            for _ in range(self.turns):
                x = F.relu(self.more(x) + x)
            x = x.mean((2, 3))
            return x if self.skips_head else self.head(x)

    torch.manual_seed(0)
    model: Any = Ways().eval()
    model.turns = 5
    prepared: Any = prepare(model, images())
    with torch.no_grad():
        prepared(images())
        quantized: Any = convert(prepared)
        x = images()
        for turn in range(24):
            quantized.turns = model.turns = (2, 3, 5)[turn % 3]
            output = quantized(x)
            assert torch.equal(output, fresh(quantized, x))
            assert sqnr(model(x), output) > 15
        quantized.skips_head = True
        for _ in range(3):
            with pytest.raises(UnseenOpError, match="seen the end of forward"):
                quantized(x)
        quantized.skips_head = False
        assert sqnr(model(x), quantized(x)) > 15


def test_recursion_that_is_deep() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor, depth: int) -> Any:
            x = F.relu(self.layer(x))
            return self(x, depth - 1) if depth else x

    torch.manual_seed(0)
    model = Deep().eval()
    prepared = prepare(model, (images(), 2))
    with torch.no_grad():
        prepared(images(), 2)
        quantized, x = convert(prepared), images()
        for depth in (2, 60, 2, 60, 2, 60):
            assert torch.equal(quantized(x, depth), copy.deepcopy(quantized)(x, depth))


@pytest.mark.parametrize("between", [nn.Dropout(0.2), nn.Softmax(1)])
def test_views_that_are_handed_on(between: nn.Module) -> None:
    """Dropout gives back what it is given; and what looks at a view has it, though nobody holds what it is a view of."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.between, self.head = nn.Conv2d(3, 8, 3), between, nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            x = torch.flatten(F.adaptive_avg_pool2d(F.relu(self.conv(x)), 1), 1)
            return self.head(self.between(x))

    torch.manual_seed(0)
    model = Classifier().eval()
    prepared = prepare(model, images())
    with torch.no_grad():
        prepared(images())
        quantized = convert(prepared)
        for _ in range(12):
            quantized(images())
        x = images()
        output = quantized(x)
        assert torch.equal(output, copy.deepcopy(quantized)(x))
        assert sqnr(model(x), output) > 25
