"""Qconfigs by path and by class, handed down from each module to those in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.quantization
from torch import nn

from quantc.errors import ConfigError
from quantc.flows import eager
from quantc.flows.eager.propagate import (
    along_outputs,
    check_qconfig,
    is_dynamic,
    is_memoryless,
    own_qconfigs,
    propagate_qconfig_,
    qconfig_of,
)
from quantc.nn.observers import MinMaxObserver, default_weight_observer
from quantc.nn.qconfig import QConfig
from tests.support.eager_small import Small, check, with_qconfig


def test_a_key_that_matches_nothing_is_refused_with_the_closest_names() -> None:
    with pytest.raises(eager.NoEffectError) as caught:
        eager.propagate_qconfig_(Small(), {"cnov": eager.default_qconfig})
    check(caught.value, "cnov", "did you mean conv?")
    with pytest.raises(eager.NoEffectError, match="LSTM"):
        eager.quantize_dynamic(Small(), {nn.LSTM, nn.Linear})
    with pytest.warns(eager.EagerWarning, match="LSTM"):
        eager.quantize_dynamic(Small(), {nn.LSTM, nn.Linear}, accept="no-effect")


def test_what_is_no_qconfig_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        eager.prepare(with_qconfig(Small().eval(), "fbgemm"))
    check(caught.value, "the model", "'fbgemm'")


def qconfigs(model: nn.Module) -> dict[str, Any]:
    return {path: qconfig_of(module) for path, module in model.named_modules()}


def test_the_attribute_wins_over_the_path_and_that_over_the_class_and_that_over_the_parent() -> None:
    own, path, kind, parent = (
        QConfig(MinMaxObserver, default_weight_observer.with_args(quant_max=n)) for n in range(4)
    )
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)), nn.ReLU())
    model[0][0].qconfig = own
    propagate_qconfig_(model, {"": parent, "0.0": path, "0.1": path, nn.Linear: kind})
    assert qconfigs(model) == {"": parent, "0": parent, "0.0": own, "0.1": path, "0.2": kind, "1": parent}


def test_none_leaves_a_part_and_all_in_it_float() -> None:
    model: Any = with_qconfig(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)))
    model[0].qconfig = None
    propagate_qconfig_(model)
    assert [path for path, found in qconfigs(model).items() if found is not None] == ["", "1"]


def test_modules_that_cannot_be_traced_are_left_as_they_are() -> None:
    model = with_qconfig(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)))
    propagate_qconfig_(model, prepare_custom_config_dict={"non_traceable_module_class": [nn.Sequential]})
    assert [path for path, found in qconfigs(model).items() if found is not None] == ["", "1"]
    named = with_qconfig(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    propagate_qconfig_(named, prepare_custom_config_dict={"non_traceable_module_name": ["1"]})
    assert [path for path, found in qconfigs(named).items() if found is not None] == ["", "0"]


def test_weights_of_transposed_convolutions_have_their_scales_on_axis_1() -> None:
    given = eager.get_default_qconfig("fbgemm")
    turned = along_outputs(nn.ConvTranspose2d(2, 3, 1), given)
    assert turned.weight().ch_axis == 1
    assert turned.activation is given.activation
    assert along_outputs(nn.Conv2d(2, 3, 1), given) is given
    assert along_outputs(nn.ConvTranspose2d(2, 3, 1), eager.default_qconfig) is eager.default_qconfig
    assert along_outputs(nn.ConvTranspose2d(2, 3, 1), turned) is turned


def test_which_qconfigs_find_their_scales_as_the_model_runs() -> None:
    assert is_dynamic(eager.default_dynamic_qconfig)
    assert is_dynamic(eager.float16_dynamic_qconfig)
    assert not is_dynamic(eager.default_qconfig)
    assert not is_dynamic(None)
    assert is_memoryless(eager.default_dynamic_qat_qconfig)
    assert not is_memoryless(eager.get_default_qat_qconfig("fbgemm"))


def test_qconfigs_of_torch_are_taken() -> None:
    check_qconfig(torch.ao.quantization.get_default_qconfig("fbgemm"))  # type: ignore[no-untyped-call]
    check_qconfig(None)
    with pytest.raises(ConfigError, match="8") as caught:
        check_qconfig(8, "layer.fc")
    assert "layer.fc" in str(caught.value.where)


def test_only_qconfigs_that_somebody_gave_are_own() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[0].qconfig, model[1].qconfig = eager.default_qconfig, None
    assert own_qconfigs(model) == {"0": eager.default_qconfig}
