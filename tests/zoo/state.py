"""State that changes, constants that do not, and code under a context or a condition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import Case, floats, tags


class Counter(nn.Module):
    """Counts its calls, in eval mode too, and scales by the count."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.fc(x) * self.calls


class MovingAverage(nn.Module):
    """Keeps a moving average of its input in a buffer, written with `copy_` and `mul_`/`add_`."""

    average: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("largest", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.largest.copy_(torch.maximum(self.largest, x.amax(0)))
        return (x - self.average) / (self.largest + 1)


class Cache(nn.Module):
    """A key/value cache: slices of a buffer are overwritten."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 6))

    def forward(self, x: Tensor) -> Any:
        self.cache[1:3] = x[:2]
        return x @ self.cache.t()


class Constants(nn.Module):
    """A plain tensor attribute, a list of them, a number made from a parameter's shape, and literals in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.table = torch.linspace(-1, 1, 6)
        self.tables = [torch.ones(6) * 2, torch.ones(6) * 3]
        self.scale = 0.25

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x) * self.table + self.tables[0] - self.tables[1] * self.scale
        y = y + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) / self.fc.weight.shape[0]
        return y * torch.tensor(0.5)


class NoGradPart(nn.Module):
    """A frozen trunk under no_grad, with grad enabled again inside."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            y = torch.relu(self.trunk(x))
            with torch.enable_grad():
                z = self.inner(x)
        return self.head(y + z)


class Branches(nn.Module):
    """`torch.cond` on the data, with a parameter used by one branch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        def positive(x: Tensor) -> Any:
            return torch.relu(self.fc(x))

        def negative(x: Tensor) -> Any:
            return self.other(x).sin() - 1

        return torch.cond(x.sum() > 0, positive, negative, (x,)) * 2


class StaticBranch(nn.Module):
    """Python control flow on attributes and shapes: decided at capture."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.extra: nn.Module | None = None
        self.depth = 3

    def forward(self, x: Tensor) -> Any:
        for _ in range(self.depth):
            x = self.fc(x)
        if self.extra is not None:
            x = self.extra(x)
        return x.relu() if not self.training else x


class FunctionStyle(nn.Module):
    """Code under one forward: helpers, closures, comprehension, starred call."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))

    def join(self, *parts: Tensor) -> Any:
        return torch.cat(parts, dim=-1)

    def forward(self, x: Tensor) -> Any:
        def scale(y: Tensor, by: int) -> Tensor:
            return y * by

        return self.join(*[scale(part(x), index + 1) for index, part in enumerate(self.parts)])


CASES = (
    Case("counter", Counter, floats(6), tags=tags("state")),
    Case("moving_average", MovingAverage, floats(6), tags=tags("state")),
    Case(
        "cache",
        Cache,
        floats(6),
        tags=tags("state"),
    ),
    Case("constants", Constants, floats(6), tags=tags("state", "train")),
    Case("no_grad_part", NoGradPart, floats(6), tags=tags("state")),
    Case(
        "cond",
        Branches,
        floats(6),
        fx_refuses="both branches of a condition exist only for torch.export",
        tags=tags("state"),
    ),
    Case("static_branch", StaticBranch, floats(6), shape_free=True, tags=tags("state")),
    Case("function_style", FunctionStyle, floats(6), shape_free=True, tags=tags("state")),
)
