"""Eager models that no tracer can capture: what they compute depends on numbers, lengths and trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Tree = Any
"""A tensor, or a pair of trees."""


class EarlyExit(nn.Module):
    """Goes on only while it is not sure."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.more = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.first = nn.Linear(16, 10)
        self.second = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        if x.mean().item() < 0.4:
            return self.first(x.mean((2, 3)))
        x = self.more(x)
        return self.second(x.mean((2, 3)))


class Cell(nn.Module):
    """One step of a recurrent network, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        return torch.tanh(self.inner(x) + self.outer(h))


class Loop(nn.Module):
    """A loop over a cell, as long as the input is."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.cell = Cell(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Any:
        h = torch.zeros(x.shape[1], x.shape[2])
        for step in x:
            h = self.cell(step, h)
        return self.head(h)


class TreeModel(nn.Module):
    """Python recursion over a tree."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.leaf = nn.Linear(width, width)
        self.join = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 3)

    def encode(self, tree: Tree) -> Any:
        if isinstance(tree, Tensor):
            return F.relu(self.leaf(tree))
        left, right = (self.encode(child) for child in tree)
        return torch.tanh(self.join(torch.cat([left, right], -1)))

    def forward(self, tree: Tree) -> Any:
        return self.head(self.encode(tree))


class TreeModule(nn.Module):
    """The same by a module that calls itself."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.leaf = nn.Linear(width, width)
        self.join = nn.Linear(2 * width, width)

    def forward(self, tree: Tree) -> Any:
        if isinstance(tree, Tensor):
            return self.leaf(tree)
        return torch.tanh(self.join(torch.cat([self(child) for child in tree], -1)))


class Detector(nn.Module):
    """Convolutions, and boxes that are picked one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU())
        self.scores = nn.Conv2d(16, 1, 1)
        self.boxes = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.backbone(x)
        scores = self.scores(features).flatten().sigmoid()
        boxes = self.boxes(features).flatten(2).transpose(1, 2).reshape(-1, 4)
        corners = torch.cat([boxes[:, :2] - boxes[:, 2:].abs(), boxes[:, :2] + boxes[:, 2:].abs()], 1)
        kept: list[int] = []
        for index in scores.argsort(descending=True).tolist():
            if all(overlap(corners[index], corners[other]) < 0.5 for other in kept):
                kept.append(index)
            if len(kept) == 5:
                break
        return {"boxes": corners[kept], "scores": scores[kept], "all": scores}


def overlap(a: Tensor, b: Tensor) -> float:
    low, high = torch.maximum(a[:2], b[:2]), torch.minimum(a[2:], b[2:])
    shared = (high - low).clamp(min=0).prod()
    whole = (a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod() - shared
    return float(shared / (whole + 1e-6))


class Branch(nn.Module):
    """`.item()` decides which layer is next."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.up = nn.Linear(16, 16)
        self.down = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.first(x))
        if x.sum().item() > 40:
            return self.up(x)
        return self.down(x) * 2


class Plumbing(nn.Module):
    """Tensors travel in dicts and lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("a", "b", "c")})

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        made = {name: F.relu(self.layers[name](x)) for name, x in batch["parts"].items()}
        rows = [made["a"], made["b"]]
        rows.append(rows[0] + rows[1])
        return {"rows": [self.layers["c"](row) for row in rows[:1]], "last": rows[-1], "names": sorted(made)}


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad_outputs[0] * (s + x * s * (1 - s))


class CustomFunction(nn.Module):
    """An autograd function of its own between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.b(Swish.apply(self.a(x)))  # type: ignore[no-untyped-call]


class ThirdParty(nn.Module):
    """Code that leaves torch: NumPy, and torch.distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        array = np.clip(x.detach().numpy(), -1, 1)
        y = torch.from_numpy(array * np.float32(0.5))
        z = torch.distributions.Normal(torch.zeros(16), torch.ones(16)).cdf(x)  # type: ignore[no-untyped-call]
        return self.b(y + z)


class Capturable(nn.Module):
    """What both flows can take: convolutions, norms, sums, pools, a transposed view, a shared module."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.tail = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(), nn.Linear(16, 16))
        self.last = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.pool(self.stem(x).relu())
        y = self.act(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        y = self.act(y)
        y = y.flatten(2).transpose(1, 2)
        y = self.tail(y)
        a, b = y.chunk(2, 1)
        return self.last(torch.cat([a, b.flip(1)], -1)).softmax(-1)
