"""Which QConfig each op of a program gets, and what kind of quantization that is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.flows.fx import QConfigMapping, get_default_qconfig_mapping, prepare_fx
from quantc.flows.fx.assign_qconfigs import (
    Choice,
    UnmatchedWarning,
    is_fixed,
    is_observer,
    quant_type_of,
    reuses_input,
    rounds,
)
from quantc.flows.fx.custom_config import QuantType
from quantc.ir.dialect import op_name
from quantc.nn.fake_quantize import default_fake_quant
from quantc.nn.observers import MinMaxObserver, default_fixed_qparams_range_0to1_observer, default_weight_observer
from quantc.nn.qconfig import (
    QConfig,
    default_activation_only_qconfig,
    default_dynamic_qconfig,
    default_qat_qconfig,
    default_qconfig,
    default_reuse_input_qconfig,
    default_weight_only_qconfig,
    float16_static_qconfig,
    float_qparams_weight_only_qconfig,
)
from tests.support.fx_small import prepared_layers


def numbered(number: int) -> QConfig:
    """One that can be told from others."""
    return QConfig(MinMaxObserver.with_args(quant_max=100 + number), default_weight_observer)


A, B, C, D = map(numbered, range(4))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.w = nn.Linear(2, 2), nn.Parameter(torch.eye(2))

    def forward(self, x: Tensor) -> Any:
        return F.linear(F.linear(self.linear(x), self.w), self.w)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = nn.Sequential(Inner()), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.last(self.block(x)))


def chosen(mapping: QConfigMapping) -> list[Any]:
    """What the four linears and the ReLU get, in order: a layer, two functions, a layer, a function."""
    program = qc.capture(Outer().eval(), (torch.zeros(1, 2),), method="fx")
    choice = Choice(program, mapping)
    return [choice[node] for node in program.graph.nodes if op_name(node) in ("linear", "relu")]


def test_the_global_one_is_for_all_and_without_it_there_is_none() -> None:
    assert chosen(QConfigMapping().set_global(A)) == [A] * 5
    assert chosen(QConfigMapping()) == [None] * 5


def test_classes_are_about_layers_and_functions_about_functions() -> None:
    assert chosen(QConfigMapping().set_object_type(nn.Linear, A)) == [A, None, None, A, None]
    assert chosen(QConfigMapping().set_object_type(F.linear, A)) == [None, A, A, None, None]
    assert chosen(QConfigMapping().set_object_type("relu", A)) == [None, None, None, None, A]


def test_the_nearer_name_wins_over_the_farther_and_both_over_patterns_and_classes() -> None:
    mapping = QConfigMapping().set_object_type(nn.Linear, A).set_module_name_regex("block.*", B)
    assert chosen(mapping) == [B, B, B, A, None]
    assert chosen(mapping.set_module_name("block", C)) == [C, C, C, A, None]
    assert chosen(mapping.set_module_name("block.0.linear", None)) == [None, C, C, A, None]


def test_the_first_pattern_that_fits_wins() -> None:
    assert chosen(QConfigMapping().set_module_name_regex("la", A).set_module_name_regex("last", B))[3] is A


def test_the_nth_call_of_a_kind_in_a_module_wins_over_all() -> None:
    mapping = QConfigMapping().set_global(A).set_module_name("block.0", B)
    mapping.set_module_name_object_type_order("block.0", F.linear, 1, C)
    mapping.set_module_name_object_type_order("block.0", nn.Linear, 0, D)
    assert chosen(mapping) == [D, B, C, A, A]


def test_modules_kept_whole_are_asked_by_name_and_class() -> None:
    program = qc.capture(Outer().eval(), (torch.zeros(1, 2),), method="fx")
    choice = Choice(program, QConfigMapping().set_global(A).set_object_type(nn.Linear, B).set_module_name("block", C))
    assert choice.of_module("elsewhere", nn.ReLU()) is A
    assert choice.of_module("elsewhere", nn.Linear(2, 2)) is B
    assert choice.of_module("block.0.linear", nn.Linear(2, 2)) is C


def test_names_that_the_model_does_not_have_are_told() -> None:
    mapping = get_default_qconfig_mapping().set_module_name("blok", None).set_module_name_regex("x+", None)
    with pytest.warns(UnmatchedWarning, match=r"Outer does not have: blok, x\+"):
        prepare_fx(Outer().eval(), mapping, (torch.randn(2, 2),))


@pytest.mark.parametrize(
    ("qconfig", "kind"),
    [
        (default_qconfig, QuantType.STATIC),
        (default_activation_only_qconfig, QuantType.STATIC),
        (default_dynamic_qconfig, QuantType.DYNAMIC),
        (default_weight_only_qconfig, QuantType.WEIGHT_ONLY),
        (float_qparams_weight_only_qconfig, QuantType.WEIGHT_ONLY),
        (float16_static_qconfig, None),
    ],
)
def test_the_kind_that_a_qconfig_asks_for(qconfig: Any, kind: QuantType | None) -> None:
    assert quant_type_of(qconfig) is kind


def test_fixed_ranges_reused_scales_and_rounding_are_told_apart() -> None:
    fixed = QConfig(default_fixed_qparams_range_0to1_observer, default_weight_observer)
    assert [is_fixed(each) for each in (fixed, default_qconfig, default_qat_qconfig)] == [True, False, False]
    assert reuses_input(default_reuse_input_qconfig)
    assert not reuses_input(default_qconfig)
    assert rounds(default_fake_quant())
    assert not rounds(MinMaxObserver())


def test_observers_in_a_graph_are_no_ops_of_the_model() -> None:
    graph = prepared_layers().graph
    found = [node.name for node in graph.nodes if is_observer(node)]
    assert found == [f"activation_post_process_{number}" for number in range(3)]
