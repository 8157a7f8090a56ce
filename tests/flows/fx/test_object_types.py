"""Functions and methods by which users mean an op: all the spellings of an op are one."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quantc as qc
from quantc.flows.fx.object_types import class_name, is_module_class, ops_of, stands_for


@pytest.mark.parametrize(
    "spellings",
    [
        (torch.add, torch.Tensor.add, torch.Tensor.add_, "add", "add_", operator.add, operator.iadd),
        (F.relu, torch.relu, torch.relu_, "relu", "relu_"),
        (torch.reshape, "reshape", "view"),
        (torch.matmul, "matmul", torch.bmm, torch.mm, operator.matmul),
        (F.hardtanh, F.relu6, torch.clamp, "clamp_"),
        (torch.permute, "transpose", torch.transpose),
    ],
)
def test_spellings_of_one_op_stand_for_the_same(spellings: tuple[Any, ...]) -> None:
    found = {ops_of(each) for each in spellings}
    assert len(found) == 1
    assert found != {()}


def test_one_name_may_stand_for_several_ops() -> None:
    assert {"upsample_nearest2d", "upsample_bilinear2d"} <= set(ops_of(F.interpolate))


def test_functions_that_only_have_the_name_stand_for_nothing() -> None:
    def relu(x: Any) -> Any:
        return x

    assert ops_of(relu) == ()
    assert ops_of("no_such_method") == ()
    assert ops_of(len) == ()


def test_classes_of_modules_are_known_by_their_names_in_origins() -> None:
    assert is_module_class(nn.Linear)
    assert not is_module_class(nn.Linear(2, 2))
    assert not is_module_class(F.linear)
    assert not is_module_class(int)
    program = qc.capture(nn.Sequential(nn.Linear(2, 2)), (torch.zeros(1, 2),), method="fx")
    linear = next(node for node in program.graph.nodes if stands_for(F.linear, node))
    origin = program.origins.get(linear)
    assert origin is not None
    assert origin.module_type == class_name(nn.Linear)
    assert not stands_for("relu", linear)


def test_a_nested_class_is_named_with_what_it_is_in() -> None:
    class Inner(nn.Module):
        pass

    assert class_name(Inner).endswith("test_a_nested_class_is_named_with_what_it_is_in.<locals>.Inner")
