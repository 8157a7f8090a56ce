"""Convolutions of images of three channels for ONNX Runtime: over blocks, or with a fourth channel; the same sums."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.targets.onnx.image_channels import can_saturate
from tests.support.onnx_models import quantized
from tests.support.stems import converted, stem

pytest.importorskip("onnxruntime")


WINDOWS = ((7, 3), (3, 1), (3, 0), (4, 1), (2, 0), (1, 0), (5, 2), (6, 2))
"""Taps and padding."""


def ops(program: qc.Program, profile: str = "onnxruntime") -> Counter[str]:
    return Counter(node.op_type for node in qc.lower(program, "onnx", profile=profile).proto.graph.node)


@pytest.mark.parametrize(("taps", "padding"), WINDOWS)
def test_onnx_runtime_reads_blocks(taps: int, padding: int) -> None:
    program, x = converted(stem(taps, padding), "onnx", "no")
    assert ops(program)["SpaceToDepth"] == 1
    lowered = qc.lower(program, "onnx")
    assert lowered.fusions().fraction == 1
    assert (lowered(x) - program(x)).abs().max() < 1e-5


@pytest.mark.parametrize("stride", [1, 2])
def test_a_fourth_channel_where_blocks_cannot_be(stride: int) -> None:
    """Without a stride, and where weights were fitted to their neighbours: blocks have others."""
    program, x = converted(stem(3, 1, stride), "onnx")
    found = ops(program)
    assert (found["SpaceToDepth"], found["Pad"]) == (0, 1)
    lowered = qc.lower(program, "onnx")
    assert lowered.fusions().fraction == 1
    assert (lowered(x) - program(x)).abs().max() < 1e-5


def test_no_pair_of_products_leaves_its_bits_that_did_not() -> None:
    plain = torch.zeros(1, 3, 1, 2, dtype=torch.int8)
    plain[0, 0, 0, 0], plain[0, 2, 0, 1] = 127, 127  # neighbours neither in a tap nor from one to the next
    assert not can_saturate(plain)
    beside = torch.zeros(1, 12, 1, 1, dtype=torch.int8)
    beside[0, 2:4] = 127
    assert can_saturate(beside)


def test_other_runtimes_read_the_image() -> None:
    program, _ = converted(stem(3, 1), "openvino", "no")
    found = ops(program, "openvino")
    assert not found["SpaceToDepth"] + found["Pad"]


def test_two_products_that_just_fit_and_one_more() -> None:
    """255 times the two weights, in 16 bits: 32767 at most, and -32768 at least."""
    for pair, can in {(64, 64): False, (64, 65): True, (-64, -64): False, (-64, -65): True, (127, -127): False}.items():
        assert can_saturate(torch.tensor(pair, dtype=torch.int8).reshape(1, 2, 1, 1)) is can


def test_images_of_other_channels_and_grouped_convolutions_are_left_alone() -> None:
    torch.manual_seed(0)
    for layer, channels in ((nn.Conv2d(4, 8, 3), 4), (nn.Conv2d(2, 8, 3), 2), (nn.Conv2d(3, 6, 3, groups=3), 3)):
        x = torch.randn(1, channels, 8, 8)
        found = ops(quantized(layer, [(x,)]))
        assert not found["SpaceToDepth"] + found["Pad"]
        assert found["Conv"] == 1
