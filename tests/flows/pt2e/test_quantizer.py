"""Specs and annotations of the PT2 export flow, with the names and fields of torchao."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import quantizer as theirs

from quantc.errors import SpecError
from quantc.flows.pt2e import quantizer as ours
from quantc.nn.observers import MinMaxObserver

SPECS = (
    "QuantizationSpec",
    "FixedQParamsQuantizationSpec",
    "SharedQuantizationSpec",
    "DerivedQuantizationSpec",
    "QuantizationAnnotation",
)


@pytest.mark.parametrize("name", SPECS)
def test_fields_and_their_order_are_torchaos(name: str) -> None:
    def fields(module: Any) -> list[str]:
        return [field.name for field in dataclasses.fields(getattr(module, name))]

    wanted = fields(theirs)
    assert fields(ours)[: len(wanted)] == wanted or set(fields(ours)) == set(wanted)


def test_specs_are_values() -> None:
    first, second = (ours.QuantizationSpec(torch.int8, MinMaxObserver, -8, 7) for _ in range(2))
    assert first == second
    assert len({first, second}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.quant_min = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "words"), [({"quant_min": 8, "quant_max": 7}, "quant_min 8"), ({"ch_axis": -1}, "ch_axis is -1")]
)
def test_a_spec_that_is_not_well_formed_is_refused(fields: dict[str, int], words: str) -> None:
    with pytest.raises(ours.InvalidSpecError, match=words) as caught:
        ours.QuantizationSpec(torch.int8, MinMaxObserver, **fields)  # type: ignore[arg-type]
    assert isinstance(caught.value, SpecError)
    assert isinstance(caught.value, ValueError)


def test_a_range_of_one_level_and_the_first_axis_are_taken() -> None:
    spec = ours.QuantizationSpec(torch.int8, MinMaxObserver, 7, 7, ch_axis=0)
    assert (spec.quant_min, spec.quant_max, spec.ch_axis) == (7, 7, 0)


def test_annotations_share_no_maps() -> None:
    first, second = ours.QuantizationAnnotation(), ours.QuantizationAnnotation()
    first.input_qspec_map[fx.Graph().placeholder("x")] = None
    assert second.input_qspec_map == {}
    assert second.allow_implicit_sharing


def test_a_quantizer_has_to_annotate_and_validate() -> None:
    class Half(ours.Quantizer):
        def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
            return model

    class Whole(Half):
        def validate(self, model: fx.GraphModule) -> None:
            pass

    with pytest.raises(TypeError, match="validate"):
        Half()  # type: ignore[abstract]
    module = fx.symbolic_trace(torch.nn.ReLU())
    assert Whole().transform_for_annotation(module) is module
    assert Whole.get_supported_operators() == []
