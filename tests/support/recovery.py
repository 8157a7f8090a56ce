"""Random layers to fit weights of, and what a layer's output loses by the weights of a converted program: computed in
float64 from what the layer reads, by torch's own ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

import quantc as qc
from quantc.annotate.quantizer import Backend, mode_config, quantizer_of
from quantc.backends.qnnpack import QNNPACK
from quantc.backends.x86 import X86
from quantc.calibration.collect import Collect
from quantc.ir.program import Program
from quantc.recover.layers import Layer, layers_of
from quantc.recover.rounding import Grid
from quantc.spec.capability import Capability
from quantc.spec.formats import DType, PerChannel, PerGroup, PerTensor, Role, Scheme, Timing
from quantc.spec.spec import INT8_WEIGHT, QuantSpec

aten = torch.ops.aten
LAYERS = {
    *(aten.linear.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.embedding.default),
    *(aten.conv_transpose1d.default, aten.conv_transpose2d.input),
}
BY_ROW = (aten.linear.default, aten.embedding.default)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
ALL_ROWS = Collect(statistics="gram,tokens", effort=1e9)
"""A Gram of every row, so that what is judged is what is measured."""
TAKES = (
    Capability(role=Role.ACT, dtypes=(DType.UINT8,)),
    Capability(role=Role.ACT, dtypes=(DType.UINT8,), timings=(Timing.DYNAMIC,)),
    Capability(
        role=Role.WEIGHT,
        dtypes=tuple(DType(f"int{bits}") for bits in range(2, 9)),
        granularities=("per-tensor", "per-channel", "per-group"),
        timings=(Timing.STATIC, Timing.WEIGHT_ONLY),
    ),
)

INT4_WEIGHT = INT8_WEIGHT.but(dtype=DType.INT4)


@dataclass(frozen=True)
class Case:
    """A layer, its data, and how it is to be quantized."""

    name: str
    layer: nn.Module
    batches: list[Tensor]
    backend: Backend
    mode: str = "static"

    def prepared(self) -> Program:
        """Prepared, calibrated and collected from."""
        model = nn.Sequential(self.layer).eval()
        captured = qc.capture(model, (self.batches[0],), method="fx", dynamic_shapes=None)
        config = None if self.mode == "static" else mode_config(quantizer_of(self.backend), self.mode)
        program = qc.prepare(captured, self.backend, config=config)
        qc.calibrate(program, self.batches, collect=ALL_ROWS, progress="silent")
        return program


def rand(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


def chosen(generator: torch.Generator, *of: Any) -> Any:
    return of[rand(generator, 0, len(of) - 1)]


def random_case(seed: int) -> Case:
    """A layer of any kind, with data of any shape, on some grid."""
    generator = torch.Generator().manual_seed(seed)
    layer, shape = _layer(generator)
    count = rand(generator, 2, 5)
    if isinstance(layer, nn.Embedding):
        batches = [torch.randint(0, rand(generator, 1, 12), shape, generator=generator) for _ in range(count)]
    else:
        batches = _data(generator, shape, count)
    with torch.no_grad():
        _spoil(generator, layer)
    mode = chosen(generator, *_modes(layer))
    backend = chosen(generator, X86, X86, QNNPACK)
    spec = _spec(generator, layer, mode)
    specs = {**backend.modes, "weight-only": spec} if mode == "weight-only" else backend.modes
    backend = replace(backend, takes=TAKES, roles={**backend.roles, "weight": spec}, modes=specs)
    return Case(f"{seed} {layer} {mode} {backend.name} {spec}", layer, batches, backend, mode)


def _modes(layer: nn.Module) -> tuple[str, ...]:
    if isinstance(layer, nn.Linear):
        return "static", "static", "dynamic", "weight-only"
    if isinstance(layer, nn.Embedding):
        return ("weight-only",)
    return ("static",) if isinstance(layer, TRANSPOSED) else ("static", "weight-only")


def _layer(generator: torch.Generator) -> tuple[nn.Module, tuple[int, ...]]:
    kind, has_bias = (
        chosen(generator, "linear", "linear", "conv1d", "conv2d", "conv2d", "conv3d", "up1d", "up2d", "table"),
        chosen(generator, True, True, False),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rand(generator, 0, 10**6))
        if kind == "linear":
            inputs = chosen(generator, 3, 8, 16, 32, 64)
            return nn.Linear(inputs, rand(generator, 1, 12), bias=has_bias), (rand(generator, 1, 20), inputs)
        if kind == "table":
            return nn.Embedding(12, chosen(generator, 4, 8, 32)), (rand(generator, 1, 6), 3)
        groups = chosen(generator, 1, 1, 2, 4)
        depth = chosen(generator, 1, 2, 4)
        channels, outputs = groups * depth, groups * chosen(generator, 1, 2, 3)
        rank = int(kind[-2])
        size, kernel = {1: 9, 2: 6, 3: 4}[rank], chosen(generator, 1, 2, 3)
        if kind.startswith("up"):
            stride = chosen(generator, 1, 2, 3)
            options = {"stride": stride, "padding": chosen(generator, 0, 1), "output_padding": stride - 1}
            deconv = TRANSPOSED[rank - 1](channels, outputs, kernel, groups=groups, bias=has_bias, **options)
            return deconv, (rand(generator, 1, 4), channels, *[size] * rank)
        make = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank]
        layer = make(
            channels,
            outputs,
            kernel,
            stride=chosen(generator, 1, 2),
            padding=chosen(generator, 0, 1),
            dilation=chosen(generator, 1, 1, 1, 2) if kernel < 3 else 1,
            groups=groups,
            bias=has_bias,
        )
        return layer, (rand(generator, 1, 4), channels, *[size] * rank)


def _data(generator: torch.Generator, shape: tuple[int, ...], count: int) -> list[Tensor]:
    """Batches: normal, positive, of low rank, with dead or huge channels, constant, or of very small values."""
    kind = chosen(generator, "normal", "positive", "low rank", "dead", "outliers", "constant", "tiny", "mixed")
    axis = len(shape) - 1 if len(shape) == 2 else 1
    channels = shape[axis]
    by_channel = [1] * len(shape)
    by_channel[axis] = channels
    factors, offset = torch.ones(channels), torch.zeros(channels)
    if kind in ("outliers", "mixed"):
        factors[rand(generator, 0, channels - 1)] = 100.0
        offset = torch.randn(channels, generator=generator)
    if kind in ("dead", "mixed"):
        factors[torch.rand(channels, generator=generator) < 0.4] = 0.0
        offset[factors == 0] = 0.0
    if kind == "tiny":
        factors *= 1e-20
    found = []
    for _ in range(count):
        x = torch.randn(shape, generator=generator)
        if kind == "positive":
            x = x.abs()
        if kind == "low rank":
            x = torch.randn(shape, generator=generator).mean(axis, keepdim=True) * torch.linspace(
                -1, 2, channels
            ).reshape(by_channel)
        if kind == "constant":
            x = torch.ones(shape) * torch.linspace(0.1, 1, channels).reshape(by_channel)
        found.append(x * factors.reshape(by_channel) + offset.reshape(by_channel))
    return found


def _spoil(generator: torch.Generator, layer: nn.Module) -> None:
    """Weights with outliers, dead rows, or rows that are alike."""
    weight, kind = layer.weight, chosen(generator, "none", "none", "outlier", "dead row", "heavy")
    assert isinstance(weight, Tensor)
    if kind == "outlier":
        weight.view(-1)[rand(generator, 0, weight.numel() - 1)] *= 20
    if kind == "dead row":
        weight[rand(generator, 0, len(weight) - 1)] = 0
    if kind == "heavy":
        weight.copy_(weight**3)


def _spec(generator: torch.Generator, layer: nn.Module, mode: str) -> QuantSpec:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    bits = chosen(generator, 2, 3, 4, 5, 6, 7, 8, 8)
    sizes = [size for size in (2, 4, 8, 16, 32) if weight.shape[1] % size == 0]
    channel = PerChannel(axis=1 if isinstance(layer, TRANSPOSED) else 0)
    shares: list[Any] = [PerTensor(), channel, channel]
    if mode == "weight-only" and sizes:
        shares += [PerGroup(axis=1, size=size) for size in (sizes[0], sizes[-1])]
    share = chosen(generator, *shares)
    scheme = chosen(generator, Scheme.SYMMETRIC, Scheme.AFFINE) if mode == "weight-only" else Scheme.SYMMETRIC
    timing = Timing.WEIGHT_ONLY if mode == "weight-only" else Timing.STATIC
    return QuantSpec(dtype=DType(f"int{bits}"), scheme=scheme, granularity=share, role=Role.WEIGHT, timing=timing)


class Seen(fx.Interpreter):
    """Runs a program and keeps the operands of its linears and convolutions, in order."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module)
        self.calls: list[tuple[Any, ...]] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in LAYERS:
            self.calls.append((target, args, kwargs))
        return super().call_function(target, args, kwargs)


