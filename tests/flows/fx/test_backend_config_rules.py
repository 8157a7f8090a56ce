"""From a BackendConfig, quantc's or torch's, to a rule table."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.nn import intrinsic as torch_nni

import quantc as qc
from quantc.backends.x86 import X86
from quantc.flows.fx.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    MatchAllNode,
    ObservationType,
)
from quantc.flows.fx.backend_config_rules import backend_of, check_fuser, ops_of_element, translate_backend_config
from quantc.flows.fx.custom_config import CustomConfigError, QuantType
from quantc.flows.fx.native_rules import NATIVE

STATIC = DTypeConfig(
    input_dtype=torch.quint8, output_dtype=torch.quint8, weight_dtype=torch.qint8, bias_dtype=torch.float
)


def table(*patterns: Any, **options: Any) -> Any:
    config = BackendConfig("mine")
    for pattern in patterns:
        config.set_backend_pattern_config(pattern_config(pattern, **options))
    return translate_backend_config(config)


def pattern_config(pattern: Any, shares: bool = False, dtype: DTypeConfig = STATIC) -> BackendPatternConfig:
    kind = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    found = BackendPatternConfig(pattern).add_dtype_config(dtype)
    return found.set_observation_type(kind) if shares else found


def taken(backend: Any, model: nn.Module, *shape: int) -> list[str]:
    program = qc.capture(model.eval(), (torch.randn(shape),), method="fx")
    return [
        match.rule.name for match in backend.table.match(program) if backend.spelled[match.rule.name](match) is None
    ]


def test_a_chain_of_layers_is_one_rule() -> None:
    backend = table((nn.Linear, nn.ReLU))
    assert [rule.name for rule in backend.table.rules] == ["linear-relu"]
    assert taken(backend, nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 1, 2) == ["linear-relu"]
    assert taken(backend, nn.Sequential(nn.Linear(2, 2), nn.Tanh()), 1, 2) == []


def test_a_pattern_of_layers_is_not_about_functions_and_the_other_way_round() -> None:
    class Functional(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return F.hardswish(x)

    layer = nn.Sequential(nn.Hardswish())
    assert taken(table(nn.Hardswish), layer, 2, 2) == ["hardswish"]
    assert taken(table(F.hardswish), layer, 2, 2) == []
    assert taken(table(F.hardswish), Functional(), 2, 2) == ["hardswish"]
    assert taken(table(nn.Hardswish), Functional(), 2, 2) == []


def test_norms_behind_layers_are_folded_by_then() -> None:
    rules = table((nn.Conv2d, nn.BatchNorm2d, nn.ReLU)).table.rules
    assert [rule.name for rule in rules] == ["conv2d-relu"] or len(rules) == 1
    alone = table(nn.BatchNorm2d).table.rules
    assert [rule.name for rule in alone] == ["batch_norm"]


def test_a_sum_may_be_one_with_a_number() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + 2.5

    assert taken(table(operator.add), Sum(), 2, 2) == ["add-2"]


def test_patterns_from_the_result_inwards_have_any_operand() -> None:
    config = pattern_config(None)
    config._set_pattern_complex_format((nn.ReLU, (operator.add, nn.Conv2d, MatchAllNode)))
    backend = translate_backend_config(BackendConfig("mine").set_backend_pattern_config(config))

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu = nn.Conv2d(2, 2, 1), nn.ReLU()

        def forward(self, x: Tensor) -> Any:
            return self.relu(self.conv(x) + x)

    assert len(backend.table.rules) == 1
    assert len(taken(backend, Residual(), 1, 2, 3, 3)) == 1


def test_results_share_the_scale_where_the_config_says_so() -> None:
    assert table(nn.MaxPool2d, shares=True).table.rules[0].roles["out"].startswith("like ")
    assert table(nn.Hardswish).table.rules[0].roles["out"] == "act"


def test_formats_and_kinds_are_kept_with_their_rules() -> None:
    dynamic = DTypeConfig(input_dtype=torch.quint8, output_dtype=torch.float, weight_dtype=torch.qint8, is_dynamic=True)
    backend = table(nn.Linear, dtype=dynamic)
    assert backend.kinds == {"linear": (QuantType.DYNAMIC,)}
    assert backend.formats == {"linear": (dynamic,)}


def test_classes_that_stand_for_fused_layers_make_no_rules() -> None:
    assert table(torch_nni.LinearReLU).table.rules == ()
    assert ops_of_element(torch_nni.LinearReLU) == ()


@pytest.mark.parametrize(
    ("element", "op"),
    [(nn.BatchNorm1d, "batch_norm"), (nn.ReLU6, "clamp"), (nn.Conv3d, "conv3d"), (F.relu, "relu"), ("add_", "add")],
)
def test_layers_and_functions_come_to_ops(element: Any, op: str) -> None:
    assert op in ops_of_element(element)


def test_what_is_none_of_torchs_is_refused_with_the_pattern() -> None:
    class Mine(nn.Module):
        pass

    with pytest.raises(CustomConfigError, match="Mine") as caught:
        table((nn.Linear, Mine))
    assert "Linear" in str(caught.value.where)


def test_a_fuser_of_the_users_own_is_refused() -> None:
    def mine(is_qat: bool, *modules: nn.Module) -> nn.Module:
        return modules[0]

    config = pattern_config((nn.Linear, nn.ReLU))
    check_fuser(config)
    with pytest.raises(CustomConfigError, match="mine"):
        check_fuser(config.set_fuser_method(mine))
    check_fuser(config.set_fused_module(torch_nni.LinearReLU))


def test_a_backend_is_taken_as_it_is_and_nothing_is_the_flows_own() -> None:
    assert backend_of(None) is NATIVE
    assert backend_of(X86) is X86
    with pytest.raises(CustomConfigError, match="str"):
        backend_of("x86")


def test_torchs_native_config_makes_the_rules_of_the_flow() -> None:
    from torch.ao.quantization.backend_config import get_native_backend_config

    backend: Any = backend_of(get_native_backend_config())
    ops = {name for rule in backend.table.rules for name in rule.name.split("-")}
    assert {"linear", "conv2d", "add", "cat", "sigmoid", "relu"} <= ops
    assert backend.known_ranges
