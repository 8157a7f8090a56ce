"""Strided convolutions of images in the delegate: over blocks, which are channels; the same sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.hooks import Truth, Verify
from quantc.ir.dialect import argument
from quantc.passes.space_to_depth import SpaceToDepth
from quantc.pipeline.pipeline import Pipeline
from tests.support.executorch_models import static
from tests.support.stems import converted, stem

pytest.importorskip("executorch")


def over_blocks(program: qc.Program) -> qc.Program:
    return Pipeline((SpaceToDepth(),)).run_on_copy(program, [Truth(), Verify()])


@pytest.mark.parametrize(("taps", "padding"), [(7, 3), (3, 1), (2, 0)])
def test_the_delegate_reads_blocks(taps: int, padding: int) -> None:
    program, x = converted(stem(taps, padding), "executorch")
    own = over_blocks(program)
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
    batches = [torch.randn(2, 3, 16, 16) for _ in range(2)]
    sizes = ({0: torch.export.Dim("batch", max=8)},)
    made = qc.quantize(stem(3, 1), (batches[0],), batches, backend="executorch", dynamic_shapes=sizes).program
    lowered = qc.lower(made, "executorch")
    assert not lowered.delegation().fallen_back
    x = torch.randn(5, 3, 16, 16)
    assert lowered(x).shape == (5, 16, 8, 8)
    assert (lowered(x) != made(x)).double().mean() < 0.05


def test_delegates_of_others_read_the_image() -> None:
    program, x = converted(stem(3, 1), "executorch")
    plain = qc.lower(program, "executorch", partitioners=[])
    assert "constant_pad_nd" not in " ".join(plain.delegation().others)
    assert torch.allclose(plain(x), program(x), atol=1e-5)


def blocked(program: qc.Program, x: torch.Tensor) -> list[Any]:
    """The convolutions of a program over blocks, which yields the same."""
    before, own = program.dump(), over_blocks(program)
    assert program.dump() == before
    assert torch.allclose(own(x), program(x), atol=1e-5)
    return [node for node in own.graph.nodes if node.target is torch.ops.aten.conv2d.default]


def test_padding_that_is_not_the_same_on_both_sides_is_an_op() -> None:
    """A window of 3 every 2 with a row of padding: a block before the image, of which one row is read, and none after."""
    program, x = converted(stem(3, 1), "executorch")
    first, second = blocked(program, x)
    assert (first.args[3], first.args[4]) == ([1, 2], [0, 0])
    pad = first.args[0]
    assert pad.target is torch.ops.aten.constant_pad_nd.default
    assert pad.args[1] == [1, 0, 1, 0]
    assert tuple(first.args[1].args[0].meta["val"].shape) == (16, 6, 2, 3)
    assert second.args[4] == [1, 1], "the second convolution is left alone"


def test_rows_and_columns_have_padding_of_their_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 16, 24)
    program = static(nn.Conv2d(3, 4, (3, 5), 2, (1, 2)), x)
    (found,) = blocked(program, x)
    pad = found.args[0]
    assert pad.args[1] == [2, 1, 1, 0], (
        "columns first, as torch has them: what the last of 12 windows reads, and no more"
    )


def test_convolutions_without_a_stride_or_of_many_channels_are_left_alone() -> None:
    for layer, channels in ((nn.Conv2d(3, 4, 3), 3), (nn.Conv2d(4, 4, 3, 2), 4), (nn.Conv2d(3, 6, 3, 2, groups=3), 3)):
        torch.manual_seed(0)
        x = torch.randn(1, channels, 8, 8)
        program = static(layer, x)
        (found,) = blocked(program, x)
        assert found.args[0].target is not torch.ops.aten.constant_pad_nd.default
        assert tuple(argument(found, "stride")) == layer.stride


def test_a_convolution_in_float_is_left_alone() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Conv2d(4, 4, 3)).eval()
    config = qc.QuantConfig().set("0", qc.FLOAT)
    program = qc.quantize(model, (x,), [x], backend="executorch", config=config).program
    found, _ = blocked(program, x)
    assert found.args[0].op == "placeholder"
