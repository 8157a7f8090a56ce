"""Observers for the groups of an annotated graph, and their places in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quantc.errors import AnnotationError
from quantc.flows.pt2e import DerivedQuantizationSpec, FixedQParamsQuantizationSpec, QuantizationAnnotation
from quantc.flows.pt2e.annotations import Annotations, read_annotations
from quantc.flows.pt2e.group_observers import (
    DerivedObserverOrFakeQuantize,
    insert_observers,
    make_observers,
    plain_observer,
)
from quantc.flows.pt2e.quantizer import QuantizationSpec
from quantc.nn.fake_quantize import FixedQParamsFakeQuantize
from quantc.nn.observers import FixedQParamsObserver, ObserverBase, PerChannelMinMaxObserver
from tests.support.pt2e_quantizers import exported
from tests.support.pt2e_runs import INT8, UINT8

aten = torch.ops.aten
FIXED = FixedQParamsQuantizationSpec(torch.uint8, 1 / 256, 0)


class Sums(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        z = x + y
        return z.relu() + x


def annotated(specs: dict[str, Any]) -> tuple[fx.GraphModule, Annotations]:
    """The graph with specs by "reader:place", where the place is an operand's name or "out"."""
    module = exported(Sums(), (torch.ones(2), torch.ones(2)))
    nodes = {node.name: node for node in module.graph.nodes}
    for place, spec in specs.items():
        reader, _, operand = place.partition(":")
        annotation = nodes[reader].meta.setdefault("quantization_annotation", QuantizationAnnotation())
        if operand == "out":
            annotation.output_qspec = spec
        else:
            annotation.input_qspec_map[nodes[operand]] = spec
    return module, read_annotations(module.graph)


def inserted(specs: dict[str, Any]) -> fx.GraphModule:
    module, annotations = annotated(specs)
    insert_observers(module, annotations, make_observers(annotations, False))
    module.recompile()
    return module


def reads(module: fx.GraphModule, name: str) -> list[str]:
    return next([read.name for read in node.all_input_nodes] for node in module.graph.nodes if node.name == name)


def test_uses_of_one_tensor_that_ask_for_the_same_share_a_node() -> None:
    module = inserted({"add:x": UINT8, "add_1:x": UINT8, "add:y": INT8})
    assert reads(module, "add") == ["activation_post_process_0", "activation_post_process_1"]
    assert reads(module, "add_1") == ["relu", "activation_post_process_0"]


def test_uses_that_ask_for_different_things_have_nodes_of_their_own() -> None:
    module = inserted({"add:x": UINT8, "add_1:x": INT8})
    assert reads(module, "add")[0] != reads(module, "add_1")[1]
    assert module.activation_post_process_0 is not module.activation_post_process_1


def test_a_result_is_observed_for_all_that_read_it() -> None:
    module = inserted({"add:out": UINT8, "relu:add": UINT8})
    assert reads(module, "relu") == ["activation_post_process_0"]
    assert reads(module, "activation_post_process_0") == ["add"]
    module(torch.tensor([1.0, 2.0]), torch.tensor([3.0, -4.0]))
    observer: Any = module.activation_post_process_0
    assert (float(observer.min_val), float(observer.max_val)) == (-2.0, 4.0)


def test_names_that_are_taken_are_passed_over() -> None:
    module, annotations = annotated({"add:x": UINT8})
    module.add_module("activation_post_process_0", nn.Identity())
    insert_observers(module, annotations, make_observers(annotations, False))
    assert reads(module, "add")[0] == "activation_post_process_1"
    assert isinstance(module.activation_post_process_0, nn.Identity)


def test_derived_scales_are_found_from_other_observers_whatever_the_order() -> None:
    def product(observers: list[Any]) -> tuple[Tensor, Tensor]:
        (x, _), (y, _) = (observer.calculate_qparams() for observer in observers)
        return x * y, torch.zeros(1, dtype=torch.int64)

    _, first = annotated({})
    module, _ = annotated({})
    nodes = {node.name: node for node in module.graph.nodes}
    add, last = nodes["add"], nodes["add_1"]
    places: list[Any] = [(nodes["x"], last), (nodes["relu"], last)]
    derived = DerivedQuantizationSpec(places, product, torch.int32)
    add.meta["quantization_annotation"] = QuantizationAnnotation({nodes["x"]: derived})
    last.meta["quantization_annotation"] = QuantizationAnnotation({nodes["x"]: UINT8, nodes["relu"]: INT8})
    made = make_observers(read_annotations(module.graph), False)
    assert first.wanted == {}
    observer = made[nodes["x"], add]
    assert isinstance(observer, DerivedObserverOrFakeQuantize)
    for place, top in zip(places, (255.0, 510.0), strict=True):
        made[place](torch.tensor([0.0, top]))
    assert float(observer.calculate_qparams()[0]) == 2.0
    assert torch.equal(observer(torch.ones(2)), torch.ones(2))


def test_scales_that_derive_from_nothing_are_refused() -> None:
    module, _ = annotated({})
    nodes = {node.name: node for node in module.graph.nodes}
    derived = DerivedQuantizationSpec([nodes["relu"]], lambda _: (torch.ones(1), torch.zeros(1)), torch.int32)
    nodes["add"].meta["quantization_annotation"] = QuantizationAnnotation({nodes["x"]: derived})
    with pytest.raises(AnnotationError, match="relu:out") as caught:
        make_observers(read_annotations(module.graph), False)
    assert "x -> add" in str(caught.value.where)


def test_fixed_scales_are_observers_or_fake_quantizers_over_the_whole_dtype() -> None:
    plain: Any = plain_observer(FIXED)
    assert isinstance(plain, FixedQParamsObserver)
    assert (float(plain.scale), plain.quant_min, plain.quant_max) == (1 / 256, 0, 255)
    assert isinstance(plain_observer(FIXED, is_qat=True), FixedQParamsFakeQuantize)


def test_scales_along_an_axis_are_along_that_axis() -> None:
    by_channel = QuantizationSpec(
        torch.int8, PerChannelMinMaxObserver, -128, 127, torch.per_channel_symmetric, ch_axis=1
    )
    observer: Any = plain_observer(by_channel)
    observer(torch.tensor([[1.0, 10.0], [2.0, 20.0]]))
    assert observer.max_val.tolist() == [2.0, 20.0]


class WithoutAxis(ObserverBase):
    """An observer of a user's own, for whole tensors."""

    def __init__(self, dtype: torch.dtype, quant_min: int, quant_max: int, qscheme: Any, is_dynamic: bool) -> None:
        super().__init__(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return torch.ones(1), torch.zeros(1)


class ForgetsAxis(WithoutAxis):
    def __init__(self, ch_axis: int, **others: Any) -> None:
        super().__init__(**others)


@pytest.mark.parametrize(("made", "words"), [(WithoutAxis, "takes no ch_axis"), (ForgetsAxis, "another ch_axis")])
def test_an_observer_that_loses_its_axis_is_refused(made: Any, words: str) -> None:
    spec = QuantizationSpec(torch.int8, made, -128, 127, torch.per_channel_symmetric, ch_axis=1)
    with pytest.raises(AnnotationError, match=words) as caught:
        plain_observer(spec)
    assert made.__name__ in str(caught.value)
    assert "axis 1" in str(caught.value)
