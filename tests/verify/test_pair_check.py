"""A dequantize reads what its quantize wrote, at the same scale."""

from __future__ import annotations

import pytest
import torch

import quantc as qc
from quantc.errors import VerifyError

D = "quantized_decomposed"
TENSOR = f"""program "N" stage=quantized method=given mode=eval
  input %x : f32[2,4]
  %q : u8[2,4] = {D}.quantize_per_tensor.default(%x, 0.5, 3, 0, 255, u8)
  %d : f32[2,4] = {D}.dequantize_per_tensor.default(%q, 0.5, 3, 0, 255, u8)
  output (%d,)
"""
CHANNEL = f"""program "N" stage=quantized method=given mode=eval
  input %x : f32[4,4]
  const %s = "s" : f32[4] buffer
  const %z = "z" : i64[4] buffer
  const %t = "t" : f32[4] buffer
  %q : i8[4,4] = {D}.quantize_per_channel.default(%x, %s, %z, 0, -128, 127, i8)
  %d : f32[4,4] = {D}.dequantize_per_channel.default(%q, %s, %z, 0, -128, 127, i8)
  output (%d,)
"""
DEQUANTIZE = {
    "scale": (TENSOR, "(%q, 0.5,", "(%q, 0.25,", "its scale is 0.25, and that of %q, which it reads, 0.5"),
    "zero point": (TENSOR, "(%q, 0.5, 3,", "(%q, 0.5, 4,", "its zero_point is 4"),
    "lowest": (TENSOR, "(%q, 0.5, 3, 0,", "(%q, 0.5, 3, 1,", "its quant_min is 1"),
    "highest": (TENSOR, "(%q, 0.5, 3, 0, 255,", "(%q, 0.5, 3, 0, 127,", "its quant_max is 127"),
    "dtype": (TENSOR, "(%q, 0.5, 3, 0, 255, u8)", "(%q, 0.5, 3, 0, 255, i8)", "its dtype is torch.int8"),
    "axis": (CHANNEL, "(%q, %s, %z, 0,", "(%q, %s, %z, 1,", "its axis is 1"),
    "scales": (CHANNEL, "(%q, %s,", "(%q, %t,", "its scales is %t"),
    "kind": (
        CHANNEL,
        f"{D}.dequantize_per_channel.default(%q, %s, %z, 0,",
        f"{D}.dequantize_per_tensor.default(%q, 0.5, 3,",
        "dequantize_per_tensor reads what quantize_per_channel writes: %q",
    ),
}
VALUES = {"s": torch.ones(4), "z": torch.zeros(4, dtype=torch.int64), "t": torch.full((4,), 2.0)}


@pytest.mark.parametrize("text", [TENSOR, CHANNEL], ids=["per tensor", "per channel"])
def test_a_pair_that_agrees_passes(text: str) -> None:
    qc.parse(text, VALUES).verify()
    qc.parse(text.replace("(%q, %s,", "(%q, %t,"), {**VALUES, "t": torch.ones(4)}).verify()


@pytest.mark.parametrize("case", DEQUANTIZE)
def test_a_pair_that_disagrees_is_an_error_that_names_the_node(case: str) -> None:
    text, old, new, told = DEQUANTIZE[case]
    assert old in text
    with pytest.raises(VerifyError) as caught:
        qc.parse(text.replace(old, new, 1), VALUES).verify()
    assert told in str(caught.value)
    assert f"%d : {'f32[2,4]' if text is TENSOR else 'f32[4,4]'}" in str(caught.value)


def test_scales_without_numbers_are_not_compared() -> None:
    qc.parse(CHANNEL.replace("(%q, %s,", "(%q, %t,")).verify()
