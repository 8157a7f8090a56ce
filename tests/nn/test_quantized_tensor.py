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
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from quantc.errors import DataError, LoadError, MixedTensorsError
from quantc.nn import QuantizedTensor, quantize_per_channel, quantize_per_tensor, quantized
from tests.support.nn_cases import both


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
