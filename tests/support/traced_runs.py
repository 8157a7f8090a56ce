"""Models under `auto_trace`: their cases, their state, what they count, and how near results are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from quantc.flows.tracing import AutoQuantizationState, prepare
from quantc.flows.tracing.trace import Trace
from tests.support.traced_models import (
    Branch,
    Capturable,
    CustomFunction,
    Detector,
    EarlyExit,
    Loop,
    Plumbing,
    ThirdParty,
    TreeModel,
    TreeModule,
)

KERNELS = ("onednn.qconv", "onednn.qlinear", "quantized.linear", "quantized.conv", "quantized::linear")


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the ops that reach a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def int8(self) -> int:
        return sum(count for op, count in self.ops.items() if op.startswith(KERNELS))

    @property
    def float_products(self) -> int:
        names = ("aten.convolution", "aten.addmm", "aten.mm", "aten.linear", "aten.conv2d")
        return sum(count for op, count in self.ops.items() if op.startswith(names))


def tree(depth: int) -> Any:
    return torch.randn(4, 16) if depth == 0 else (tree(depth - 1), tree(max(depth - 2, 0)))


def images(scale: float = 1.0, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 16, 16) * scale


def parts() -> dict[str, Any]:
    return {"parts": {"a": torch.randn(2, 16), "b": torch.randn(2, 16)}}


Case = tuple[Callable[[], nn.Module], Callable[[], list[tuple[Any, ...]]], int]
MODELS: dict[str, Case] = {
    "data-dependent early exit": (EarlyExit, lambda: [(images(),), (images(8.0),)], 2),
    "variable-length loop over a cell": (Loop, lambda: [(torch.randn(5, 2, 16),)], 3),
    "recursion over a tree": (TreeModel, lambda: [(tree(3),)], 3),
    "recursion of a module": (TreeModule, lambda: [(tree(3),)], 2),
    "detection-style post-processing": (Detector, lambda: [(images(batch=1),)], 4),
    "item-driven branches": (Branch, lambda: [(torch.randn(8, 16),), (torch.randn(8, 16) * 4,)], 2),
    "dict and list plumbing": (Plumbing, lambda: [(parts(),)], 3),
    "custom autograd function": (CustomFunction, lambda: [(images(),)], 2),
    "third-party tensor code": (ThirdParty, lambda: [(torch.randn(4, 16),)], 2),
    "what both flows take": (Capturable, lambda: [(images(),)], 6),
}


def seeded(name: str) -> tuple[nn.Module, list[tuple[Any, ...]], int]:
    torch.manual_seed(0)
    build, examples, products = MODELS[name]
    return build().eval(), examples(), products


def calibrated(model: nn.Module, examples: list[Any], **options: Any) -> nn.Module:
    prepared = prepare(model, examples, **options)
    with torch.no_grad():
        for _ in range(3):
            for example in examples:
                prepared(*example)
    return prepared


def floats(made: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def sqnr(expected: Any, found: Any) -> float:
    pairs = [pair for pair in zip(floats(expected), floats(found), strict=True) if pair[0].shape == pair[1].shape]
    signal = sum(float((a**2).sum()) for a, _ in pairs)
    noise = sum(float(((a - b) ** 2).sum()) for a, b in pairs)
    return float(10 * torch.log10(torch.tensor(signal / max(noise, 1e-20))))


def trace_of(model: nn.Module) -> Trace:
    state: Any = model._auto_quant_state
    found: Trace = state.trace
    return found


EXPORTED = ("what both flows take", "custom autograd function", "dict and list plumbing")


class Gated(nn.Module):
    """Goes on only if the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.more = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        if x.sum().item() > 0:
            y = self.more(y)
        return self.last(y)


class Nested(nn.Module):
    """Containers in containers, and a module of the model's own that holds no others."""

    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.sin(x).cos().exp().log1p().sqrt() + 1

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 4, 1)
        self.deep = nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), nn.Sequential(nn.Conv2d(4, 4, 1)))
        self.list = nn.ModuleList([nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())])
        self.shift, self.soft = Nested.Shift(), nn.Softmax(1)
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.stem(x))
        x = self.list[0](self.deep(x)) + x
        return self.last(self.soft(self.shift(x)))


def picture() -> Tensor:
    return torch.randn(2, 4, 6, 6)


def nested(**options: Any) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Nested().eval(), picture()
    prepared = prepare(model, x, **options)
    with torch.no_grad():
        prepared(x)
    return model, prepared, x


class Small(nn.Module):
    """Python around quantizable ops: a print, a dict, a branch on a number, and ops that are not quantizable."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(8, 4)
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.norm(self.conv(x)))
        self.log.append(x.mean().item())
        if self.log[-1] > 1e9:
            raise ValueError("never")
        x = self.block(x)
        return self.head(torch.sin(x.mean((2, 3))))


def state(module: nn.Module, path: str = "") -> AutoQuantizationState:
    found: Any = module.get_submodule(path)._auto_quant_state
    assert isinstance(found, AutoQuantizationState)
    return found


class Hooks:
    """Notes which hooks of all states are called, in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        for name, function in vars(AutoQuantizationState).items():
            if name.startswith(("op_", "module_", "validate", "cur_op")):
                monkeypatch.setattr(AutoQuantizationState, name, self.noting(name, function))

    def noting(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(name)
            return function(*args, **kwargs)

        return call


def decibels(expected: Tensor, found: Tensor) -> float:
    noise = (expected - found).double().square().sum().clamp(min=1e-20)
    return float(10 * torch.log10(expected.double().square().sum().clamp(min=1e-20) / noise))
