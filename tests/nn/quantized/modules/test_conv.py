"""Quantized convolutions: any window is torch.ao's, and every padding mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quantc.nn import observers, quantize_per_tensor, quantized
from quantc.nn import qconfig as qconfigs
from tests.support.nn_cases import both, case_of, converted, engine, steps_apart


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [2, "same"])
def test_padding(mode: Any, padding: Any) -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(3, 5, (3, 4), padding=padding, padding_mode=mode)
    x = quantize_per_tensor(torch.randn(2, 3, 9, 9), 0.03, 120)
    made = converted(module, quantized.Conv2d, x.dequantize())
    module.weight.data.copy_(made.weight().dequantize())
    wanted = module(x.dequantize())
    assert made(x).shape == wanted.shape
    assert float((made(x).dequantize() - wanted).abs().max()) <= made.scale * 1.01


@pytest.mark.parametrize("engine_name", ["x86", "qnnpack"])
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions_with_scales_by_channel(engine_name: str, groups: int) -> None:
    """torch.ao has them on no engine of x86: held to float."""
    with engine(engine_name):
        torch.manual_seed(0)
        module: Any = nn.ConvTranspose2d(4, 6, 3, 2, groups=groups)
        weight = observers.PerChannelMinMaxObserver.with_args(
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=1
        )
        module.qconfig = qconfigs.QConfig(activation=observers.MinMaxObserver, weight=weight)
        x = quantize_per_tensor(torch.randn(2, 4, 7, 7), 0.03, 120)
        observer = observers.MinMaxObserver()
        observer(module(x.dequantize()))
        module.activation_post_process = observer
        made = quantized.ConvTranspose2d.from_float(module)
        module.weight.data.copy_(made.weight().dequantize())
        wanted = module(x.dequantize())
        assert float((made(x).dequantize() - wanted).abs().max()) <= made.scale * 1.01


WINDOWS = st.fixed_dictionaries(
    {
        "kernel_size": st.integers(1, 3),
        "stride": st.integers(1, 3),
        "padding": st.integers(0, 2),
        "dilation": st.integers(1, 2),
        "groups": st.sampled_from([1, 2]),
        "bias": st.booleans(),
    }
)


@pytest.mark.parametrize("name", ["Conv1d", "Conv2d", "ConvReLU1d", "ConvReLU2d"])
@pytest.mark.parametrize("engine_name", ["fbgemm", "x86", "qnnpack"])
@settings(max_examples=8)
@given(
    window=WINDOWS,
    channels=st.sampled_from([(2, 4), (6, 2), (16, 32)]),
    size=st.integers(6, 12),
    zero=st.integers(0, 255),
)
def test_any_window(
    name: str, engine_name: str, window: dict[str, Any], channels: tuple[int, int], size: int, zero: int
) -> None:
    axes = int(name[-2])
    kind = {1: nn.Conv1d, 2: nn.Conv2d}[axes]
    made = case_of(
        name,
        lambda: kind(*channels, **window),
        (2, channels[0], *[size] * axes),
        engine=engine_name,
        fused="ReLU" in name,
    )
    with engine(engine_name):
        torch.manual_seed(size)
        x = torch.randn(made.shape)
        ours, theirs = made.pair(x)
        ours_x, theirs_x = both(x, (0.031, zero))
        assert steps_apart(ours(ours_x), theirs(theirs_x)) <= 1


SPREAD = st.fixed_dictionaries(
    {
        "kernel_size": st.integers(1, 3),
        "stride": st.integers(1, 3),
        "padding": st.integers(0, 1),
        "dilation": st.integers(1, 2),
        "groups": st.sampled_from([1, 2]),
        "bias": st.booleans(),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine_name"),
    [
        ("Conv3d", "fbgemm"),
        ("ConvReLU3d", "x86"),
        ("ConvTranspose1d", "fbgemm"),
        ("ConvTranspose2d", "fbgemm"),
        ("ConvTranspose1d", "qnnpack"),
        ("ConvTranspose2d", "qnnpack"),
    ],
)
@settings(max_examples=20)
@given(
    window=SPREAD, channels=st.sampled_from([(2, 4), (6, 2), (8, 16)]), size=st.integers(5, 8), zero=st.integers(0, 255)
)
def test_any_other_window(
    name: str, engine_name: str, window: dict[str, Any], channels: tuple[int, int], size: int, zero: int
) -> None:
    axes = int(name[-2])
    kind: Any = getattr(nn, name.replace("ReLU", ""))
    made = case_of(
        name,
        lambda: kind(*channels, **window),
        (2, channels[0], *[size] * axes),
        engine=engine_name,
        fused="ReLU" in name,
        per_channel="Transpose" not in name,
    )
    with engine(engine_name):
        torch.manual_seed(size)
        x = torch.randn(made.shape)
        ours, theirs = made.pair(x)
        ours_x, theirs_x = both(x, (0.031, zero))
        assert steps_apart(ours(ours_x), theirs(theirs_x)) <= 1
