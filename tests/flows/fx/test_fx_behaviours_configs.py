"""Behaviours of the FX flow: mappings of QConfigs, and custom configs."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import ConfigError
from quantc.flows.fx import (
    BackendConfig,
    ConvertCustomConfig,
    PrepareCustomConfig,
    QConfig,
    QConfigMapping,
    QuantType,
    StandaloneModuleConfigEntry,
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
    prepare_fx,
)
from quantc.flows.fx.qconfig_mapping import MappingError
from quantc.flows.observers import HistogramObserver, MinMaxObserver, default_weight_observer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.ao import quantization as ao

pytestmark = pytest.mark.filterwarnings("ignore")

WHOLE, ONE, TWO = QConfig(int, str), QConfig(float, str), QConfig(complex, str)


class Float(nn.Module):
    pass


class Observed(nn.Module):
    @classmethod
    def from_float(cls, module: nn.Module) -> Observed:
        return cls()


class Quantized(nn.Module):
    @classmethod
    def from_observed(cls, module: nn.Module) -> Quantized:
        return cls()


def data() -> dict[str, Any]:
    return {
        "": WHOLE,
        "object_type": [(nn.Linear, ONE), (nn.ReLU, TWO)],
        "module_name_regex": [("foo.*bar", ONE), ("foo.*", TWO)],
        "module_name": [("a", ONE), ("b", TWO)],
        "module_name_object_type_order": [("a", nn.Linear, 0, ONE), ("c", nn.ReLU, 1, TWO)],
    }


def mapped() -> QConfigMapping:
    return (
        QConfigMapping()
        .set_global(WHOLE)
        .set_object_type(nn.Linear, ONE)
        .set_object_type(nn.ReLU, TWO)
        .set_module_name_regex("foo.*bar", ONE)
        .set_module_name_regex("foo.*", TWO)
        .set_module_name("a", ONE)
        .set_module_name("b", TWO)
        .set_module_name_object_type_order("a", nn.Linear, 0, ONE)
        .set_module_name_object_type_order("c", nn.ReLU, 1, TWO)
    )


def test_qconfig_mapping_set_global() -> None:
    mapping = QConfigMapping()
    assert mapping.global_qconfig is None
    assert mapping.set_global(WHOLE).global_qconfig is WHOLE


@pytest.mark.parametrize(
    ("attribute", "setter", "keys"),
    [
        ("object_type_qconfigs", "set_object_type", [(nn.Linear,), (nn.ReLU,)]),
        ("module_name_regex_qconfigs", "set_module_name_regex", [("foo.*bar",), ("foo.*",)]),
        ("module_name_qconfigs", "set_module_name", [("mod1",), ("mod2",)]),
        (
            "module_name_object_type_order_qconfigs",
            "set_module_name_object_type_order",
            [("mod1", nn.Linear, 0), ("mod2", nn.ReLU, 1)],
        ),
    ],
)
def test_qconfig_mapping_set_object_type(attribute: str, setter: str, keys: list[tuple[Any, ...]]) -> None:
    """Entries keep their order, and setting one again replaces it."""
    mapping = QConfigMapping()
    assert getattr(mapping, attribute) == OrderedDict()
    for key, qconfig in ((keys[0], WHOLE), (keys[1], TWO), (keys[0], ONE)):
        assert getattr(mapping, setter)(*key, qconfig) is mapping
    plain = [key[0] if len(key) == 1 else key for key in keys]
    assert list(getattr(mapping, attribute).items()) == [(plain[0], ONE), (plain[1], TWO)]


def test_qconfig_mapping_from_dict() -> None:
    assert QConfigMapping.from_dict(data()) == mapped()
    assert QConfigMapping.from_dict({}) == QConfigMapping()
    with pytest.raises(MappingError, match="no key 'undefined'"):  # torch's passes over it
        QConfigMapping.from_dict({**data(), "undefined": []})


def test_qconfig_mapping_to_dict() -> None:
    assert mapped().to_dict() == data()


def test_qconfig_mapping_repr() -> None:
    assert "foo.*bar" in repr(mapped())
    assert repr(get_default_qconfig_mapping())


def test_default_qconfig_mapping_override_global() -> None:
    mapping, own = get_default_qconfig_mapping(), QConfig(MinMaxObserver, default_weight_observer)
    assert isinstance(mapping.global_qconfig.activation(), HistogramObserver)
    prepared = prepare_fx(nn.Sequential(nn.Conv2d(1, 1, 1)).eval(), mapping.set_global(own), (torch.randn(1, 1, 1, 1),))
    for name in ("activation_post_process_0", "activation_post_process_1"):
        assert type(prepared.get_submodule(name)) is MinMaxObserver


def entry() -> StandaloneModuleConfigEntry:
    return StandaloneModuleConfigEntry(mapped(), (torch.randn(3),), PrepareCustomConfig(), BackendConfig("own"))


def test_prepare_custom_config_set_standalone_module_name() -> None:
    config, row = PrepareCustomConfig(), entry()
    assert config.standalone_module_names == {}
    assert config.set_standalone_module_name("module1", *row).standalone_module_names == {"module1": row}


def test_prepare_custom_config_set_standalone_module_class() -> None:
    config, row = PrepareCustomConfig(), entry()
    assert config.standalone_module_classes == {}
    assert config.set_standalone_module_class(Float, *row).standalone_module_classes == {Float: row}


@pytest.mark.parametrize("kind", [QuantType.STATIC, "static", ao.QuantType.STATIC])
def test_prepare_custom_config_set_float_to_observed_mapping(kind: Any) -> None:
    config = PrepareCustomConfig()
    assert config.float_to_observed_mapping == {}
    config.set_float_to_observed_mapping(Float, Observed, kind)
    assert config.float_to_observed_mapping == {QuantType.STATIC: {Float: Observed}}


@pytest.mark.parametrize(
    ("setter", "attribute", "values"),
    [
        ("set_non_traceable_module_names", "non_traceable_module_names", ["a", "b"]),
        ("set_non_traceable_module_classes", "non_traceable_module_classes", [Float, Observed]),
        ("set_input_quantized_indexes", "input_quantized_indexes", [0, 1]),
        ("set_output_quantized_indexes", "output_quantized_indexes", [0, 1]),
        ("set_preserved_attributes", "preserved_attributes", ["a", "b"]),
    ],
)
def test_prepare_custom_config_set_non_traceable_module_names(setter: str, attribute: str, values: list[Any]) -> None:
    config = PrepareCustomConfig()
    assert getattr(config, attribute) == []
    assert getattr(getattr(config, setter)(values), attribute) == values


def custom(row: StandaloneModuleConfigEntry) -> dict[str, Any]:
    return {
        "standalone_module_name": [("module1", *row)],
        "standalone_module_class": [(Float, *row)],
        "float_to_observed_custom_module_class": {"static": {Float: Observed}},
        "non_traceable_module_name": ["module2", "module3"],
        "non_traceable_module_class": [Float, Observed],
        "input_quantized_idxs": [0, 1],
        "output_quantized_idxs": [0, 1],
        "preserved_attributes": ["a", "b"],
    }


def test_prepare_custom_config_from_dict() -> None:
    row = entry()
    config = PrepareCustomConfig.from_dict(custom(row))
    assert config.standalone_module_names == {"module1": row}
    assert config.standalone_module_classes == {Float: row}
    assert config.float_to_observed_mapping == {QuantType.STATIC: {Float: Observed}}
    assert config.non_traceable_module_classes == [Float, Observed]
    assert (config.input_quantized_indexes, config.output_quantized_indexes) == ([0, 1], [0, 1])
    assert (config.non_traceable_module_names, config.preserved_attributes) == (["module2", "module3"], ["a", "b"])


def test_prepare_custom_config_to_dict() -> None:
    row = entry()
    config = PrepareCustomConfig.from_dict(custom(row))
    inner = StandaloneModuleConfigEntry(row[0].to_dict(), row[1], row[2].to_dict(), row[3])
    assert config.to_dict() == custom(inner)  # what it holds is in its dict form too
    assert set(PrepareCustomConfig.from_dict(config.to_dict()).to_dict()) == set(custom(row))


@pytest.mark.parametrize("kind", [QuantType.STATIC, "static", ao.QuantType.STATIC])
def test_convert_custom_config_set_observed_to_quantized_mapping(kind: Any) -> None:
    config = ConvertCustomConfig()
    assert config.observed_to_quantized_mapping == {}
    config.set_observed_to_quantized_mapping(Observed, Quantized, kind)
    assert config.observed_to_quantized_mapping == {QuantType.STATIC: {Observed: Quantized}}


def test_convert_custom_config_set_preserved_attributes() -> None:
    assert ConvertCustomConfig().set_preserved_attributes(["a", "b"]).preserved_attributes == ["a", "b"]


CONVERT = {
    "observed_to_quantized_custom_module_class": {"static": {Observed: Quantized}},
    "preserved_attributes": ["a"],
}


def test_convert_custom_config_from_dict() -> None:
    config = ConvertCustomConfig.from_dict(CONVERT)
    assert config.observed_to_quantized_mapping == {QuantType.STATIC: {Observed: Quantized}}
    assert config.preserved_attributes == ["a"]


def test_convert_custom_config_to_dict() -> None:
    made = ConvertCustomConfig().set_observed_to_quantized_mapping(Observed, Quantized).set_preserved_attributes(["a"])
    assert made.to_dict() == CONVERT


@pytest.mark.parametrize("backend", ["imaginary", 3])
@pytest.mark.parametrize(
    "maker",
    [get_default_qconfig, get_default_qat_qconfig, get_default_qconfig_mapping, get_default_qat_qconfig_mapping],
)
def test_get_default_qconfig_valid_backend(maker: Any, backend: Any) -> None:
    with pytest.raises(ConfigError, match=r"imaginary|3"):
        maker(backend)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.nn.functional.conv2d(self.layers(x), torch.ones(1, 1, 1, 1))
        return out


@pytest.mark.parametrize("maker", [get_default_qconfig_mapping, get_default_qat_qconfig_mapping])
@pytest.mark.parametrize(("backend", "highest"), [("qnnpack", 255), ("fbgemm", 127)])
def test_qconfig_dict_setup(maker: Any, backend: str, highest: int) -> None:
    prepared = prepare_fx(Layers().eval(), maker(backend), torch.randn(1, 1, 4, 4))
    found = [module for name, module in prepared.named_children() if name.startswith("activation_post_process")]
    inner = [getattr(module, "activation_post_process", module) for module in found]
    if maker is get_default_qconfig_mapping:
        assert {(module.quant_min, module.quant_max) for module in inner} == {(0, highest)}
    assert len(found) == 5
