"""What has a QConfig is quantized, as far as a backend has rules for it."""

from __future__ import annotations

import torch
from torch import nn

from quantc.flows.fx import (
    QConfig,
    QConfigMapping,
    convert_fx,
    convert_to_reference_fx,
    get_default_qconfig_mapping,
    prepare_fx,
)
from quantc.flows.fx.quantizer import activation_spec, quantizes_weights, weight_spec
from quantc.flows.observers import (
    HistogramObserver,
    MinMaxObserver,
    PlaceholderObserver,
    default_fixed_qparams_range_0to1_observer,
    default_weight_observer,
)
from quantc.nn.fake_quantize import FakeQuantize
from quantc.nn.qconfig import (
    float16_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    float_qparams_weight_only_qconfig_4bit,
)
from quantc.spec.formats import Timing
from quantc.spec.spec import FP16_WEIGHT, INT4_WEIGHT
from tests.support.fx_small import batches, layers, prepared_layers


def test_a_qconfig_that_leaves_weights_float_quantizes_no_layer_with_weights() -> None:
    mapping = QConfigMapping().set_global(QConfig(HistogramObserver, PlaceholderObserver))
    prepared = prepared_layers(mapping=mapping)
    rows = {row.node: row for row in prepared.coverage().rows}
    assert (rows["linear"].verdict, rows["relu"].verdict) == ("float", "quantized")
    assert "leaves weights float" in rows["linear"].reason
    assert torch.equal(convert_to_reference_fx(prepared).get_parameter("0.weight"), layers()[0].weight)  # type: ignore[index]


def test_an_activation_goes_with_the_layer_it_is_fused_into() -> None:
    signed = QConfig(MinMaxObserver.with_args(dtype=torch.qint8), default_weight_observer)
    mapping = get_default_qconfig_mapping().set_object_type(nn.ReLU, signed)
    prepared, x = prepared_layers(mapping=mapping), batches()[0]
    assert isinstance(prepared.activation_post_process_1, HistogramObserver)
    assert float((convert_fx(prepared)(x) - layers()(x)).detach().abs().max()) < 0.05


def test_a_known_range_says_nothing_of_what_is_read() -> None:
    fixed = QConfig(default_fixed_qparams_range_0to1_observer, default_weight_observer)
    mapping = QConfigMapping().set_object_type(nn.Sigmoid, fixed)
    model, x = nn.Sequential(nn.Sigmoid()).eval(), 4 * batches()[0]
    prepared = prepare_fx(model, mapping, (x,))
    prepared(x)
    assert float((convert_fx(prepared)(x) - model(x)).abs().max()) <= 1.01 / 256


def test_observers_leave_the_range_of_the_dtype_and_fake_quantizers_cut_off() -> None:
    reduced = QConfig(MinMaxObserver.with_args(reduce_range=True), default_weight_observer)
    trained = QConfig(FakeQuantize.with_args(quant_min=0, quant_max=127), default_weight_observer)
    assert (activation_spec(reduced).qmin, activation_spec(reduced).qmax) == (0, 255)
    assert (activation_spec(trained).qmin, activation_spec(trained).qmax) == (0, 127)


def test_weights_in_half_are_float16_and_tables_of_bytes_are_weights_alone() -> None:
    assert weight_spec(float16_dynamic_qconfig) == FP16_WEIGHT
    assert weight_spec(float_qparams_weight_only_qconfig).timing is Timing.WEIGHT_ONLY
    assert weight_spec(float_qparams_weight_only_qconfig_4bit).dtype is INT4_WEIGHT.dtype
    assert not quantizes_weights(QConfig(MinMaxObserver, PlaceholderObserver))
