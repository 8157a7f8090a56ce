"""Models written for eager quantization, for either of two libraries: the names they are made of are handed in."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.ao.nn.quantized as torch_nnq
import torch.ao.quantization as torch_flow
from torch import Tensor, nn

import quantc.nn.quantized as quantc_nnq
from quantc.flows import eager as quantc_flow


@dataclass(frozen=True)
class Library:
    """Where a model's stubs and functional modules come from, and who quantizes it."""

    flow: ModuleType
    nnq: ModuleType

    def quantized(self, model: nn.Module, fuse: list[list[str]], data: list[Tensor], qconfig: Any) -> nn.Module:
        """Static quantization, as the documents have it."""
        return self.converted(self.calibrated(model, fuse, data, qconfig))

    def calibrated(self, model: nn.Module, fuse: list[list[str]], data: list[Tensor], qconfig: Any) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fused: Any = self.flow.fuse_modules(model.eval(), fuse) if fuse else model.eval()
            if not hasattr(fused, "qconfig"):
                fused.qconfig = qconfig
            prepared: nn.Module = self.flow.prepare(fused)
            with torch.no_grad():
                for batch in data:
                    prepared(batch)
        return prepared

    def converted(self, prepared: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made: nn.Module = self.flow.convert(prepared)
        return made


TORCH = Library(torch_flow, torch_nnq)
QUANTC = Library(quantc_flow, quantc_nnq)


class Staged(nn.Module):
    """A model between stubs."""

    def __init__(self, library: Library, body: nn.Module) -> None:
        super().__init__()
        self.quant = library.flow.QuantStub()
        self.body = body
        self.dequant = library.flow.DeQuantStub()

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.body(self.quant(x)))


class Residual(nn.Module):
    """x + f(x), and a ReLU."""

    def __init__(self, library: Library, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.add = library.nnq.FloatFunctional()

    def forward(self, x: Tensor) -> Any:
        y = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.add.add_relu(x, y)


class Branches(nn.Module):
    """Two convolutions of one tensor, side by side."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 4, 1)
        self.right = nn.Conv2d(3, 4, 3, padding=1)
        self.cat = library.nnq.FloatFunctional()

    def forward(self, x: Tensor) -> Any:
        return self.cat.cat([self.left(x), self.right(x)], 1)


class Gate(nn.Module):
    """Squeeze and excite."""

    def __init__(self, library: Library, channels: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.down = nn.Conv2d(channels, 4, 1)
        self.relu = nn.ReLU()
        self.up = nn.Conv2d(4, channels, 1)
        self.sigmoid = nn.Sigmoid()
        self.mul = library.nnq.FloatFunctional()

    def forward(self, x: Tensor) -> Any:
        gate = self.sigmoid(self.up(self.relu(self.down(self.pool(x)))))
        return self.mul.mul(x, gate)


class Scalars(nn.Module):
    """Sums and products with numbers."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 8)
        self.ops = library.nnq.FloatFunctional()
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.ops.mul_scalar(self.fc(x), 0.5))


def conv_bn_relu(inputs: int, outputs: int, **settings: Any) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, **settings), nn.BatchNorm2d(outputs), nn.ReLU()]


@dataclass(frozen=True)
class Case:
    """A model, the shape of what it reads, and what is fused."""

    build: Callable[[Library], nn.Module]
    shape: tuple[int, ...]
    fuse: list[list[str]] = field(default_factory=list)
    trains: bool = True

    def made(self, library: Library) -> nn.Module:
        """The same numbers whichever library it is for."""
        torch.manual_seed(0)
        model = self.build(library)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean = torch.randn(module.num_features) * 0.1
                module.running_var = torch.rand(module.num_features) + 0.5
        return model

    def data(self, batches: int = 3) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(self.shape, generator=generator) for _ in range(batches)]


def names(*groups: str) -> list[list[str]]:
    return [[f"body.{name}" for name in group.split()] for group in groups]


def staged(*body: Any) -> Callable[[Library], nn.Module]:
    """A sequence of modules, or of what makes them for a library; made anew each time."""

    def build(library: Library) -> nn.Module:
        return Staged(library, nn.Sequential(*(make(library) for make in body)))

    return build


def layer(kind: Callable[..., nn.Module], *args: Any, **settings: Any) -> Callable[[Library], nn.Module]:
    return lambda library: kind(*args, **settings)


def _mlp(library: Library) -> nn.Module:
    return Staged(library, nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)))


