"""Models with branches, loops and maps, each with what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as torch_map

map_over: Callable[..., Any] = torch_map


class Branches(nn.Module):
    """Convolutions in both branches; one has a batch norm to fold."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.sparse = nn.Conv2d(3, 16, 5, padding=2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        y = torch.cond(x.mean() > 0, lambda x: self.dense(x) + 0.0, lambda x: self.sparse(x).relu(), (x,))
        return self.head(y.mean((2, 3)))


class Loop(nn.Module):
    """A linear applied as often as the input says."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor, times: Tensor) -> Any:
        def step(i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, torch.tanh(self.fc(h))

        start = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda i, h: i < times, step, (start, x))[1]  # type: ignore[no-untyped-call]


class Recurrence(nn.Module):
    """An Elman cell over time."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again = nn.Linear(12, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        def cell(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.into(row) + self.again(h))
            return h, h.clone()

        return scan(cell, x.new_zeros(x.shape[1], 16), x)[1]


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 16)

    def forward(self, x: Tensor) -> Any:
        return map_over(lambda row: self.fc(row).relu(), x)


class Nested(nn.Module):
    """A cond in a branch of a cond; one weight is read at both levels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 16), nn.Linear(12, 16), nn.Linear(12, 16)

    def forward(self, x: Tensor) -> Any:
        def inner(x: Tensor) -> Any:
            return torch.cond(x.amax() > 3.0, lambda x: self.a(x).relu(), lambda x: self.b(x).tanh(), (x,))

        return torch.cond(x.mean() > 0, inner, lambda x: self.c(x) + self.a(x), (x,))


class Literals(nn.Module):
    """Branches with tensors of their own: a literal, and what an assignment writes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Any:
        def assigned(x: Tensor) -> Tensor:
            y: Tensor = self.b(x).sin()
            y[:, 1:3] = 0
            return y

        return torch.cond(x.mean() > 0, lambda x: self.a(x) + torch.tensor(3.0), assigned, (x,))


@dataclass(frozen=True)
class Case:
    """A model, what it is fed for a seed, and in which nested graphs how many ops hold int8 weights."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    weights: dict[str, int]

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        model = self.build().eval()
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
        return model

    def batch(self, seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        return self.inputs()


def either_sign(*shape: int) -> Tensor:
    """Noise around a level that is above zero as often as below."""
    return torch.randn(shape) + (0.5 if torch.rand(()) > 0.5 else -0.5)


CASES = {
    "cond": Case(Branches, lambda: (either_sign(4, 3, 8, 8),), {"true_graph_0": 1, "false_graph_0": 1, "": 1}),
    "while_loop": Case(Loop, lambda: (torch.randn(4, 16), torch.randint(1, 4, ())), {"while_loop_body_graph_0": 1}),
    "scan": Case(Recurrence, lambda: (torch.randn(6, 4, 12),), {"scan_combine_graph_0": 2}),
    "map": Case(Mapped, lambda: (torch.randn(5, 4, 12),), {"body_graph_0": 1}),
    "nested": Case(
        Nested,
        lambda: (either_sign(8, 12),),
        {"true_graph_0/true_graph_0": 1, "true_graph_0/false_graph_0": 1, "false_graph_0": 2},
    ),
    "literals": Case(Literals, lambda: (either_sign(8, 12),), {"true_graph_0": 1, "false_graph_0": 1}),
}
