"""What prepare, convert and fuse are to do out of the ordinary, and the dict forms of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch.ao.quantization.fx.custom_config as theirs
from torch import nn

from quantc.errors import ConfigError
from quantc.flows.fx.custom_config import ConvertCustomConfig, FuseCustomConfig, PrepareCustomConfig, QuantType


class Swap(nn.Module):
    @classmethod
    def from_float(cls, module: nn.Module) -> nn.Module:
        return module

    @classmethod
    def from_observed(cls, module: nn.Module) -> nn.Module:
        return module


def whole() -> PrepareCustomConfig:
    return (
        PrepareCustomConfig()
        .set_standalone_module_name("a", None, (1,))
        .set_standalone_module_class(nn.GRU, None, (2,))
        .set_float_to_observed_mapping(nn.LSTM, Swap)
        .set_non_traceable_module_names(["b"])
        .set_non_traceable_module_classes([nn.GRU])
        .set_input_quantized_indexes([0])
        .set_output_quantized_indexes([1])
        .set_preserved_attributes(["c"])
    )


def test_custom_configs_read_back() -> None:
    prepare = whole()
    assert prepare.to_dict() == {
        "standalone_module_name": [("a", None, (1,), None, None)],
        "standalone_module_class": [(nn.GRU, None, (2,), None, None)],
        "float_to_observed_custom_module_class": {"static": {nn.LSTM: Swap}},
        "non_traceable_module_name": ["b"],
        "non_traceable_module_class": [nn.GRU],
        "input_quantized_idxs": [0],
        "output_quantized_idxs": [1],
        "preserved_attributes": ["c"],
    }
    convert = ConvertCustomConfig().set_observed_to_quantized_mapping(Swap, Swap, QuantType.DYNAMIC)
    fuse = FuseCustomConfig().set_preserved_attributes("c")
    for config in (prepare, convert, fuse):
        assert type(config).from_dict(config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize("kind", [PrepareCustomConfig, ConvertCustomConfig, FuseCustomConfig])
def test_the_setters_are_those_of_torch(kind: type) -> None:
    def setters(config: type) -> set[str]:
        return {name for name in dir(config) if name.startswith("set_")}

    assert setters(kind) == setters(getattr(theirs, kind.__name__))


@pytest.mark.parametrize("kind", [PrepareCustomConfig, ConvertCustomConfig, FuseCustomConfig])
def test_an_empty_config_has_an_empty_dict_form(kind: Any) -> None:
    assert kind().to_dict() == {}
    assert kind.from_dict({}).to_dict() == {}


def test_one_will_do_where_several_could_be_given() -> None:
    given = {"non_traceable_module_class": nn.GRU, "input_quantized_idxs": 2, "preserved_attributes": "name"}
    config = PrepareCustomConfig.from_dict(given)
    assert config.non_traceable_module_classes == [nn.GRU]
    assert config.input_quantized_indexes == [2]
    assert config.preserved_attributes == ["name"]


def test_a_second_class_is_added_under_its_kind() -> None:
    config = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, Swap)
    config.set_float_to_observed_mapping(nn.GRU, Swap).set_float_to_observed_mapping(nn.LSTM, Swap, "weight_only")
    assert config.float_to_observed_mapping == {
        QuantType.STATIC: {nn.LSTM: Swap, nn.GRU: Swap},
        QuantType.WEIGHT_ONLY: {nn.LSTM: Swap},
    }


def test_configs_share_no_lists() -> None:
    first, second = PrepareCustomConfig(), PrepareCustomConfig()
    first.non_traceable_module_names.append("a")
    assert second.non_traceable_module_names == []
    data = whole().to_dict()
    config = PrepareCustomConfig.from_dict(data)
    data["non_traceable_module_name"].append("later")
    assert config.non_traceable_module_names == ["b"]


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (lambda: PrepareCustomConfig.from_dict({"non_traceable_module_names": ["a"]}), "'non_traceable_module_names'"),
        (lambda: FuseCustomConfig.from_dict({"standalone_module_name": []}), "'standalone_module_name'"),
        (lambda: PrepareCustomConfig.from_dict({"non_traceable_module_name": [1]}), "holds 1"),
        (lambda: PrepareCustomConfig.from_dict({"non_traceable_module_class": "GRU"}), "holds 'G'"),
        (lambda: PrepareCustomConfig.from_dict({"input_quantized_idxs": [True]}), "holds True"),
        (lambda: PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, nn.GRU), "GRU.* from_float"),
        (lambda: ConvertCustomConfig().set_observed_to_quantized_mapping(Swap, nn.GRU), "GRU.* from_observed"),
        (lambda: ConvertCustomConfig().set_observed_to_quantized_mapping(Swap, Swap, "fast"), "quantization 'fast'"),
    ],
)
def test_what_cannot_be_read_is_refused(made: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what) as caught:
        made()
    assert isinstance(caught.value, ConfigError)
    assert caught.value.advice
