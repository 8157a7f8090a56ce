"""Op names: the dialect's, and full names of overloads."""

from __future__ import annotations

import pytest
import torch

from quantc.errors import PatternError
from quantc.patterns.op_names import has_many_outputs, op_target


def test_a_name_of_the_dialect_and_the_full_name_are_one_op() -> None:
    assert op_target("conv2d") is torch.ops.aten.conv2d.default
    assert op_target("aten.conv2d.default") is op_target("conv2d")
    assert op_target("add") is torch.ops.aten.add.Tensor


def test_ops_beyond_the_dialect_go_by_their_full_name() -> None:
    assert op_target("aten.cumsum.default") is torch.ops.aten.cumsum.default
    assert op_target("prims.sin.default") is torch.ops.prims.sin.default


@pytest.mark.parametrize(
    "name",
    [
        "conv4d",
        "aten.conv2d",
        "aten.conv2d.nothing",
        "aten.nothing.default",
        "torch.ops.load_library",
        "aten.relu .default",
        "",
        "a b",
    ],
)
def test_what_names_no_op_is_refused(name: str) -> None:
    with pytest.raises(PatternError) as caught:
        op_target(name)
    assert repr(name) in caught.value.what
    assert "aten.cumsum.default" in str(caught.value.advice)


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(PatternError, match=r"did you mean .*conv2d"):
        op_target("con2d")


@pytest.mark.parametrize(
    ("name", "many"),
    [("relu", False), ("split", True), ("max", True), ("lstm", True), ("unbind", True), ("cat", False)],
)
def test_ops_that_give_several_tensors_are_known(name: str, many: bool) -> None:
    assert has_many_outputs(name) is many
