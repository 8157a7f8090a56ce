"""Preparing a model for calibration or training: whose table, what stands alone, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.annotate.quantizer import Backend
from quantc.backends.qnnpack import QNNPACK
from quantc.backends.x86 import X86
from quantc.errors import ConfigError
from quantc.flows.fx import (
    PrepareCustomConfig,
    QConfigMapping,
    QuantizedGraphModule,
    convert_fx,
    convert_to_reference_fx,
    default_dynamic_qconfig,
    fuse_fx,
    get_default_qconfig_mapping,
    prepare_fx,
)
from quantc.flows.fx.observed_module import ObservedGraphModule
from tests.support.fx_models import model_and_data
from tests.support.fx_small import batches, layers, prepared_layers


def test_what_was_given_may_change_afterwards() -> None:
    mapping, custom = get_default_qconfig_mapping(), PrepareCustomConfig()
    prepared = prepared_layers(custom, mapping)
    mapping.set_global(None)
    custom.set_output_quantized_indexes(0)
    assert convert_fx(prepared)(batches()[0]).dtype is torch.float32


def test_coverage_says_what_is_float_and_why() -> None:
    mapping = get_default_qconfig_mapping().set_module_name("2", None)
    rows = {row.node: row for row in prepared_layers(mapping=mapping).coverage().rows}
    assert {name: row.verdict for name, row in rows.items()} == {
        "linear": "quantized",
        "relu": "quantized",
        "linear_1": "float",
    }
    assert "the QConfigMapping has nothing for it" in rows["linear_1"].reason


@pytest.mark.parametrize("backend", [X86, QNNPACK], ids=["x86", "qnnpack"])
@pytest.mark.parametrize("name", ["classifier", "attention"])
def test_another_table_may_be_given(name: str, backend: Backend) -> None:
    model, data = model_and_data(name)
    prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (data[0],), backend_config=backend)
    for x in data:
        prepared(x)
    with torch.no_grad():
        exact = model(data[0])
        assert float((convert_fx(prepared)(data[0]) - exact).abs().max()) < 0.05 * float(exact.abs().max())
    assert {row.quantizer for row in prepared.coverage().rows if row.verdict == "quantized"} == {backend.name}


def test_standalone_modules_are_prepared_on_their_own() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.alone = nn.Linear(8, 8), layers()

        def forward(self, x: Tensor) -> Any:
            return self.alone(self.first(x))

    model, x = Outer().eval(), batches()[0]
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    by_name = PrepareCustomConfig().set_standalone_module_name("alone", mapping, (x,))
    by_class = {"standalone_module_class": [(nn.Sequential, mapping, (x,), None, None)]}
    for custom in (by_name, by_class):
        prepared = prepare_fx(model, get_default_qconfig_mapping(), (x,), custom)
        assert isinstance(prepared.alone, ObservedGraphModule)
        for batch in batches():
            prepared(batch)
        quantized = convert_fx(prepared)
        assert isinstance(quantized.alone, QuantizedGraphModule)
        assert [row.verdict for row in prepared.alone.coverage().rows if row.op == "linear"] == ["quantized"] * 2
        assert {row.technique for row in prepared.alone.coverage().rows if row.op == "linear"} == {"dynamic"}
        assert float((quantized(x) - model(x)).abs().max()) < 0.05
        assert torch.equal(copy.deepcopy(quantized)(x), quantized(x))


PREPARE: Any = prepare_fx
CONVERT: Any = convert_fx
REFERENCE: Any = convert_to_reference_fx
FUSE: Any = fuse_fx


@pytest.mark.parametrize(
    "call",
    [
        lambda p: PREPARE(layers(), "x86", (batches()[0],)),
        lambda p: PREPARE(layers(), get_default_qconfig_mapping(), 3),
        lambda p: PREPARE(layers(), get_default_qconfig_mapping(), (batches()[0],), "custom"),
        lambda p: PREPARE(layers(), get_default_qconfig_mapping(), (batches()[0],), {}, prepare_custom_config_dict={}),
        lambda p: PREPARE(layers(), get_default_qconfig_mapping(), (batches()[0],), None, {"": None}),
        lambda p: PREPARE(layers(), get_default_qconfig_mapping(), (batches()[0],), backend_config="x86"),
        lambda p: CONVERT(layers()),
        lambda p: CONVERT(p, _remove_qconfig=1),
        lambda p: CONVERT(p, keep_original_weights="no"),
        lambda p: CONVERT(p, qconfig_mapping=QConfigMapping()),
        lambda p: CONVERT(p, ["custom"]),
        lambda p: REFERENCE(p, _remove_qconfig=None),
        lambda p: FUSE(layers(), 3),
    ],
)
def test_arguments_of_the_wrong_type_are_value_errors(call: Any) -> None:
    prepared = prepared_layers()
    with pytest.raises(ValueError, match=r"\w") as caught:
        call(prepared)
    assert isinstance(caught.value, ConfigError)
