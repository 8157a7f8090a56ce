"""The proof against torch's own x86 kernels: they saturate where it says so, and after the reduction they do not.

A kernel is compared with the integer form in steps of the result. Inputs are random, and adversarial: the largest
activation wherever a weight of some channel is positive, and once more wherever it is negative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import quantc as qc
from quantc.integer.ops.products import conv, linear
from quantc.integer.proof.overflow_report import accumulators
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.ir.dialect import argument, op_name
from quantc.ir.program import Program
from quantc.targets.kernels.saturation import adds_in_16_bits

ENGINES = [name for name in ("fbgemm", "x86", "onednn") if name in torch.backends.quantized.supported_engines]
needs_no_vnni = pytest.mark.skipif(
    not adds_in_16_bits(), reason="with VNNI products go into 32 bits at once, and nothing saturates"
)
pytestmark = [
    pytest.mark.skipif(not ENGINES, reason="this build of torch has none of the x86 kernels"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch announces the end of quantized tensors
]


@dataclass(frozen=True)
class Layer:
    """The numbers of the one product of a converted program."""

    op: str
    x_scale: float
    x_zero_point: int
    qmax: int
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    windows: tuple[Any, ...]
    """Stride, padding, dilation and groups of a convolution."""

    @staticmethod
    def of(program: Program) -> Layer:
        node = next(node for node in program.nodes() if op_name(node) in ("linear", "conv2d"))
        x, w, b = (argument(node, name) for name in ("x", "w", "b"))
        weight, scale = program.tensor(w.args[0]), program.tensor(w.args[1])
        bias = None if b is None else program.tensor(b)
        assert weight is not None
        assert scale is not None
        names = ("stride", "padding", "dilation", "groups") if op_name(node) == "conv2d" else ()
        windows = tuple(argument(node, name) for name in names)
        held = None if bias is None else bias.detach()
        return Layer(op_name(node), x.args[1], x.args[2], x.args[4], weight, scale, held, windows)

    def exact(self, x: Tensor) -> Tensor:
        """The sums of products without the bias: in float64, which has room for them."""
        centered, weight = x.double() - self.x_zero_point, self.weight.double()
        if self.op == "linear":
            return F.linear(centered, weight)
        return F.conv2d(centered, weight, None, *self.windows)

    def onto(self, x: Tensor) -> tuple[float, int]:
        """An output grid that just holds what comes out."""
        real = self.exact(x) * self._step
        if self.bias is not None:
            real = real + self._along(self.bias.double())
        low, high = min(float(real.min()), 0.0), max(float(real.max()), 0.0)
        scale = float(torch.tensor((high - low) / 255))
        return scale, min(max(round(-low / scale), 0), 255)

    def integer_form(self, x: Tensor, out_scale: float, out_zero_point: int) -> Tensor:
        """What quantc's integer ops make of it."""
        step = self.x_scale * self.weight_scale.double()
        bias = None if self.bias is None else torch.round(self.bias.double() / step).to(torch.int32)
        rest = (self._step / out_scale, None, out_zero_point, 0, 255, torch.uint8)
        if self.op == "linear":
            return torch.as_tensor(linear(x, self.x_zero_point, self.weight, None, bias, 0, *rest))
        return torch.as_tensor(conv(x, self.x_zero_point, self.weight, None, bias, *self.windows, 0, *rest))

    def kernel(self, engine: str, x: Tensor, out_scale: float, out_zero_point: int) -> Tensor:
        """What a kernel of torch makes of it."""
        torch.backends.quantized.engine = engine
        ops: Any = torch.ops.quantized
        held: Any = torch
        quantized = held._make_per_tensor_quantized_tensor(x, self.x_scale, self.x_zero_point)
        zeros = torch.zeros(self.weight.shape[0], dtype=torch.int64)
        weight = held._make_per_channel_quantized_tensor(self.weight, self.weight_scale.double(), zeros, 0)
        if self.op == "linear":
            packed = ops.linear_prepack(weight, self.bias)
            return torch.as_tensor(ops.linear(quantized, packed, out_scale, out_zero_point).int_repr())
        packed = ops.conv2d_prepack(weight, self.bias, *self.windows)
        return torch.as_tensor(ops.conv2d(quantized, packed, out_scale, out_zero_point).int_repr())

    @property
    def _step(self) -> Tensor:
        return self._along(self.x_scale * self.weight_scale.double())

    def _along(self, values: Tensor) -> Tensor:
        return values.reshape(-1, *[1] * (self.weight.dim() - 2))

    def adversaries(self) -> Tensor:
        """For each channel the inputs that make its sums as large, and as small, as they can be."""
        groups = self.windows[3] if self.windows else 1
        inputs, per_group = self.weight.shape[1], self.weight.shape[0] // groups
        made = []
        for channel, row in enumerate(self.weight.to(torch.int64)):
            for sign in (1, -1):
                image = torch.zeros(inputs * groups, *row.shape[1:], dtype=torch.uint8)
                start = channel // per_group * inputs
                image[start : start + inputs] = torch.where(sign * row > 0, self.qmax, 0).to(torch.uint8)
                made.append(image)
        found = torch.stack(made)
        if self.op == "linear":
            return found
        return F.pad(found, (2, 2, 2, 2), value=self.x_zero_point)

    def random(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        groups = self.windows[3] if self.windows else 1
        shape = (64, self.weight.shape[1]) if self.op == "linear" else (4, self.weight.shape[1] * groups, 9, 9)
        return torch.randint(0, self.qmax + 1, shape, generator=generator, dtype=torch.uint8)


def steps_apart(layer: Layer, engine: str) -> int:
    """The most steps that a kernel is off, on adversarial and on random inputs."""
    worst = 0
    for x in (layer.adversaries(), layer.random(seed=5)):
        grid = layer.onto(x)
        apart = layer.kernel(engine, x, *grid).to(torch.int32) - layer.integer_form(x, *grid).to(torch.int32)
        worst = max(worst, int(apart.abs().max()))
    return worst


def one_sided(layer: nn.Linear | nn.Conv2d) -> nn.Module:
    """Weights of one size: in half of the channels all positive, in half all negative. Every pair is the worst."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        sign = torch.ones_like(layer.weight)
        sign[1::2] = -1
        layer.weight.copy_(sign * (1 + 0.02 * torch.randn(layer.weight.shape, generator=generator)))
    return nn.Sequential(layer).eval()


def usual(layer: nn.Linear | nn.Conv2d) -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
    return nn.Sequential(layer).eval()


LAYERS: dict[str, tuple[Callable[[], nn.Linear | nn.Conv2d], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(64, 32), (16, 64)),
    "linear-odd": (lambda: nn.Linear(63, 17, bias=False), (16, 63)),
    "conv": (lambda: nn.Conv2d(16, 16, 3, padding=1), (2, 16, 9, 9)),
    "stem": (lambda: nn.Conv2d(3, 16, 3, padding=1, stride=2), (2, 3, 9, 9)),
    "pointwise": (lambda: nn.Conv2d(16, 32, 1), (2, 16, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32), (2, 32, 9, 9)),
    "grouped": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=8), (2, 32, 9, 9)),
}


def converted(name: str, weights: Any, reduce_range: RangeReduction) -> Program:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    model = weights(make())
    x = torch.rand(shape) * 2 - 0.7
    prepared = qc.prepare(qc.capture(model, (x,)), "x86")
    qc.calibrate(prepared, [(x,)])
    return qc.convert(prepared, reduce_range=reduce_range)


@needs_no_vnni
@pytest.mark.parametrize("name", LAYERS)
def test_kernels_saturate_where_the_proof_says_they_can(name: str) -> None:
    program = converted(name, one_sided, "no")
    assert not accumulators(program).is_safe
    apart = {engine: steps_apart(Layer.of(program), engine) for engine in ENGINES}
    assert apart["fbgemm"] > 50  # 84 to 94 of 255 steps
    # for depthwise convolutions onednn has a kernel that adds in 32 bits
    assert apart["onednn"] <= 1 if name == "depthwise" else apart["onednn"] > 40


@pytest.mark.parametrize("weights", [one_sided, usual])
@pytest.mark.parametrize("reduce_range", ["weights", "activations"])
@pytest.mark.parametrize("name", LAYERS)
def test_after_the_reduction_kernels_agree_with_the_integer_form(
    name: str, reduce_range: RangeReduction, weights: Any
) -> None:
    program = converted(name, weights, reduce_range)
    assert accumulators(program).is_safe
    for engine in ENGINES:
        assert steps_apart(Layer.of(program), engine) <= 1, engine


# -- a stack of transformer blocks -------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block, as in ViT or BERT."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return torch.as_tensor(x + self.down(F.gelu(self.up(self.norm2(x)))))


class OnKernels(fx.Interpreter):
    """Runs a Q/DQ program with fbgemm's kernel in place of every linear layer."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module, garbage_collect_values=False)
        torch.backends.quantized.engine = "fbgemm"

    def run_node(self, n: fx.Node) -> Any:
        if op_name(n) != "linear":
            return super().run_node(n)
        x, w, b = (argument(n, name) for name in ("x", "w", "b"))
        levels, scale = self.env[w.args[0]], self.env[w.args[1]]
        held: Any = torch
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        weight = held._make_per_channel_quantized_tensor(levels, scale.double(), zeros, 0)
        ops: Any = torch.ops.quantized
        packed = ops.linear_prepack(weight, self.env[b].detach())
        return ops.linear_with_input_q_dq_qweight_dq_output_fp32(self.env[x], x.args[1], x.args[2], packed)


def sqnr(signal: Tensor, other: Tensor) -> float:
    noise = (signal.double() - other.double()).square().sum()
    return float(10 * torch.log10(signal.double().square().sum() / noise))


@needs_no_vnni
@torch.no_grad()
def test_a_transformer_on_kernels_keeps_its_quality_only_after_the_reduction() -> None:
    """Measured: 24 dB on kernels that saturate; 43 dB after the reduction, where the integer form has 43 dB."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(128) for _ in range(4))).eval()
    seen, x = [(torch.randn(4, 16, 128),) for _ in range(2)], torch.randn(4, 16, 128)
    prepared = qc.prepare(qc.capture(model, seen[0]), "x86")
    qc.calibrate(prepared, seen)
    real = model(x)
    found: dict[RangeReduction, tuple[float, float]] = {}
    for what in ("no", "weights"):
        integer = qc.convert(prepared, to="integer", reduce_range=what)
        kernels = OnKernels(qc.convert(prepared, reduce_range=what)).run(x)
        found[what] = sqnr(real, integer(x)), sqnr(real, kernels)
    assert found["no"][0] > found["no"][1] + 15  # the program is good, and the kernels spoil it
    assert abs(found["weights"][0] - found["weights"][1]) < 1
    assert found["weights"][1] > found["no"][1] + 15
    assert found["weights"][0] > found["no"][0] - 3  # what the coarser weights cost
