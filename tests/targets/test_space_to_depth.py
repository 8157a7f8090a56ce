"""Convolutions of images of three channels, over blocks or with a fourth: the same sums, in the forms that runtimes are fast on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import quantc as qc
from quantc.ir.types import TensorType
from quantc.targets.space_to_depth import ORDER, SQUARE, TALL, BlockWindow, Size, block_shapes, blocks_of

WINDOWS = ((7, 3), (3, 1), (3, 0), (4, 1), (2, 0), (1, 0), (5, 2), (6, 2))
"""Taps and padding."""


@given(
    taps=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    sizes=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    channels=st.integers(1, 3),
    block=st.sampled_from([SQUARE, TALL, (1, 2)]),
    steps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_sums_over_blocks_are_those_of_the_image(
    taps: Size, padding: Size, sizes: Size, channels: int, block: Size, steps: Size
) -> None:
    chance = torch.Generator().manual_seed(0)
    rows, columns = (2 * size if wide > 1 else size + max(taps) for size, wide in zip(sizes, block, strict=True))
    stride = tuple(wide if wide > 1 else step for wide, step in zip(block, steps, strict=True))
    shape = (2, channels, rows, columns)
    image = torch.randint(-127, 128, shape, generator=chance).double()
    weight = torch.randint(-127, 128, (4, channels, *taps), generator=chance).double()
    found = blocks_of(weight, TensorType(torch.float32, shape), BlockWindow(stride, padding, (1, 1), 1), block)
    assert found is not None
    assert min(*found.begin, *found.end) >= 0
    apart, whole = block_shapes(TensorType(torch.float32, shape), block)
    blocks = image.reshape(apart).permute(*ORDER).reshape(whole)  # type: ignore[arg-type]
    (top, left), (bottom, right) = found.begin, found.end
    made = functional.conv2d(functional.pad(blocks, (left, right, top, bottom)), found.weight, stride=found.stride)
    assert torch.equal(made, functional.conv2d(image, weight, stride=stride, padding=padding))


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((1, 4, 8, 8), BlockWindow((2, 2), (1, 1), (1, 1), 1)),
        ((1, 3, 9, 8), BlockWindow((2, 2), (1, 1), (1, 1), 1)),
        ((1, 3, "h", 8), BlockWindow((2, 2), (1, 1), (1, 1), 1)),
        ((3, 8, 8), BlockWindow((2, 2), (1, 1), (1, 1), 1)),
        ((1, 3, 8, 8), BlockWindow((1, 1), (1, 1), (1, 1), 1)),
        ((1, 3, 8, 8), BlockWindow((2, 2), (1, 1), (2, 2), 1)),
        ((1, 3, 8, 8), BlockWindow((2, 2), (1, 1), (1, 1), 3)),
    ],
)
def test_what_has_no_blocks(shape: tuple[int | str, ...], window: BlockWindow) -> None:
    channels = 4 if shape[1] == 4 else 3 // window.groups
    weight = torch.ones(6, channels, 3, 3, dtype=torch.int8)
    assert blocks_of(weight, TensorType(torch.float32, shape), window, SQUARE) is None


# -- in the files ------------------------------------------------------------------------------------------------------


def stem(taps: int, padding: int, stride: int = 2) -> nn.Module:
    torch.manual_seed(0)
    after = nn.Conv2d(16, 16, 3, padding=1)
    return nn.Sequential(nn.Conv2d(3, 16, taps, stride, padding), nn.ReLU(), after).eval()


def converted(model: nn.Module, backend: str, reduce_range: Any = "auto") -> tuple[qc.Program, torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    batches = [torch.randn(1, 3, 16, 24, generator=chance) for _ in range(3)]
    prepared = qc.prepare(qc.capture(model, (batches[0],)), backend)
    qc.calibrate(prepared, batches[:2], progress="silent")
    return qc.convert(prepared, reduce_range=reduce_range), batches[2]


def ops(program: qc.Program, profile: str = "onnxruntime") -> Counter[str]:
    return Counter(node.op_type for node in qc.lower(program, "onnx", profile=profile).proto.graph.node)


@pytest.mark.parametrize(("taps", "padding"), WINDOWS)
def test_onnx_runtime_reads_blocks(taps: int, padding: int) -> None:
    pytest.importorskip("onnxruntime")
    program, x = converted(stem(taps, padding), "onnx", "no")
    assert ops(program)["SpaceToDepth"] == 1
    lowered = qc.lower(program, "onnx")
    assert lowered.fusions().fraction == 1
    assert (lowered(x) - program(x)).abs().max() < 1e-5


@pytest.mark.parametrize("stride", [1, 2])
def test_a_fourth_channel_where_blocks_cannot_be(stride: int) -> None:
    """Without a stride, and where weights were fitted to their neighbours: blocks have others."""
    pytest.importorskip("onnxruntime")
    program, x = converted(stem(3, 1, stride), "onnx")
    found = ops(program)
    assert (found["SpaceToDepth"], found["Pad"]) == (0, 1)
    lowered = qc.lower(program, "onnx")
    assert lowered.fusions().fraction == 1
    assert (lowered(x) - program(x)).abs().max() < 1e-5


def test_no_pair_of_products_leaves_its_bits_that_did_not() -> None:
    pytest.importorskip("onnx")
    from quantc.targets.onnx.image_channels import can_saturate

    plain = torch.zeros(1, 3, 1, 2, dtype=torch.int8)
    plain[0, 0, 0, 0], plain[0, 2, 0, 1] = 127, 127  # neighbours neither in a tap nor from one to the next
    assert not can_saturate(plain)
    beside = torch.zeros(1, 12, 1, 1, dtype=torch.int8)
    beside[0, 2:4] = 127
    assert can_saturate(beside)


def test_other_runtimes_read_the_image() -> None:
    pytest.importorskip("onnx")
    program, _ = converted(stem(3, 1), "openvino", "no")
    found = ops(program, "openvino")
    assert not found["SpaceToDepth"] + found["Pad"]


@pytest.mark.parametrize(("taps", "padding"), [(7, 3), (3, 1), (2, 0)])
def test_the_delegate_reads_blocks(taps: int, padding: int) -> None:
    pytest.importorskip("executorch")
    from quantc.targets.executorch.legalize_strided import write_blocks

    program, x = converted(stem(taps, padding), "executorch")
    own = program.clone()
    write_blocks(own)
    (first, _) = (node for node in own.graph.nodes if "conv2d" in str(node.target))
    assert tuple(first.args[1].args[0].meta["val"].shape[:2]) == (16, 6)
    assert torch.allclose(own(x), program(x), atol=1e-5)
    lowered = qc.lower(program, "executorch")
    assert not lowered.delegation().fallen_back
    scales: list[Any] = [node.args[1] for node in program.nodes() if "dequantize_per_tensor" in str(node.target)]
    step = max(scales)
    difference = (lowered(x) - program(x)).abs()
    assert difference.max() <= 1.001 * step
    assert (difference > 0).double().mean() < 0.05


def test_blocks_of_any_number_of_images() -> None:
    pytest.importorskip("executorch")
    batches = [torch.randn(2, 3, 16, 16) for _ in range(2)]
    sizes = ({0: torch.export.Dim("batch", max=8)},)
    made = qc.quantize(stem(3, 1), (batches[0],), batches, backend="executorch", dynamic_shapes=sizes).program
    lowered = qc.lower(made, "executorch")
    assert not lowered.delegation().fallen_back
    x = torch.randn(5, 3, 16, 16)
    assert lowered(x).shape == (5, 16, 8, 8)
    assert (lowered(x) != made(x)).double().mean() < 0.05


def test_delegates_of_others_read_the_image() -> None:
    pytest.importorskip("executorch")
    program, x = converted(stem(3, 1), "executorch")
    plain = qc.lower(program, "executorch", partitioners=[])
    assert "constant_pad_nd" not in " ".join(plain.delegation().others)
    assert torch.allclose(plain(x), program(x), atol=1e-5)


def test_results_of_a_pte_are_not_overwritten() -> None:
    """The runtime copies them: quantc does not do so again."""
    pytest.importorskip("executorch")
    program, x = converted(stem(3, 1), "executorch")
    lowered = qc.lower(program, "executorch")
    first = lowered(x)
    before = first.clone()
    second = lowered(-x)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, before)
    assert not torch.equal(first, second)
