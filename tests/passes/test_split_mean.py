"""split-mean: an image mean that drops its axes becomes one that keeps them, and a flatten."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.hooks import Guard, Truth, Verify
from quantc.ir.dialect import argument, op_name
from quantc.ir.program import Program
from quantc.ir.types import tensor_type
from quantc.passes.split_mean import SplitMean
from quantc.pipeline.pipeline import Pipeline
from tests.support.text_programs import inputs_of, program_of


class Mean(nn.Module):
    def __init__(self, axes: tuple[int, ...], keepdim: bool = False) -> None:
        super().__init__()
        self.axes, self.keepdim = axes, keepdim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.axes, self.keepdim)


def split(model: nn.Module, x: Tensor) -> Program:
    program = qc.capture(model, (x,), method="fx")
    return Pipeline((SplitMean(),)).run(program, [Truth(), Verify(), Guard()])


def ops(program: Program) -> list[str]:
    return [op_name(node) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("axes", [(2, 3), (3, 2), (-1, -2), (2, -1)])
def test_a_mean_over_the_axes_of_an_image_is_split(axes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 5)
    program = split(Mean(axes), x)
    assert ops(program) == ["mean", "flatten"]
    mean, flat = (node for node in program.graph.nodes if node.op == "call_function")
    assert argument(mean, "keepdim") is True
    assert [tensor_type(node) is not None for node in (mean, flat)] == [True, True]
    assert torch.allclose(program(x), x.mean(axes), rtol=1e-6)
    assert program.log[-1].notes == ("split 1",)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Mean((2, 3), keepdim=True), (2, 3, 4, 5)),
        (Mean((1, 2)), (2, 3, 4, 5)),
        (Mean((3,)), (2, 3, 4, 5)),
        (Mean((1, 2)), (3, 4, 5)),
        (Mean((2, 3)), (2, 3, 4, 5, 6)),
    ],
    ids=["axes kept", "other axes", "one axis", "a single image", "volumes"],
)
def test_other_means_stay(model: nn.Module, shape: tuple[int, ...]) -> None:
    program = split(model, torch.randn(shape))
    assert ops(program) == ["mean"]
    assert not program.log[-1].changed


@pytest.mark.parametrize("axes", ["[-1, -2]", "[2, -1]"])
def test_axes_may_be_counted_from_the_end(axes: str) -> None:
    text = f"""program "Mean" stage=canonical method=export mode=eval
  input %x : f32[2,3,4,5]
  %mean : f32[2,3] = mean(%x, {axes})
  output (%mean,)
"""
    program = program_of(text)
    assert SplitMean().run(program)
    assert ops(program) == ["mean", "flatten"]
    assert torch.allclose(program(*inputs_of(program)), inputs_of(program)[0].mean((2, 3)), rtol=1e-5)


def test_batches_of_any_size_are_still_taken() -> None:
    program = split(Mean((2, 3)), torch.randn(2, 3, 4, 5))
    x = torch.randn(7, 3, 4, 5)
    assert torch.allclose(program(x), x.mean((2, 3)), rtol=1e-6)
    (flat,) = (node for node in program.nodes() if op_name(node) == "flatten")
    kind = tensor_type(flat)
    assert kind is not None
    assert kind.shape[1:] == (3,)
    assert kind.rank == 2


def test_a_second_time_nothing_is_left_to_split() -> None:
    program = split(Mean((2, 3)), torch.randn(2, 3, 4, 5))
    before = program.dump("text")
    assert not SplitMean().run(program)
    assert program.dump("text") == before
