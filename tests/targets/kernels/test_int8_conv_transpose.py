"""Transposed convolutions of bytes, run as ordinary ones with an output for each phase of the stride."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quantc.targets.kernels.int8_conv_transpose import Spreading
from quantc.targets.kernels.kernel_agreement import kernel_agreement
from quantc.targets.kernels.kernel_table import NoKernelError
from quantc.targets.kernels.saturation import adds_in_16_bits
from tests.support.byte_convs import (
    CLOSE,
    CONVS,
    ENDINGS,
    FLOAT,
    FULL,
    ORDERS,
    TRANSPOSED,
    Layer,
    in_memory,
    is_curved,
    kernels_in,
)
from tests.support.lowered_families import of_family


@settings(max_examples=60)
@given(
    axes=st.integers(1, 3),
    groups=st.sampled_from([(1, 3, 5), (1, 8, 4), (2, 4, 6), (4, 4, 4)]),
    taps=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    stride=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    padding=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    dilation=st.lists(st.integers(1, 2), min_size=3, max_size=3),
    output_padding=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    batch=st.sampled_from([0, 1, 2]),
    out=st.sampled_from(ENDINGS),
    bias=st.booleans(),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 99),
)
def test_transposed_convolutions(
    axes: int, groups: tuple[int, int, int], taps: Any, stride: Any, padding: Any, dilation: Any, output_padding: Any,
    sizes: Any, batch: int, out: Any, bias: bool, order: str, seed: int,
) -> None:  # fmt: skip
    count, inputs, outputs = groups
    reach = [gap * (k - 1) for k, gap in zip(taps, dilation, strict=True)]
    # the integer form pads what it has spread, which cannot be less than nothing
    padding = [min(pad, most) for pad, most in zip(padding, reach, strict=True)]
    rows = zip(output_padding, stride, dilation, strict=True)
    output_padding = [min(extra, max(step, gap) - 1) for extra, step, gap in rows]
    each = zip(sizes, stride, padding, reach, output_padding, strict=True)
    sizes = [max(n, 1 - (far + extra - 2 * pad) // step) for n, step, pad, far, extra in each]
    window = (stride[:axes], padding[:axes], output_padding[:axes], count, dilation[:axes])
    layer = Layer("conv_transpose", (inputs, outputs // count, *taps[:axes]), window, out, 7, bias, seed=seed)
    x = in_memory(layer.input(batch, inputs, *sizes[:axes]), order)
    families = layer.check(x)
    others = [] if out is FLOAT else ["fbgemm"]
    assert families in (
        [["onednn", *others]] if axes == 1 and not any(output_padding) else [["onednn", *others], others]
    )


def test_a_transposed_weight_can_be_had_back() -> None:
    spreading = Spreading((3, 4), (2, 3), (1, 0), (0, 1), (2, 1), 2, 3, 5)
    weight = torch.randint(-128, 128, (6, 5, 3, 4), dtype=torch.int8)
    assert torch.equal(spreading.weight(spreading.rows(weight)), weight)


def test_transposed_weights_with_zero_points() -> None:
    window = ([2, 2], [1, 1], [1, 1], 1, [1, 1])
    near = Layer("conv_transpose", (4, 6, 3, 3), window, FULL, zero_points=20, most=40)
    x = near.input(2, 4, 5, 5)
    assert near.check(x) == ["onednn", "fbgemm"]
    assert not Layer("conv_transpose", (4, 6, 3, 3), window, FULL, zero_points=120).check(x)


@pytest.mark.parametrize("curve", [nn.Hardswish, nn.SiLU])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("axes", [1, 2])
def test_curves_after_transposed_convolutions(axes: int, groups: int, curve: Any) -> None:
    """These run as ordinary convolutions, whose results are put side by side after the curve."""
    torch.manual_seed(0)
    spread, after = ((nn.ConvTranspose1d, nn.Conv1d), (nn.ConvTranspose2d, nn.Conv2d))[axes - 1]
    model = nn.Sequential(spread(4, 8, 3, stride=2, output_padding=1, groups=groups), curve(), after(8, 4, 1))
    module, x = of_family(model, "onednn", 2, 4, *[5] * axes)  # which family it is by itself depends on the processor
    is_refused = adds_in_16_bits() and any("may be cut off on this processor" in row.why for row in module.placed)
    assert [is_curved(kernel) for kernel in kernels_in(module)].count(True) == (0 if is_refused else 1)
    found = kernel_agreement(module, x)
    assert all(gap.steps <= 1 and gap.relative <= CLOSE for gap in found), "\n".join(map(str, found))


# -- the spreading itself, in float64 ------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    axes=st.integers(1, 3),
    groups=st.integers(1, 2),
    taps=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    stride=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    padding=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    dilation=st.lists(st.integers(1, 2), min_size=3, max_size=3),
    seed=st.integers(0, 99),
)
def test_the_ordinary_convolution_is_torchs_transposed_one(
    axes: int, groups: int, taps: Any, stride: Any, padding: Any, dilation: Any, seed: int
) -> None:
    taps, stride, dilation = tuple(taps[:axes]), tuple(stride[:axes]), tuple(dilation[:axes])
    reach = [gap * (k - 1) for k, gap in zip(taps, dilation, strict=True)]
    padding = tuple(min(pad, far) for pad, far in zip(padding, reach, strict=False))
    extra = tuple(min(1, max(s, gap) - 1) for s, gap in zip(stride, dilation, strict=True))
    spreading = Spreading(taps, stride, padding, extra, dilation, groups, 2, 3)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-9, 10, (2 * groups, 3, *taps), generator=generator).double()
    x = torch.randint(-9, 10, (2, 2 * groups, *[4] * axes), generator=generator).double()
    expected = TRANSPOSED[axes - 1](x, weight, None, stride, padding, extra, groups, dilation)
    window = spreading.window
    made = CONVS[axes - 1](x, spreading.rows(weight), None, window.stride, window.padding, window.dilation, groups)
    assert torch.equal(spreading.side_by_side(made), expected)
    assert spreading.sizes([4] * axes) == list(expected.shape[2:])
    assert torch.equal(spreading.weight(spreading.rows(weight)), weight)


def test_numbers_of_outputs_are_those_of_each_phase() -> None:
    spreading = Spreading((2,), (2,), (0,), (0,), (1,), 2, 1, 3)
    values = torch.tensor([1, 2, 3, 4, 5, 6])
    assert spreading.for_places(values).tolist() == [1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6]


def test_a_window_that_is_only_known_as_it_runs_is_refused() -> None:
    layer = Layer("conv_transpose", (4, 6, 3, 3), ([2, 2], [1, 1], [1, 1], 1, [1, 1]), FULL)
    call = layer.call(layer.input(1, 4, 5, 5))
    assert Spreading.of(call).stride == (2, 2)
    size = call.node.args[0]
    call.arguments["stride"] = [size, 2]
    with pytest.raises(NoKernelError, match="not known before it runs"):
        Spreading.of(call)
