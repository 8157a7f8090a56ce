"""What int8 convolutions have in common on every engine: ranks, memory formats, workloads, and the checks before they are taken."""

from __future__ import annotations

import pytest
import torch

from quantc.errors import InputError
from tests.support.byte_convs import FULL, Layer, close, plain


def test_single_items_and_wrong_ranks() -> None:
    layer = plain()
    x = layer.input(2, 4, 6, 5)
    for kernel in layer.kernels(x)[0]:
        assert torch.equal(kernel(x[0]), kernel(x)[0])
        with pytest.raises(InputError, match="goes over 2 axes"):
            kernel(x[0, 0])


def test_results_lie_in_order_unless_nobody_asks() -> None:
    layer = plain()
    x = layer.input(2, 4, 6, 5)
    for kernel in layer.kernels(x)[0]:
        assert kernel(x).is_contiguous()
        kernel.in_order = False
        assert kernel(x).is_contiguous(memory_format=torch.channels_last)
        close(kernel(x), layer.expected(x), kernel.name)


def test_what_they_have_to_do_is_named() -> None:
    def work(layer: Layer, *shape: int) -> str:
        kernels, _ = layer.kernels(layer.input(*shape))
        assert len({str(kernel.work(layer.input(*shape))) for kernel in kernels}) == 1
        return str(kernels[0].work(layer.input(*shape)))

    assert work(plain(), 2, 4, 6, 5) == "conv2d 3x3 s1, 60 × 4→6, padding [1, 1]"
    depthwise = Layer("conv", (8, 1, 3, 3), ([2, 2], [1, 1], [1, 1], 8), FULL)
    assert work(depthwise, 1, 8, 8, 8) == "conv2d depthwise 3x3 s2, 16 × 8→8, padding [1, 1], 8 groups"
    spread = Layer("conv_transpose", (8, 2, 2, 2), ([2, 2], [0, 0], [0, 0], 1, [1, 1]), FULL)
    assert work(spread, 1, 8, 3, 3) == "conv_transpose2d 2x2 s2, 36 × 8→2"


def test_levels_that_could_saturate_are_not_centered_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `convert` has proven goes for the levels as they are stored."""
    layer = Layer("conv", (6, 4, 3, 3), ([1, 1], [1, 1], [1, 1], 1), FULL, zero_points=60)
    x = layer.input(2, 4, 6, 5)
    monkeypatch.setattr("quantc.targets.kernels.int8_conv_base.adds_in_16_bits", lambda: True)
    kernels, reasons = layer.kernels(x)
    assert [kernel.family for kernel in kernels] == ["float32"]
    assert sum("cut off on this processor" in reason for reason in reasons) == 2
    monkeypatch.setattr("quantc.targets.kernels.int8_conv_base.adds_in_16_bits", lambda: False)
    assert [kernel.family for kernel in layer.kernels(x)[0]] == ["onednn", "fbgemm", "float32"]
