"""Types written by hand are held against what the ops give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import VerifyError
from quantc.ir.signature import Signature
from quantc.ir.types import TensorType, TupleType
from quantc.text.digests import constants
from quantc.verify.type_check import sample_sizes, why_not_type

HEAD = 'program "N" stage=canonical method=given mode=eval\n'
GOOD = (
    HEAD
    + """  size n in 2..64
  input %x : f32[n,3,8,8]
  const %w = "w" : f32[4,3,3,3] param
  %conv : f32[n,4,6,6] = conv2d(%x, %w)
  %flat : f32[n,144] = flatten(%conv, start_dim=1)
  %total : f32[n] = sum(%flat, dim=[1])
  %best : (f32[n], i64[n]) = aten.max.dim(%flat, 1)
  %doubled : f32[2*n,144] = cat([%flat, %flat])
  %whole : i64[n,144] = cast(%flat, dtype=i64)
  output (%total, %best, %doubled, %whole)
"""
).replace("cast(%flat, dtype=i64)", "aten._to_copy.default(%flat, dtype=i64)")

WRONG = {
    "shape": ("f32[n,4,6,6] =", "f32[n,4,6,7] =", "conv", "f32[5,4,6,6]"),
    "channels": ("f32[n,4,6,6] =", "f32[n,8,6,6] =", "conv", "f32[5,4,6,6]"),
    "dtype": ("f32[n,144] = flatten", "f16[n,144] = flatten", "flat", "f32[5,144]"),
    "symbol": ("f32[n,144] = flatten", "f32[n+1,144] = flatten", "flat", "f32[5,144]"),
    "rank": ("f32[n] = sum", "f32[n,1] = sum", "total", "f32[5]"),
    "item": ("(f32[n], i64[n])", "(f16[n], i64[n])", "best", "(f32[5], i64[5])"),
    "items": ("(f32[n], i64[n])", "(f32[n])", "best", "(f32[5], i64[5])"),
    "expression": ("f32[2*n,144]", "f32[3*n,144]", "doubled", "f32[10,144]"),
    "cast": ("i64[n,144]", "f32[n,144]", "whole", "i64[5,144]"),
}


def test_sound_types_pass() -> None:
    qc.parse(GOOD).verify()


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_type_is_an_error_that_names_the_node(case: str) -> None:
    old, new, node, given = WRONG[case]
    assert old in GOOD
    with pytest.raises(VerifyError) as caught:
        qc.parse(GOOD.replace(old, new, 1)).verify()
    told = str(caught.value)
    assert f"%{node} : " in told
    assert f"gives {given} here" in told


def test_a_fixed_size_outside_the_range_is_no_matter() -> None:
    signature = Signature((), qc.parse(GOOD).signature.in_spec, qc.parse(GOOD).signature.out_spec)
    ranges = {"a": (2, 64), "b": (7, None), "c": (1, 3), "d": (0, None)}
    for name, row in ranges.items():
        signature.ranges[name] = row
    assert sample_sizes(signature) == {"a": 5, "b": 7, "c": 3, "d": 5}


def test_one_and_true_and_one_point_are_different_arguments() -> None:
    text = HEAD + "  input %x : i64[2]\n  %a : i64[2] = add(%x, 1)\n  %b : f32[2] = add(%x, 1.0)\n  output (%a, %b)\n"
    qc.parse(text).verify()
    with pytest.raises(VerifyError, match="gives f32"):
        qc.parse(text.replace("f32[2]", "i64[2]")).verify()


def test_what_cannot_be_known_is_left_alone() -> None:
    text = HEAD + "  input %x\n  %a : f32[7] = relu(%x)\n  %b : f32[u0] = aten.masked_select.default(%a, %x)\n"
    qc.parse(text + "  output (%b,)\n").verify()
    program = qc.parse(GOOD)
    node = program.node("conv")
    node.meta["val"] = None
    assert not list(why_not_type(node, torch.ops.aten.conv2d.default, {}))


def test_the_type_of_a_constant_is_that_of_its_tensor() -> None:
    program = qc.parse(GOOD)
    program.node("w").meta["val"] = TensorType(torch.float32, (4, 3, 3, 5))
    with pytest.raises(VerifyError, match=r"the constant 'w' is f32\[4,3,3,3\]"):
        program.verify()
    program.node("w").meta["val"] = TupleType(())
    with pytest.raises(VerifyError, match=r"the constant 'w' is f32"):
        program.verify()


def test_every_stage_of_a_model_has_the_types_that_its_ops_give() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)).eval()
    x = torch.randn(2, 3, 8, 8)
    prepared = qc.prepare(qc.capture(model, (x,)), "x86")
    qc.calibrate(prepared, [x], progress="silent")
    for program in (prepared, qc.convert(prepared), qc.convert(prepared, to="integer")):
        program.verify()
        text = str(program)
        for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            line = next(line for line in text.splitlines() if line.lstrip().startswith(f"%{node.name} :"))
            wrong = qc.parse(text.replace(line, line.replace("f32[", "f64[", 1)), constants(program))
            with pytest.raises(VerifyError, match="f64"):
                wrong.verify()
