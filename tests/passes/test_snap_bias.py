"""snap-bias: biases become multiples of the accumulator's step, and no other constant moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantc.hooks import Truth, Verify
from quantc.ir.program import Program
from quantc.passes.snap_bias import SnapBias
from quantc.pipeline.pipeline import Pipeline
from tests.support.text_programs import program_of

TEXT = """program "Net" stage=folded method=export mode=eval
  input %x : u8[2,3]
  const %w = "w" : i8[4,3] buffer
  const %s = "s" : f32[4] buffer
  const %z = "z" : i64[4] buffer
  const %b = "b" : f32[4] param
  %dx : f32[2,3] = quantized_decomposed.dequantize_per_tensor.default(%x, 0.5, 3, 0, 255, u8)
  %dw : f32[4,3] = quantized_decomposed.dequantize_per_channel.default(%w, %s, %z, 0, -128, 127, i8)
  %linear : f32[2,4] = linear(%dx, %dw, %b)
  output (%linear,)
"""
SCALE = torch.tensor([0.01, 0.02, 0.5, 1.0])


def given(bias: list[float], text: str = TEXT) -> Program:
    program = program_of(text)
    for name, value in (("s", SCALE), ("z", torch.zeros(4)), ("b", torch.tensor(bias))):
        tensor = program.tensor(program.node(name))
        assert tensor is not None
        with torch.no_grad():
            tensor.copy_(value)
    return program


def snapped(bias: list[float], text: str = TEXT) -> Program:
    return Pipeline((SnapBias(),)).run(given(bias, text), [Truth(), Verify()])


def bias_of(program: Program) -> Tensor:
    found = program.tensor(program.node("linear").all_input_nodes[2])
    assert found is not None
    return found


def test_each_bias_goes_to_the_nearest_multiple_of_its_own_step() -> None:
    """The steps are 0.5 times the scale of the channel: 0.005, 0.01, 0.25, 0.5."""
    program = snapped([0.0124, -0.016, 1.1, 0.8])
    assert torch.allclose(bias_of(program), torch.tensor([0.01, -0.02, 1.0, 1.0]), rtol=1e-6)
    assert program.log[-1].notes == ("rounded to the step of their accumulator: 1 biases",)


def test_no_bias_moves_by_more_than_half_a_step() -> None:
    torch.manual_seed(0)
    for _ in range(20):
        bias = torch.randn(4)
        moved = (bias_of(snapped(bias.tolist())) - bias).abs()
        assert (moved <= SCALE * 0.5 / 2 * (1 + 1e-5)).all()


def test_the_old_bias_is_forgotten_and_the_new_one_has_its_name() -> None:
    program = snapped([0.3, 0.3, 0.3, 0.3])
    assert set(program.root.state_dict()) == {"w", "s", "z", "b_snapped"}


def test_a_bias_on_the_grid_is_left_alone() -> None:
    program = given([0.005, 0.0, -0.25, 1.5])
    once = Pipeline((SnapBias(),)).run_on_copy(program)
    again = Pipeline((SnapBias(),)).run_on_copy(once)
    assert not again.log[-1].changed
    assert torch.equal(bias_of(again), bias_of(once))
    assert not Pipeline((SnapBias(),)).run_on_copy(given([0.0, 0.0, 0.25, -0.5])).log[-1].changed


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("linear(%dx,", "linear(%f,").replace("  %dx :", "  %f : f32[2,3] = cast(%x, f32)\n  %dx :"),
        TEXT.replace("linear(%dx, %dw, %b)", "linear(%dx, %dw)"),
        TEXT.replace("%dw, %b)", "%dw, %c)").replace("  %linear :", "  %c : f32[4] = abs(%b)\n  %linear :"),
    ],
    ids=["a float activation", "no bias", "a bias that is computed"],
)
def test_sums_that_are_not_of_integers_keep_what_is_added_to_them(text: str) -> None:
    program = snapped([0.3, 0.3, 0.3, 0.3], text)
    assert not program.log[-1].changed