@torch.no_grad()
def calls(program: Program, x: Tensor) -> list[tuple[Any, ...]]:
    """The layers that ran on a batch: op, operands, keyword operands."""
    seen = Seen(program)
    seen.run(x)
    return seen.calls


@torch.no_grad()
def losses(prepared: Program, converted: Program, batches: Sequence[Tensor]) -> list[Tensor]:
    """For each layer the mean squared error of each output channel that the weights and biases of the converted program
    make, on what the layer reads in float; in float64."""
    totals: dict[int, Tensor] = {}
    counts: dict[int, int] = {}
    changed = calls(converted, batches[0])
    for batch in batches:
        before = calls(prepared, batch)
        assert [each[0] for each in before] == [each[0] for each in changed]
        for index, ((target, args, kwargs), (_, other, other_kwargs)) in enumerate(zip(before, changed, strict=True)):
            x = args[1] if target is aten.embedding.default else args[0]
            found = _output(target, x, args, kwargs) - _output(target, x, other, other_kwargs)
            by_row = found if target in BY_ROW else found.movedim(1, -1)
            rows = by_row.reshape(-1, by_row.shape[-1])
            totals[index] = totals.get(index, 0) + rows.square().sum(0)
            counts[index] = counts.get(index, 0) + len(rows)
    return [totals[index] / counts[index] for index in totals]


