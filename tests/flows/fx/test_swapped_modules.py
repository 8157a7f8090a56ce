"""Modules of users' own in a quantized model, swapped for their quantized versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import ConfigError
from quantc.flows.fx import (
    convert_fx,
    get_default_qconfig_mapping,
    prepare_fx,
)
from quantc.flows.fx.swapped_modules import GivenQuantized, dequantize_output
from tests.support.fx_custom_modules import (
    DynamicQuantNonTraceable,
    FP32NonTraceable,
    M,
    ObservedNonTraceable,
    StaticQuantNonTraceable,
)
from tests.support.fx_small import batches


def test_a_kind_that_a_custom_module_has_no_version_for_is_refused() -> None:
    custom = {"non_traceable_module_class": [FP32NonTraceable]}
    prepared = prepare_fx(M().eval(), get_default_qconfig_mapping(), (batches()[0],), custom)
    for x in batches():
        prepared(x)
    swaps = {"dynamic": {FP32NonTraceable: DynamicQuantNonTraceable}}
    with pytest.raises(ConfigError, match="there is a dynamic version, and its QConfig is static"):
        convert_fx(prepared, {"observed_to_quantized_custom_module_class": swaps})


def converted_custom() -> tuple[Any, Any]:
    custom = {
        "float_to_observed_custom_module_class": {"static": {FP32NonTraceable: ObservedNonTraceable}},
        "non_traceable_module_class": [FP32NonTraceable],
    }
    torch.manual_seed(0)
    model = M().eval()
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (batches()[0],), custom)
    for x in batches():
        prepared(x)
    swaps = {"static": {ObservedNonTraceable: StaticQuantNonTraceable}}
    return model, convert_fx(prepared, {"observed_to_quantized_custom_module_class": swaps})


def test_a_quantized_version_is_given_quantized_tensors_and_gives_floats() -> None:
    model, quantized = converted_custom()
    with torch.no_grad():
        expected = model(batches()[0])
        assert float((quantized(batches()[0]) - expected).abs().max()) < 0.05 * float(expected.abs().max())
    parts = [module for module in quantized.modules() if isinstance(module, StaticQuantNonTraceable)]
    assert parts
    assert all(part.given[-1] is torch.quint8 for part in parts)


def test_tensors_are_put_on_the_grids_of_their_places_and_the_rest_is_left() -> None:
    given = GivenQuantized({1: (0.5, 3, torch.quint8)})
    x, y = torch.tensor([0.1, 1.0]), torch.tensor([-1.5, 1.1])
    first, number, rest = given(nn.Identity(), (x, 7, [y]))
    assert first is x
    assert number == 7
    assert rest[0].int_repr().tolist() == [0, 5]
    assert (rest[0].q_scale(), rest[0].q_zero_point()) == (0.5, 3)


def test_what_is_yielded_quantized_is_float_again() -> None:
    x = torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 0, torch.quint8)
    plain = torch.ones(1)
    made = dequantize_output(nn.Identity(), (), {"a": x, "b": plain})
    assert made["a"].tolist() == [1.0, 2.0]
    assert not made["a"].is_quantized
    assert made["b"] is plain
