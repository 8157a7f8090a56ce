"""The quantized tensor: what torch's functions do to it is what they do to torch's own, and the rest is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.ao.nn.quantized.functional as ao_functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from quantc.errors import DataError, LoadError, MixedTensorsError
from quantc.nn import QuantizedTensor, quantize_per_channel, quantize_per_tensor, quantized
from quantc.nn.quantized import functional as quantized_functional
from tests.support.nn_cases import both, engine, steps_apart

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda q: q.flatten(1),
    "view": lambda q: q.view(2, -1),
    "reshape": lambda q: q.reshape(-1),
    "permute": lambda q: q.permute(0, 2, 3, 1),
    "transpose": lambda q: q.transpose(1, 2),
    "select": lambda q: q[0],
    "slice": lambda q: q[:, 1:, ::2],
    "unsqueeze": lambda q: q.unsqueeze(0).squeeze(0),
    "index": lambda q: q[:, torch.tensor([2, 0])],
    "chunk": lambda q: q.chunk(2, 1)[1],
    "split": lambda q: q.split([1, 3], 1)[1],
    "unbind": lambda q: q.unbind(0)[1],
    "cat": lambda q: torch.cat([q, q], 1),
    "stack": lambda q: torch.stack([q, q]),
    "clone": lambda q: q.clone(),
    "contiguous": lambda q: q.permute(0, 2, 3, 1).contiguous(),
    "max": lambda q: q.max(),
    "max of axis": lambda q: q.max(1)[0],
    "sort": lambda q: q.sort(1)[0],
    "topk": lambda q: q.topk(2, 1)[0],
    "pad": lambda q: functional.pad(q, (1, 2, 0, 1)),
    "relu": functional.relu,
    "relu in place": lambda q: functional.relu(q.clone(), inplace=True),
    "relu6": functional.relu6,
    "hardtanh": functional.hardtanh,
    "clamp": lambda q: torch.clamp(q, -0.5, 0.7),
    "leaky_relu": lambda q: functional.leaky_relu(q, 0.2),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardsigmoid": functional.hardsigmoid,
    "threshold": lambda q: functional.threshold(q, 0.1, 0.2),
    "max_pool2d": lambda q: functional.max_pool2d(q, 3, 2, 1),
    "max_pool2d module": nn.MaxPool2d(2),
    "avg_pool2d": lambda q: functional.avg_pool2d(q, 2),
    "adaptive": nn.AdaptiveAvgPool2d(2),
    "mean": lambda q: q.mean([2, 3]),
    "nearest": lambda q: functional.interpolate(q, scale_factor=2.0),
    "bilinear": lambda q: functional.interpolate(q, scale_factor=2.0, mode="bilinear"),
    "dropout": nn.Dropout().eval(),
    "sequence": nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Identity()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("inference", [False, True])
def test_torchs_functions(name: str, inference: bool) -> None:
    torch.manual_seed(0)
    with torch.inference_mode(inference):
        ours, theirs = both(torch.randn(2, 4, 8, 8))
        found, wanted = FUNCTIONS[name](ours), FUNCTIONS[name](theirs)
    is_average = name in ("avg_pool2d", "adaptive", "mean", "bilinear")
    assert steps_apart(found, wanted) <= int(is_average)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 99),
    scale=st.floats(1e-4, 10),
    dtype=st.sampled_from([torch.quint8, torch.qint8, torch.qint32]),
    zero=st.integers(-128, 255),
)
def test_quantizing_is_torchs(seed: int, scale: float, dtype: torch.dtype, zero: int) -> None:
    zero = max(0, zero) if dtype is torch.quint8 else min(127, zero)
    x = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 20
    ours, theirs = quantize_per_tensor(x, scale, zero, dtype), torch.quantize_per_tensor(x, scale, zero, dtype)
    assert torch.equal(ours.int_repr(), theirs.int_repr())
    assert torch.allclose(ours.dequantize(), theirs.dequantize(), rtol=1e-6)
    assert (ours.q_scale(), ours.q_zero_point()) == (theirs.q_scale(), theirs.q_zero_point())


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8])
def test_scales_by_channel_are_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, scales, zeros = torch.randn(3, 4, 5), torch.rand(4) / 20 + 0.01, torch.randint(0, 100, (4,))
    ours = quantize_per_channel(x, scales, zeros, 1, dtype)
    theirs = torch.quantize_per_channel(x, scales, zeros, 1, dtype)
    assert torch.equal(ours.int_repr(), theirs.int_repr())
    assert torch.allclose(ours.dequantize(), theirs.dequantize())
    assert ours.q_per_channel_axis() == theirs.q_per_channel_axis()
    assert ours.qscheme() == theirs.qscheme()
    turned = ours.permute(1, 0, 2)
    assert torch.equal(turned.dequantize(), ours.dequantize().permute(1, 0, 2))
    assert torch.equal(ours.transpose(0, 1).dequantize(), turned.dequantize())
    with pytest.raises(DataError, match="apart from their channels"):
        ours.flatten()
    with pytest.raises(DataError, match="q_per_channel_scales"):
        ours.q_scale()
    with pytest.raises(DataError, match="q_scale"):
        quantize_per_tensor(x, 0.1, 0).q_per_channel_scales()


def test_it_is_saved_quantized(tmp_path: Path) -> None:
    x = torch.randn(64, 256)
    whole = quantize_per_tensor(x, 0.03, 4)
    rows = quantize_per_channel(x, torch.rand(64) + 0.01, torch.zeros(64, dtype=torch.int64), 0)
    for q in (whole, rows):
        path = tmp_path / "q.safetensors"
        safetensors.torch.save_file(q.parts(), path)
        assert QuantizedTensor.from_parts(safetensors.torch.load_file(path)).equals(q)
        assert path.stat().st_size <= 0.27 * x.numel() * 4
        assert copy.deepcopy(q).equals(q)
        assert pickle.loads(pickle.dumps(q)).equals(q)  # noqa: S301 - our own bytes
    assert not whole.equals(rows)
    with pytest.raises(LoadError, match="not the parts"):
        QuantizedTensor.from_parts({"data": whole.int_repr()})


def test_it_prints_its_numbers_and_its_grid() -> None:
    q = quantize_per_tensor(torch.tensor([0.5, -0.25]), 0.25, 2)
    assert repr(q) == "QuantizedTensor([ 0.5000, -0.2500], size=(2,), uint8, scale=0.25, zero_point=2)"
    assert isinstance(q, Tensor)
    assert q.is_quantized
    assert q.dtype is torch.uint8


@pytest.mark.parametrize(
    ("run", "op"),
    [
        (lambda q: q + 1, "aten.add"),
        (lambda q: q * q, "aten.mul"),
        (lambda q: torch.matmul(q.flatten(1), torch.randn(256, 2)), "aten.mm"),
        (lambda q: functional.softmax(q, 1), "softmax"),
        (lambda q: functional.conv2d(q, torch.randn(1, 4, 1, 1)), "aten.convolution"),
        (lambda q: q.sum(), "aten.sum"),
        (lambda q: q.float(), "become torch.float32"),
    ],
)
def test_ops_of_floats_are_refused(run: Callable[[Any], Any], op: str) -> None:
    q = both(torch.randn(2, 4, 8, 8))[0]
    for inference in (False, True):
        with torch.inference_mode(inference), pytest.raises(MixedTensorsError, match=op) as caught:
            run(q)
        assert caught.value.advice


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(quantized.Conv2d(3, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.stem(x)
        return made


def test_errors_name_the_module() -> None:
    with pytest.raises(MixedTensorsError, match=r"(?s)Conv2d takes quantized.*stem\.0 \(Conv2d\).*add a QuantStub"):
        Model()(torch.randn(1, 3, 2, 2))
    with pytest.raises(MixedTensorsError, match=r"(?s)batch_norm.*stem\.1 \(BatchNorm2d\).*DeQuantStub"):
        Model()(both(torch.randn(1, 3, 2, 2))[0])
    with pytest.raises(MixedTensorsError, match="takes floats, and was given a quantized tensor"):
        quantized.Quantize(0.1, 0)(both(torch.randn(2))[0])
    with pytest.raises(MixedTensorsError, match="DeQuantize takes quantized tensors"):
        quantized.DeQuantize()(torch.randn(2))


def test_joining_wants_one_grid() -> None:
    q, other = quantize_per_tensor(torch.randn(4), 0.1, 0), quantize_per_tensor(torch.randn(4), 0.2, 0)
    with pytest.raises(DataError, match="several"):
        torch.cat([q, other])
    with pytest.raises(MixedTensorsError, match="QuantStub"):
        torch.cat([q, torch.randn(4)])
    with pytest.raises(DataError, match=r"torch\.float32"):
        QuantizedTensor(torch.randn(3), 0.1, 0)


# -- functions by torch's names ----------------------------------------------------------------------------------------

OUT = (0.05, 64)
CALLS: dict[str, tuple[Any, ...]] = {
    "hardswish": OUT,
    "elu": (*OUT, 0.8),
    "celu": (*OUT, 0.8),
    "leaky_relu": (0.3, False, *OUT),
    "hardtanh": (-0.4, 0.6),
    "hardsigmoid": (),
    "threshold": (0.1, 0.3),
    "clamp": (-0.3, 0.4),
    "max_pool2d": (3, 2, 1),
    "avg_pool2d": (2,),
    "adaptive_avg_pool2d": ((2, 3),),
    "interpolate": (None, 2.0, "bilinear"),
    "upsample_nearest": (None, 2.0),
    "upsample_bilinear": (None, 2.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_are_torchs(name: str) -> None:
    torch.manual_seed(0)
    ours, theirs = both(torch.randn(2, 4, 8, 8))
    args = CALLS[name]
    found, wanted = getattr(quantized_functional, name)(ours, *args), getattr(ao_functional, name)(theirs, *args)
    assert steps_apart(found, wanted) <= 1


def test_functions_over_other_axes() -> None:
    torch.manual_seed(0)
    row, their_row = both(torch.randn(2, 4, 9))
    pooled = quantized_functional.max_pool1d(row, 3, 2, 1)
    wanted = ao_functional.max_pool1d(their_row, 3, 2, 1)  # type: ignore[no-untyped-call]
    assert steps_apart(pooled, wanted) == 0
    space, their_space = both(torch.randn(2, 4, 4, 4, 4))
    for name, args in (("avg_pool3d", (2,)), ("adaptive_avg_pool3d", ((2, 2, 2),))):
        found = getattr(quantized_functional, name)(space, *args)
        assert steps_apart(found, getattr(ao_functional, name)(their_space, *args)) <= 1


@pytest.mark.parametrize("engine_name", ["fbgemm", "qnnpack"])
@pytest.mark.parametrize("axes", [0, 1, 2, 3])
def test_products_are_torchs(axes: int, engine_name: str) -> None:
    if axes == 3 and engine_name == "qnnpack":
        engine_name = "fbgemm"  # torch has none there
    with engine(engine_name):
        torch.manual_seed(0)
        name = "linear" if axes == 0 else f"conv{axes}d"
        x = torch.randn(2, 6, *[5] * axes)
        weight, bias = torch.randn(4, 6, *[3] * axes), torch.randn(4)
        ours, theirs = both(x)
        mine, other = (
            quantize_per_tensor(weight, 0.03, 0, torch.int8),
            torch.quantize_per_tensor(weight, 0.03, 0, torch.qint8),
        )
        window: dict[str, Any] = {} if axes == 0 else {"padding": 1, "stride": 2}
        grid = {"scale": 0.2, "zero_point": 120}
        found = getattr(quantized_functional, name)(ours, mine, bias, **window, **grid)
        assert steps_apart(found, getattr(ao_functional, name)(theirs, other, bias, **window, **grid)) <= 1
        assert torch.allclose(found.dequantize(), getattr(functional, name)(x, weight, bias, **window), atol=0.6)
