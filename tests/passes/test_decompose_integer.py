"""decompose-integer: integer ops become the ATen that defines them, with the same bits and under the same names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantc.errors import QuantcError
from quantc.hooks import Guard, Truth, Verify
from quantc.integer.library import op_of
from quantc.ir.program import Program
from quantc.ir.types import TensorType
from quantc.passes.decompose_integer import DecomposeInteger
from quantc.pipeline.pipeline import Pipeline
from tests.support.integer_models import Multiplier
from tests.support.text_programs import inputs_of, program_of

LINEAR = """program "Linear" stage=lowered method=export mode=eval
  input %x : i8[2,4]
  const %m = "m" : f64[] buffer
  %half : i8[2,4] = quantc.requantize.default(%x, -5, %m, None, 3, -128, 127, i8)
  %turn : i8[4,2] = permute(%half, [1, 0])
  output (%turn,)
"""


def lowered(text: str = LINEAR) -> Program:
    program = program_of(text)
    multiplier = program.tensor(program.node("m"))
    assert multiplier is not None
    multiplier.fill_(0.37)
    return program


def decomposed(program: Program) -> Program:
    return Pipeline((DecomposeInteger(),)).run_on_copy(program, [Truth(), Verify(), Guard()])


def namespaces(program: Program) -> set[str]:
    return {getattr(node.target, "namespace", "") for node in program.nodes() if node.op == "call_function"}


def all_levels() -> Tensor:
    return torch.arange(-128, 128, dtype=torch.int8).reshape(-1, 2, 4)


def test_only_aten_is_left_and_it_gives_the_same_bits() -> None:
    before = lowered()
    after = decomposed(before)
    assert namespaces(after) == {"aten"}
    for x in all_levels():
        assert torch.equal(before(x), after(x))
    assert after.log[-1].notes == ("wrote out 1",)


def test_the_numbers_are_those_of_the_definition() -> None:
    """(q + 5) * 0.37 + 3, rounded to even and clamped."""
    after = decomposed(lowered())
    for x in all_levels():
        expected = torch.round((x.double() + 5) * 0.37).add(3).clamp(-128, 127).to(torch.int8)
        assert torch.equal(after(x), expected.T)


def test_the_last_node_of_an_op_has_its_name_and_its_readers() -> None:
    after = decomposed(lowered())
    half = after.node("half")
    assert op_of(half.target) is None
    assert [user.name for user in half.users] == ["turn"]
    assert half.meta["val"].dtype == torch.int8


def test_a_second_time_there_is_nothing_to_write_out() -> None:
    program = decomposed(lowered())
    text = program.dump("text")
    assert not DecomposeInteger().run(program)
    assert program.dump("text") == text


def test_a_program_without_integer_ops_is_left_alone() -> None:
    text = LINEAR.replace("quantc.requantize.default(%x, -5, %m, None, 3, -128, 127, i8)", "clamp(%x, 0, 5)")
    program = program_of(text)
    assert not DecomposeInteger().run(program)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (TensorType(torch.int16, (2, 4)), "another dtype"),
        (TensorType(torch.int8, (2, 4, 1)), "another number of axes"),
        (TensorType(torch.int8, (2, 5)), "another size"),
    ],
    ids=str,
)
def test_a_reference_that_gives_another_type_is_refused_by_the_name_of_the_node(kind: TensorType, reason: str) -> None:
    program = lowered()
    program.node("half").meta["val"] = kind
    with pytest.raises(QuantcError, match=f"half .*{reason}"):
        DecomposeInteger().run(program)


def test_sizes_that_are_not_fixed_may_be_spelled_otherwise() -> None:
    program = lowered()
    program.node("half").meta["val"] = TensorType(torch.int8, ("batch", 4))
    DecomposeInteger().run(program)
    assert program.node("half").meta["val"] == TensorType(torch.int8, ("batch", 4))


@pytest.mark.parametrize("multiplier", ["float64", "fixed"])
def test_either_form_of_a_multiplier_is_written_out(multiplier: Multiplier) -> None:
    text = LINEAR
    if multiplier == "fixed":
        text = text.replace('"m" : f64[] buffer', '"m" : i32[] buffer\n  const %s = "s" : i32[] buffer')
        text = text.replace("%m, None", "%m, %s")
    program = program_of(text)
    if multiplier == "fixed":
        for name, value in (("m", 1589137899), ("s", 32)):  # 0.37 * 2**32
            tensor = program.tensor(program.node(name))
            assert tensor is not None
            tensor.fill_(value)
    after = decomposed(program)
    assert namespaces(after) == {"aten"}
    assert torch.equal(program(*inputs_of(program)), after(*inputs_of(after)))
