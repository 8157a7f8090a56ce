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
from quantc.flows.observers import (
    HistogramObserver,
    MinMaxObserver,
    PlaceholderObserver,
    default_fixed_qparams_range_0to1_observer,
    default_weight_observer,
)
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
