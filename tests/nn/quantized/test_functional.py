"""Functions of quantized tensors by torch's names are torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.functional as ao_functional
from torch.nn import functional

from quantc.nn import quantize_per_tensor
from quantc.nn.quantized import functional as quantized_functional
from tests.support.nn_cases import both, engine, steps_apart

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
