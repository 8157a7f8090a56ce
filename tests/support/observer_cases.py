"""Observers of quantc beside those of torch.ao, which are the oracle: pairs made of the same arguments, and data."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
import torch.ao.quantization
from torch import Tensor

import quantc.nn.observers as own_observers

ao: Any = torch.ao.quantization
"""The oracle; its functions have no types."""

SCHEMES: dict[str, tuple[Any, ...]] = {
    "MinMaxObserver": (torch.per_tensor_affine, torch.per_tensor_symmetric),
    "MovingAverageMinMaxObserver": (torch.per_tensor_affine, torch.per_tensor_symmetric),
    "HistogramObserver": (torch.per_tensor_affine, torch.per_tensor_symmetric),
    "PerChannelMinMaxObserver": (
        torch.per_channel_affine,
        torch.per_channel_symmetric,
        torch.per_channel_affine_float_qparams,
    ),
    "MovingAveragePerChannelMinMaxObserver": (torch.per_channel_affine, torch.per_channel_symmetric),
}

RANGES: dict[torch.dtype, tuple[tuple[int | None, int | None], ...]] = {
    torch.quint8: ((None, None), (0, 127), (0, 255), (0, 15)),
    torch.uint8: ((None, None), (0, 255)),
    torch.qint8: ((None, None), (-127, 127), (-8, 7)),
    torch.int8: ((None, None), (-128, 127)),
}


@st.composite
def observers(draw: Any) -> tuple[Any, Any]:
    """An observer of ours and torch's of the same arguments."""
    name = draw(st.sampled_from(sorted(SCHEMES)))
    qscheme = draw(st.sampled_from(SCHEMES[name]))
    dtype = draw(st.sampled_from(sorted(RANGES, key=str)))
    low, high = draw(st.sampled_from(RANGES[dtype]))
    is_symmetric = qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric)
    unsigned = dtype in (torch.quint8, torch.uint8)
    reduce_range = draw(st.booleans()) and not (is_symmetric and unsigned) and low is None
    keywords: dict[str, Any] = {"dtype": dtype, "qscheme": qscheme, "reduce_range": reduce_range}
    keywords |= {"quant_min": low, "quant_max": high, "eps": draw(st.sampled_from([2.0**-23, 2.0**-12]))}
    if "PerChannel" in name:
        keywords["ch_axis"] = draw(st.sampled_from([0, 1]))
    if name == "HistogramObserver":
        keywords["bins"] = draw(st.sampled_from([64, 2048]))
    return getattr(own_observers, name)(**keywords), getattr(ao, name)(**keywords)


@st.composite
def batches(draw: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    count = draw(st.integers(1, 4))
    size = draw(st.sampled_from([1e-6, 0.3, 1.0, 40.0]))
    shift = draw(st.sampled_from([-3.0, 0.0, 0.5]))
    kind = draw(st.sampled_from(["normal", "positive", "constant", "heavy"]))
    made = [torch.randn(3, 5, 7, generator=generator) * size * (1 + place) + shift for place in range(count)]
    if kind == "positive":
        return [x.relu() for x in made]
    if kind == "constant":
        return [torch.full_like(x, shift) for x in made]
    return [x * x * x for x in made] if kind == "heavy" else made


def same(mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a.double(), b.double()), (mine, theirs)


def named(module: Any, kind: type) -> list[str]:
    return sorted(name for name, value in vars(module).items() if isinstance(value, kind) and not name.startswith("_"))


ATTRIBUTES = ("dtype", "qscheme", "quant_min", "quant_max", "reduce_range", "is_dynamic", "averaging_constant")


def alike(mine: Any, theirs: Any) -> None:
    assert type(mine).__name__ == type(theirs).__name__
    for name in ATTRIBUTES:
        assert getattr(mine, name, None) == getattr(theirs, name, None), name
    assert hasattr(mine, "eps") >= hasattr(theirs, "eps")
    if hasattr(theirs, "eps"):
        assert float(mine.eps) == float(theirs.eps)
    if hasattr(theirs, "scale"):
        same((mine.scale, mine.zero_point), (theirs.scale, theirs.zero_point))
    if getattr(theirs, "ch_axis", None) is not None and "PerChannel" in type(theirs).__name__:
        assert mine.ch_axis == theirs.ch_axis
    if hasattr(theirs, "activation_post_process"):
        assert mine.ch_axis == theirs.ch_axis
        alike(mine.activation_post_process, theirs.activation_post_process)