def _convnet(library: Library) -> nn.Module:
    return Staged(
        library,
        nn.Sequential(
            *conv_bn_relu(3, 8), nn.MaxPool2d(2), *conv_bn_relu(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
        ),
    )  # fmt: skip


CASES: dict[str, Case] = {
    "mlp": Case(_mlp, (8, 16), names("0 1", "2 3")),
    "linear-bn": Case(staged(layer(nn.Linear, 16, 8), layer(nn.BatchNorm1d, 8), layer(nn.Linear, 8, 4)), (8, 16), names("0 1")),
    "convnet": Case(_convnet, (4, 3, 8, 8), names("0 1 2", "4 5 6")),
    "residual": Case(
        staged(layer(nn.Conv2d, 3, 8, 3), lambda library: Residual(library, 8), lambda library: Residual(library, 8)),
        (2, 3, 10, 10),
        names("1.conv1 1.bn1 1.relu1", "1.conv2 1.bn2", "2.conv1 2.bn1 2.relu1", "2.conv2 2.bn2"),
    ),
    "depthwise": Case(
        staged(
            layer(nn.Conv2d, 3, 8, 3, stride=2), layer(nn.BatchNorm2d, 8), layer(nn.ReLU6),
            layer(nn.Conv2d, 8, 8, 3, groups=8), layer(nn.BatchNorm2d, 8), layer(nn.ReLU), layer(nn.Conv2d, 8, 4, 1),
        ),
        (2, 3, 12, 12),
        names("0 1", "3 4 5"),
    ),
    "branches": Case(staged(Branches, layer(nn.Conv2d, 8, 4, 1)), (2, 3, 6, 6)),
    "conv1d": Case(
        staged(layer(nn.Conv1d, 4, 8, 3), layer(nn.BatchNorm1d, 8), layer(nn.ReLU), layer(nn.Conv1d, 8, 4, 3)),
        (2, 4, 16),
        names("0 1 2"),
    ),
    "conv3d": Case(
        staged(layer(nn.Conv3d, 2, 4, 3), layer(nn.BatchNorm3d, 4), layer(nn.ReLU), layer(nn.Conv3d, 4, 3, 1)),
        (1, 2, 5, 5, 5),
        names("0 1 2"),
    ),
    "transposed": Case(
        staged(layer(nn.Conv2d, 3, 6, 3), layer(nn.ConvTranspose2d, 6, 4, 2, stride=2), layer(nn.Conv2d, 4, 2, 1)),
        (2, 3, 6, 6),
        trains=False,
    ),
    "activations": Case(
        staged(
            layer(nn.Linear, 16, 16), layer(nn.Hardswish), layer(nn.Linear, 16, 16), layer(nn.LeakyReLU, 0.1),
            layer(nn.Linear, 16, 4),
        ),
        (8, 16),
    ),
    "elu": Case(staged(layer(nn.Linear, 16, 16), layer(nn.ELU), layer(nn.Linear, 16, 4)), (8, 16)),
    "norms": Case(
        staged(
            layer(nn.Conv2d, 3, 8, 3), layer(nn.GroupNorm, 2, 8), layer(nn.Conv2d, 8, 8, 1),
            layer(nn.InstanceNorm2d, 8, affine=True), layer(nn.Flatten, 2), layer(nn.LayerNorm, 36), layer(nn.Linear, 36, 4),
        ),
        (2, 3, 8, 8),
    ),
    "gate": Case(
        staged(layer(nn.Conv2d, 3, 8, 3), lambda library: Gate(library, 8), layer(nn.Conv2d, 8, 4, 1)), (2, 3, 8, 8)
    ),
    "norm-apart": Case(
        staged(layer(nn.Conv2d, 3, 8, 3), layer(nn.BatchNorm2d, 8), layer(nn.ReLU), layer(nn.Conv2d, 8, 4, 1)),
        (2, 3, 8, 8),
        names("1 2"),
        trains=False,
    ),
    "scalars": Case(staged(Scalars), (8, 16)),
}  # fmt: skip


def grids(model: nn.Module) -> dict[str, tuple[float, int]]:
    """Scale and zero point of each quantized module."""
    found: dict[str, tuple[float, int]] = {}
    for path, module in model.named_modules():
        scale: Any = getattr(module, "scale", None)
        if scale is not None:
            zero_point: Any = module.zero_point
            found[path] = (float(scale), int(zero_point))
    return found
