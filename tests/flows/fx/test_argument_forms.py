"""Reading custom configs, whichever of their spellings is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch.ao.quantization.fx.custom_config as theirs
from torch import nn
from torch.ao.quantization.quant_type import QuantType as TorchQuantType

from quantc.flows.fx.argument_forms import check_flag, config_of
from quantc.flows.fx.custom_config import (
    ConvertCustomConfig,
    CustomConfigError,
    FuseCustomConfig,
    PrepareCustomConfig,
    QuantType,
)


class Swap(nn.Module):
    @classmethod
    def from_float(cls, module: nn.Module) -> nn.Module:
        return module


def test_nothing_is_an_empty_config() -> None:
    assert config_of(FuseCustomConfig, None, None).to_dict() == {}


@pytest.mark.parametrize("as_dict", [False, True])
def test_either_keyword_and_either_form_is_taken(as_dict: bool) -> None:
    config = PrepareCustomConfig().set_non_traceable_module_names(["a"])
    for given in (config, config.to_dict()):
        found = config_of(PrepareCustomConfig, *((None, given) if as_dict else (given, None)))
        assert found.non_traceable_module_names == ["a"]


def test_what_is_read_does_not_change_with_what_was_given() -> None:
    config = PrepareCustomConfig().set_non_traceable_module_names(["a"])
    found = config_of(PrepareCustomConfig, config, None)
    config.non_traceable_module_names.append("b")
    assert found.non_traceable_module_names == ["a"]


def test_configs_of_torch_are_taken() -> None:
    config: Any = theirs.PrepareCustomConfig()
    config.set_float_to_observed_mapping(nn.LSTM, Swap, TorchQuantType.STATIC).set_preserved_attributes(["a"])
    found = config_of(PrepareCustomConfig, config, None)
    assert found.float_to_observed_mapping == {QuantType.STATIC: {nn.LSTM: Swap}}
    assert found.preserved_attributes == ["a"]


def test_two_configs_are_refused() -> None:
    with pytest.raises(CustomConfigError, match="two of ConvertCustomConfig"):
        config_of(ConvertCustomConfig, {}, {})


@pytest.mark.parametrize("given", ["attributes", 3, PrepareCustomConfig(), theirs.PrepareCustomConfig()])
def test_configs_of_another_kind_are_refused(given: Any) -> None:
    with pytest.raises(CustomConfigError, match=f"{type(given).__name__} was given for FuseCustomConfig"):
        config_of(FuseCustomConfig, given, None)


def test_a_flag_is_true_or_false() -> None:
    check_flag("keep", True)
    check_flag("keep", False)
    for given in (1, 0, None, "yes"):
        with pytest.raises(CustomConfigError, match="keep"):
            check_flag("keep", given)
