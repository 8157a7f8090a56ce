"""Random specs and tensors, for laws."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from quantc.spec.formats import DType, PerChannel, PerGroup, PerTensor, PerToken, Role, Scheme, Timing
from quantc.spec.spec import Observe, QuantSpec

OBSERVES = st.one_of(
    st.sampled_from([Observe(name=name) for name in ("minmax", "mse", "entropy", "recording", "none")]),
    st.floats(51, 100).map(
        lambda value: Observe.model_validate({"name": "percentile", "options": {"percentile": value}})
    ),
    st.floats(1e-6, 10).map(lambda value: Observe.model_validate({"name": "fixed", "options": {"scale": value}})),
)
SHARES = st.one_of(
    st.just(PerTensor()),
    st.integers(-4, 4).map(lambda axis: PerChannel(axis=axis)),
    st.builds(PerGroup, axis=st.integers(-4, 4), size=st.integers(2, 512)),
    st.just(PerToken()),
)


@st.composite
def specs(draw: st.DrawFn) -> QuantSpec:
    """Any valid spec."""
    dtype = draw(st.sampled_from(list(DType)))
    scheme = Scheme.SYMMETRIC if dtype.is_float else draw(st.sampled_from(list(Scheme)))
    share = PerTensor() if dtype is DType.FP16 else draw(SHARES)
    role = Role.ACT if isinstance(share, PerToken) else draw(st.sampled_from(list(Role)))
    timings = {Role.ACT: [Timing.STATIC, Timing.DYNAMIC], Role.WEIGHT: [Timing.STATIC, Timing.WEIGHT_ONLY]}
    low, high = draw(_bounds(dtype, scheme))
    return QuantSpec(
        dtype=dtype,
        scheme=scheme,
        granularity=share,
        role=role,
        timing=draw(st.sampled_from(timings.get(role, [Timing.STATIC]))),
        qmin=low,
        qmax=high,
        eps=draw(st.floats(1e-20, 1e3)),
        observe=draw(OBSERVES),
    )


@st.composite
def _bounds(draw: st.DrawFn, dtype: DType, scheme: Scheme) -> tuple[int, int]:
    if dtype.is_float or draw(st.booleans()):
        return dtype.qmin, dtype.qmax
    high = draw(st.integers(1, dtype.qmax))
    if scheme is Scheme.SYMMETRIC and dtype.is_signed:
        return -high - draw(st.integers(0, 1)), high
    return draw(st.integers(dtype.qmin, 0)), high


def floats(*, width: int = 32) -> st.SearchStrategy[float]:
    """Finite float32 values with the awkward ones among them, small enough for ranges to be measured."""
    special = [0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 1e-20, 1.0, -1.0, 0.5, 127.5, 1e30, -1e30]
    return st.one_of(st.sampled_from(special), st.floats(-(2.0**99), 2.0**99, width=32), st.floats(-4, 4, width=32))


def tensors(shape: tuple[int, ...]) -> st.SearchStrategy[Tensor]:
    """Finite tensors of a shape."""
    return npst.arrays(np.float32, shape, elements=floats()).map(lambda array: torch.from_numpy(array.copy()))


def families(generator: torch.Generator, count: int, size: int) -> list[Tensor]:
    """Random tensors of many kinds: of all scales, one-sided, constant, zero, denormal, with ties and with -0.0."""
    found: list[Tensor] = []
    for index in range(count):
        x = torch.randn(size, generator=generator)
        scale = 10.0 ** float(torch.randint(-8, 9, (), generator=generator))
        kinds = (
            x * scale,
            x.abs() * scale,
            -x.abs() * scale,
            torch.full((size,), float(x[0]) * scale),
            torch.zeros(size),
            x * 1e-41,
            x * 1e37,
            (x * 8).round() / 2,
            torch.where(x > 0, x, torch.tensor(-0.0)),
            x * scale + 5 * scale,
        )
        found.append(kinds[index % len(kinds)])
    return found