def _output(target: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if target is aten.embedding.default:
        return nn.functional.embedding(x, args[0].double())
    rest = [each.double() if isinstance(each, Tensor) else each for each in args[1:]]
    found: Tensor = target(
        x.double(),
        *rest,
        **{name: each.double() if isinstance(each, Tensor) else each for name, each in kwargs.items()},
    )
    return found


def layer_of(program: Program) -> Layer:
    """The only layer of a program, as fitting passes see it."""
    (layer,) = layers_of(program, "auto")
    assert isinstance(layer, Layer), layer
    return layer


def linear_case(
    spec: QuantSpec = INT4_WEIGHT,
    backend: Backend = QNNPACK,
    *,
    inputs: int = 24,
    outputs: int = 6,
    bias: bool = True,
    seed: int = 0,
) -> Case:
    """A linear on inputs that depend on each other and are not about zero, where fitting pays."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        for each in layer.parameters():
            each.copy_(torch.randn(each.shape, generator=generator))
    mix = torch.randn(inputs, inputs, generator=generator) / inputs**0.5
    batches = [torch.randn(32, inputs, generator=generator) @ mix + 0.5 for _ in range(6)]
    backend = replace(backend, takes=TAKES, roles={**backend.roles, "weight": spec})
    return Case(f"linear {spec}", layer, batches, backend)


def by_inverses(weights: Tensor, matrix: Tensor, grid: Grid) -> Tensor:
    """The levels by updates of all weights that are left, with the Cholesky factor of the inverse."""
    factor = torch.linalg.cholesky(torch.linalg.inv(matrix), upper=True)
    weights, levels = weights.clone(), torch.zeros_like(weights)
    for column in range(weights.shape[2]):
        scale = grid.scale[..., column]
        zero = grid.zero_point[..., column]
        levels[..., column] = ((weights[..., column] / scale).round() + zero).clamp(grid.qmin, grid.qmax)
        error = (weights[..., column] - (levels[..., column] - zero) * scale) / factor[:, column, column].unsqueeze(1)
        weights[..., column:] -= error.unsqueeze(2) * factor[:, column, column:].unsqueeze(1)
    return levels
