"""Quantize and dequantize ops in the place of observers."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from quantc.errors import CalibrationError
from quantc.flows.observers import MinMaxObserver
from quantc.flows.pt2e import (
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    convert_pt2e,
    prepare_pt2e,
)
from tests.support.oracles import sqnr
from tests.support.pt2e_small import RESIDUAL, Sum, calibrated, captured, nodes, own

aten = torch.ops.aten


@pytest.fixture(scope="module")
def converted() -> fx.GraphModule:
    batches = RESIDUAL.batches(2, seed=1)
    exported = captured(RESIDUAL.with_norms(), *batches[0], strict=True)
    exported.meta["mine"] = 7
    prepared = prepare_pt2e(exported, own())
    with torch.no_grad():
        prepared(*batches[0])
    assert prepared.meta["mine"] == 7
    return convert_pt2e(prepared)


def test_scales_are_literals_and_by_channel_attributes(converted: fx.GraphModule) -> None:
    for node in nodes(converted, "quantize") + nodes(converted, "dequantize"):
        if "per_tensor.default" in str(node.target):
            assert isinstance(node.args[1], float)
            assert isinstance(node.args[2], int)
        else:
            assert "per_channel.default" in str(node.target)
            assert [operand.op for operand in node.all_input_nodes[1:]] == ["get_attr", "get_attr"]


def test_every_dequantize_has_one_reader_and_its_metadata(converted: fx.GraphModule) -> None:
    found = nodes(converted, "dequantize")
    assert len(found) > 15
    for node in found:
        (reader,) = node.users
        for key in ("nn_module_stack", "stack_trace"):
            assert node.meta.get(key) == reader.meta.get(key), node.name


def test_weights_are_stored_frozen(converted: fx.GraphModule) -> None:
    stored = [node for node in converted.graph.nodes if str(node.target).startswith("_frozen_param")]
    assert [str(node.target) for node in stored] == [f"_frozen_param{number}" for number in range(6)]
    assert {getattr(converted, str(node.target)).dtype for node in stored} == {torch.int8}
    assert not [name for name, tensor in converted.named_parameters() if tensor.dim() > 1]


def test_metadata_survives(converted: fx.GraphModule) -> None:
    assert converted.meta["mine"] == 7
    convs = [node for node in converted.graph.nodes if node.target is aten.conv2d.default]
    for node in convs:
        assert {"nn_module_stack", "source_fn_stack", "from_node", "stack_trace"} <= set(node.meta)
    for node in nodes(converted, "quantize"):
        assert node.meta["from_node"]


def test_run_time_scales() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    made = convert_pt2e(prepare_pt2e(captured(model, torch.randn(2, 8)), own(is_dynamic=True)))
    targets = [str(node.target) for node in made.graph.nodes]
    assert targets.count("quantized_decomposed.choose_qparams.tensor") == 2
    assert targets.count("quantized_decomposed.quantize_per_tensor.tensor") == 2
    assert targets.count("quantized_decomposed.dequantize_per_tensor.tensor") == 2
    x = torch.randn(5, 8)
    with torch.no_grad():
        assert sqnr(model(x[:2]), made(x[:2])) > 30


def test_weights_stay_float_without_folding() -> None:
    prepared = calibrated(nn.Linear(4, 4), own(), torch.randn(3, 4))
    folded, unfolded = convert_pt2e(prepared), convert_pt2e(prepared, fold_quantize=False)
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(folded(x), unfolded(x))
    assert len(nodes(unfolded, "quantize")) == len(nodes(folded, "quantize")) + 1


def test_no_data_is_an_error() -> None:
    prepared = prepare_pt2e(captured(nn.Linear(2, 2), torch.randn(1, 2)), own())
    with pytest.raises(CalibrationError, match="seen no data") as caught:
        convert_pt2e(prepared)
    assert "linear" in str(caught.value)


class Doubling(MinMaxObserver):
    """An observer that writes what it becomes itself."""

    def convert(self, model: fx.GraphModule, observer_node: fx.Node) -> None:
        with model.graph.inserting_before(observer_node):
            made = model.graph.call_function(aten.mul.Tensor, (observer_node.args[0], 2.0))
        observer_node.replace_all_uses_with(made)
        model.graph.erase_node(observer_node)


class ByItself(Quantizer):
    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            spec = QuantizationSpec(torch.int8, Doubling, -128, 127, torch.per_tensor_affine)
            node.meta["quantization_annotation"] = QuantizationAnnotation({}, spec)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """It has nothing to say."""


def test_observers_with_a_convert_of_their_own() -> None:
    x, y = torch.rand(3), torch.rand(3)
    prepared = prepare_pt2e(captured(Sum(), x, y), ByItself())
    prepared(x, y)
    assert torch.equal(convert_pt2e(prepared)(x, y), 2 * (x + y))
