"""The kernel of convolutions that quantize as they run, against the op of the integer form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.config.config import QuantConfig
from quantc.errors import InputError
from quantc.integer.library import OPS
from quantc.qdq.choose_qparams import choose_qparams
from quantc.targets.kernels.conv_window import Window
from quantc.targets.kernels.dynamic_conv import ConvDynamic
from quantc.targets.kernels.dynamic_quantization import RunTimeGrid
from quantc.targets.kernels.packing import quantized_weight

EPS = 2.0**-14
TARGET = OPS["conv_dynamic"].target
GRID = RunTimeGrid(127, None, EPS)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Layer:
    """A convolution with random weights, for the kernel and for the integer form."""

    def __init__(
        self, shape: tuple[int, ...], window: Window, seed: int = 0, bias: bool = True, middle: int | None = None
    ):
        generator = seeded(seed)
        self.levels = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
        self.scale = torch.rand(shape[0], generator=generator) * 0.01 + 1e-4
        self.bias = torch.randn(shape[0], generator=generator) if bias else None
        self.window, self.middle = window, middle
        self.kernel = ConvDynamic(self.levels, self.scale, self.bias, window, RunTimeGrid(127, middle, EPS))

    def integer(self, x: Tensor) -> Tensor:
        grid = (self.middle, 0, 127, torch.uint8, EPS)
        found: Tensor = TARGET(x, self.levels, None, self.scale, self.bias, *self.window.arguments, *grid)
        return found

    def check(self, x: Tensor) -> None:
        """What may differ: levels of numbers halfway between two, half a step of the accumulator for the bias, float32."""
        found, expected = self.kernel(x), self.integer(x)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.is_contiguous()
        scale, _ = choose_qparams(x, False, self.middle, 0, 127, EPS)
        axes = self.levels.dim() - 2
        step = scale.double() * self.scale.double().reshape(-1, *[1] * axes)
        steps = x.double() / scale.double()
        near = (((steps - 0.5) - (steps - 0.5).round()).abs() < 2.0**-14 + steps.abs() * 2.0**-22).double()
        weights = self.levels.double().abs()
        window = (self.window.stride, self.window.padding, self.window.dilation, False, [0] * axes, self.window.groups)
        flips = torch.convolution(near.reshape(-1, *near.shape[-axes - 1 :]), weights, None, *window)
        most = 127 * weights.flatten(1).sum(1).reshape(step.shape)
        bias = 0 if self.bias is None else self.bias.abs().max()
        allowed = (flips.reshape(found.shape) + 0.5 + 2.0**-21 * most) * step + 2.0**-21 * bias
        assert ((found.double() - expected.double()).abs() - allowed).max() <= 0


@settings(max_examples=60)
@given(
    axes=st.integers(1, 3),
    groups=st.integers(1, 3),
    inputs=st.integers(1, 4),
    outputs=st.integers(1, 4),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    batch=st.integers(1, 2),
    size=st.floats(-5, 5),
    shift=st.floats(-3, 3),
    bias=st.booleans(),
    middle=st.sampled_from([None, 64]),
    seed=st.integers(0, 2**16),
)
def test_differs_from_the_integer_form_by_no_more_than_ties_and_bias(
    axes: int, groups: int, inputs: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int,
    batch: int, size: float, shift: float, bias: bool, middle: int | None, seed: int,
) -> None:  # fmt: skip
    # others are refused when a program is lowered (`Window.check_onednn`): onednn reads memory that nobody wrote to
    padding = min(padding, dilation * (kernel - 1))
    inputs = max(inputs, 2) if axes == 3 else inputs
    window = Window([stride] * axes, [padding] * axes, [dilation] * axes, groups)
    layer = Layer((outputs * groups, inputs, *[kernel] * axes), window, seed, bias, middle)
    x = torch.randn(batch, inputs * groups, *[6] * axes, generator=seeded(seed))
    layer.check((x + shift) * 10**size)


PLAIN = Window([1, 1], [1, 1], [1, 1], 1)


@pytest.mark.parametrize("made", ["zero", "one value", "tiny", "large", "not in order", "channels last", "one image"])
def test_odd_inputs(made: str) -> None:
    x = torch.randn(2, 3, 6, 6, generator=seeded(1))
    layer = Layer((4, 3, 3, 3), PLAIN)
    given_ = {
        "zero": x * 0,
        "one value": x * 0 - 0.7,
        "tiny": x * 1e-7,
        "large": x * 1e20,
        "not in order": x.transpose(2, 3),
        "channels last": x.contiguous(memory_format=torch.channels_last),
        "one image": x[0],
    }[made]
    layer.check(given_)


def test_an_empty_batch_is_empty_and_other_dtypes_are_read() -> None:
    layer = Layer((4, 3, 3, 3), PLAIN)
    assert layer.kernel(torch.zeros(0, 3, 6, 6)).shape == (0, 4, 6, 6)
    x = torch.randn(1, 3, 6, 6, generator=seeded(1))
    assert torch.equal(layer.kernel(x.half()), layer.kernel(x.half().float()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(value: float) -> None:
    layer, x = Layer((4, 3, 3, 3), PLAIN), torch.randn(1, 3, 6, 6, generator=seeded(1))
    x[0, 1, 2, 3] = value
    found = layer.kernel(x)
    assert found.shape == (1, 4, 6, 6)
    assert torch.equal(found.isfinite(), layer.integer(x).isfinite())


@pytest.mark.parametrize("shape", [(6, 6), (1, 1, 3, 6, 6)], ids=str)
def test_other_ranks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="goes over 2 axes"):
        Layer((4, 3, 3, 3), PLAIN).kernel(torch.zeros(shape))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_does_a_relu_too(axes: int) -> None:
    window = Window([1] * axes, [1] * axes, [1] * axes, 1)
    layer, x = Layer((4, 3, *[3] * axes), window), torch.randn(2, 3, *[6] * axes, generator=seeded(1))
    plain = layer.kernel(x)
    assert layer.kernel.absorb("relu")
    torch.testing.assert_close(layer.kernel(x), plain.relu(), rtol=0, atol=0)


def test_torchs_own_dynamic_convolutions_cut_results_off() -> None:
    """Why they are not used: no result leaves the range of the input."""
    x = torch.rand(1, 3, 6, 6, generator=seeded(1))
    layer = Layer((4, 3, 3, 3), PLAIN, bias=False)
    engine = torch.backends.quantized.engine
    largest = {}
    for name in ("fbgemm", "qnnpack"):
        torch.backends.quantized.engine = name
        weight = quantized_weight(layer.levels, layer.scale)
        packed = torch.ops.quantized.conv2d_prepack(weight, None, *PLAIN.arguments)
        largest[name] = float(torch.ops.quantized.conv2d_dynamic(x, packed, False).abs().max())
    torch.backends.quantized.engine = engine
    assert layer.integer(x).abs().max() > 1.5
    assert max(largest.values()) < 1.01


def test_models_with_convolutions_are_lowered() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=4, stride=2)
            self.last = nn.Linear(8 * 4, 5)

        def forward(self, x: Tensor) -> Any:
            y = self.second(torch.relu(self.first(x)))
            return self.last(torch.nn.functional.adaptive_avg_pool2d(y, 2).flatten(1)), y

    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(2, 3, 9, 9, generator=seeded(1))
    config = QuantConfig().set_op("conv2d", qc.UINT8_DYNAMIC.but(qmax=127, eps=EPS))
    program = qc.quantize(model, (x,), mode="dynamic", config=config).program
    lowered = qc.lower(program, "x86")
    assert [row.kernel for row in lowered.placed] == ["onednn qconv, relu", "onednn qconv", "fbgemm linear"]
    with torch.no_grad():
        for found, expected in zip(lowered(x), lowered.program(x), strict=True):
            assert found.stride() == expected.stride()
            apart = (found - expected).abs() / expected.abs().max()
            assert apart.max() < 0.02, "more than a level that fell to the other side"
            assert apart.mean() < 0.002
    reasons = {row.reason for row in qc.lower(program, "qnnpack").placed if row.op == "conv_dynamic"}
    assert reasons == {"torch's kernel cuts results off at the range of what it reads"}
