"""Behaviours of the PT2 export flow with several quantizers, with modes and in training, one test for each."""

from __future__ import annotations

import copy
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import observer as theirs

from quantc.errors import AnnotationError, CalibrationError, ConfigError, SpecError
from quantc.flows.pt2e import (
    ComposableQuantizer,
    EmbeddingQuantizer,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
    XNNPACKQuantizer,
    allow_exported_model_train_eval,
    convert_pt2e,
    get_symmetric_quantization_config,
    model_is_exported,
    move_exported_model_to_eval,
    move_exported_model_to_train,
    prepare_pt2e,
    prepare_qat_pt2e,
)
from quantc.nn import fake_quantize, observers
from tests.support.pt2e_quantizers import Annotating, Doing, converted, count, exported
from tests.support.pt2e_runs import DQ, DQ_CHANNEL, IMAGE, INT8, NOTHING, UINT8, Q, conv, xnnpack

aten = torch.ops.aten


# -- several quantizers --------------------------------------------------------------------------------------------


def test_a_quantizer_that_removes_annotations_is_refused() -> None:
    class Bad(Quantizer):
        def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
            for node in model.graph.nodes:
                node.meta["quantization_annotation"] = None
            return model

        def validate(self, model: fx.GraphModule) -> None:
            pass

    with pytest.raises(RuntimeError, match="Bad changed"):
        prepare_pt2e(exported(nn.Conv2d(3, 3, 3).eval(), IMAGE), ComposableQuantizer([xnnpack(), Bad()]))


class Swapping(Quantizer):
    """Puts one op in the place of another before anything is annotated."""

    def __init__(self, old: Any, new: Any) -> None:
        self.old, self.new = old, new

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        graph = fx.Graph()
        graph.output(graph.graph_copy(model.graph, {}))
        for node in graph.nodes:
            if node.target == self.old:
                node.target = self.new
        return fx.GraphModule(model, graph)

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        return model

    def validate(self, model: fx.GraphModule) -> None:
        pass


class AddThenSub(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x - x.abs()


def test_a_transformation_before_annotating_is_taken() -> None:
    module = exported(AddThenSub().eval(), IMAGE)
    swap = Swapping(aten.add.Tensor, aten.mul.Tensor)
    with pytest.raises(AnnotationError, match="annotated nothing"):
        prepare_pt2e(module, swap)
    both = ComposableQuantizer([swap, Swapping(aten.sub.Tensor, aten.div.Tensor)])
    for quantizer, wanted in ((swap, (1, 0)), (both, (1, 1))):
        prepared = prepare_pt2e(module, quantizer, allow_empty=True)
        assert (count(prepared, "mul.Tensor"), count(prepared, "div.Tensor")) == wanted
        assert count(prepared, "add.Tensor") == 0


@pytest.mark.parametrize("is_qat", [False, True])
def test_an_empty_model_is_converted(is_qat: bool) -> None:
    """`allow_empty` is a wish, so what comes of it can be converted; other models without observers cannot."""
    module = exported(AddThenSub().train(is_qat), IMAGE)
    prepared = (prepare_qat_pt2e if is_qat else prepare_pt2e)(module, conv(), allow_empty=True)
    made = convert_pt2e(copy.deepcopy(prepared))
    assert torch.equal(made(*IMAGE), module(*IMAGE))
    assert torch.equal(convert_pt2e(prepared, use_reference_representation=True)(*IMAGE), module(*IMAGE))
    for unprepared in (module, made):
        with pytest.raises(CalibrationError, match="no observers"):
            convert_pt2e(unprepared)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 12)
        self.conv, self.fc = nn.Conv1d(8, 16, 3), nn.Linear(10, 5)

    def forward(self, ids: Tensor) -> Any:
        return self.fc(self.conv(self.table(ids)))


def test_embeddings_dynamic_linears_and_static_convolutions() -> None:
    torch.manual_seed(0)
    model, ids = Words(), torch.randint(10, (2, 8))
    assert count(converted(nn.Sequential(nn.Embedding(10, 12)), (ids,), EmbeddingQuantizer()), DQ_CHANNEL) == 1
    dynamic = XNNPACKQuantizer().set_operator_type(
        aten.linear.default, get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    )
    made = converted(model, (ids,), ComposableQuantizer([EmbeddingQuantizer(), dynamic, xnnpack(is_per_channel=True)]))
    assert count(made, DQ_CHANNEL) == 3
    assert count(made, "choose_qparams.tensor") == 1
    assert (count(made, "quantize_per_tensor.tensor"), count(made, "dequantize_per_tensor.tensor")) == (1, 1)
    torch.testing.assert_close(made(ids), model(ids), atol=0.1, rtol=0)


# -- modes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_inplace", [False, True])
def test_dropout_is_switched(is_inplace: bool) -> None:
    module = exported(nn.Sequential(nn.Dropout(0.5, is_inplace)).train(), (torch.randn(3),))
    target = aten.dropout_.default if is_inplace else aten.dropout.default
    for move, wanted in ((move_exported_model_to_eval, False), (move_exported_model_to_train, True)):
        move(module)
        assert [node.args[2] for node in module.graph.find_nodes(op="call_function", target=target)] == [wanted]


def test_batch_norm_is_switched() -> None:
    module = exported(nn.Sequential(nn.BatchNorm2d(3)).train(), IMAGE)
    for move, wanted in ((move_exported_model_to_eval, False), (move_exported_model_to_train, True)):
        move(module)
        (norm,) = module.graph.find_nodes(op="call_function", target=aten.batch_norm.default)
        assert norm.args[5] is wanted


def test_train_and_eval_are_refused_until_they_are_allowed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Dropout(0.5)).train()
    prepared = prepare_qat_pt2e(exported(model, IMAGE), xnnpack(is_qat=True))
    prepared(*IMAGE)
    for module in (prepared, convert_pt2e(prepared)):
        for switch in (module.train, module.eval):
            with pytest.raises(NotImplementedError):
                switch()
    allow_exported_model_train_eval(prepared)
    for switch, wanted in ((prepared.eval, False), (prepared.train, True)):
        switch()
        assert all(node.args[2] is wanted for node in prepared.graph.nodes if node.target is aten.dropout.default)


def test_a_quantizer_without_a_config_stays_an_error() -> None:
    with pytest.raises(ConfigError, match="has no config"):
        prepare_qat_pt2e(exported(nn.Conv2d(3, 3, 1), IMAGE), XNNPACKQuantizer())


def test_switching_to_the_same_mode_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = exported(nn.Sequential(nn.BatchNorm2d(3)).train(), IMAGE)
    allow_exported_model_train_eval(module)
    module.train()
    calls: list[int] = []
    monkeypatch.setattr(module, "recompile", lambda: calls.append(1))
    module.train()
    assert calls == []
    module.eval()
    module.eval()
    assert calls == [1]


def test_exported_models_are_told_from_others() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1)).eval()
    assert model_is_exported(exported(model, IMAGE))
    assert not model_is_exported(fx.symbolic_trace(model))
    assert not model_is_exported(model)


# -- the rest ------------------------------------------------------------------------------------------------------


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block: nn.Module = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.block(x)).relu()


def test_a_part_is_quantized_before_the_whole() -> None:
    torch.manual_seed(0)
    model = Outer()
    part = prepare_qat_pt2e(exported(model.block, IMAGE), xnnpack(is_per_channel=True, is_qat=True))
    part(*IMAGE)
    model.block = convert_pt2e(part)
    quantizer = XNNPACKQuantizer().set_module_type(nn.Linear, get_symmetric_quantization_config())
    prepared = prepare_pt2e(exported(model, IMAGE), quantizer)
    with pytest.raises(CalibrationError, match="no data"):
        convert_pt2e(prepared)
    prepared(*IMAGE)
    made = convert_pt2e(prepared)
    assert (count(made, Q), count(made, DQ), count(made, DQ_CHANNEL)) == (4, 5, 1)


def test_grouped_convolutions_by_channel() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.ConvTranspose2d(4, 4, 3, groups=2)).eval()
    x = torch.randn(1, 4, 8, 8)
    made = converted(model, (x,), xnnpack(is_per_channel=True))
    torch.testing.assert_close(made(x), model(x), atol=0.1, rtol=0)


def test_dynamic_quantization_in_training() -> None:
    """The scale is that of each batch, while the model trains as afterwards."""
    torch.manual_seed(0)
    model, batches = nn.Linear(5, 5), [torch.randn(5, 5), 100 * torch.randn(5, 5), torch.randn(5, 5)]
    for is_qat in (False, True):
        dynamic = xnnpack(is_per_channel=True, is_dynamic=True, is_qat=is_qat)
        quantizer = ComposableQuantizer([EmbeddingQuantizer(), dynamic])
        prepared = prepare_qat_pt2e(exported(model, (batches[0],)), quantizer)
        trained = [prepared(batch) for batch in batches]
        made = convert_pt2e(prepared)
        assert count(made, "choose_qparams.tensor") == 1
        for batch, before in zip(batches, trained, strict=True):
            torch.testing.assert_close(made(batch), model(batch), atol=0.03 * float(batch.abs().max()), rtol=0)
            if is_qat:
                torch.testing.assert_close(made(batch), before, atol=1e-4 * float(batch.abs().max()), rtol=0)


@pytest.mark.parametrize("make", ["quantc", "torchao"])
def test_an_average_is_no_dynamic_scale(make: str) -> None:
    """What averages over batches gives other scales in training than the converted model finds: refused."""
    if make == "quantc":
        averaging: Any = fake_quantize.FakeQuantize.with_args(observer=observers.MovingAverageMinMaxObserver)
    else:
        from torchao.quantization.pt2e.fake_quantize import FakeQuantize

        averaging = FakeQuantize.with_args(observer=theirs.MovingAverageMinMaxObserver)
    spec = QuantizationSpec(torch.int8, averaging, -128, 127, torch.per_tensor_affine, is_dynamic=True)
    with pytest.raises((SpecError, NotImplementedError), match="ynamic"):
        prepare_qat_pt2e(exported(nn.Linear(4, 4), (torch.randn(2, 4),)), Annotating(aten.linear.default, (spec, INT8)))


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_norms_behind_convolutions_are_folded(dim: int, is_transposed: bool) -> None:
    kind: Any = getattr(nn, f"Conv{'Transpose' if is_transposed else ''}{dim}d")
    target: Any = getattr(aten, f"conv{'_transpose' if is_transposed else ''}{dim}d")
    target = target.input if is_transposed else target.default
    norm: Any = getattr(nn, f"BatchNorm{dim}d")
    torch.manual_seed(0)
    model: Any = nn.Sequential(kind(2, 3, 3, padding=1), norm(3), nn.ReLU()).eval()
    model[1].running_mean.normal_()
    x = torch.randn(1, 2, *[5] * dim)
    quantizer = ComposableQuantizer(
        [Annotating(target, (UINT8, INT8, NOTHING)), Annotating(aten.relu.default, (), UINT8)]
    )
    made = converted(model, (x,), quantizer)
    assert (count(made, Q), count(made, DQ), count(made, "batch_norm.default")) == (2, 3, 0)
    torch.testing.assert_close(made(x), model(x), atol=0.1, rtol=0)


def test_norms_behind_padding_by_name_are_folded() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding="same"), nn.BatchNorm2d(3), nn.ReLU()).eval()
    quantizer = ComposableQuantizer(
        [Annotating(aten.conv2d.padding, (UINT8, INT8)), Annotating(aten.relu.default, (), UINT8)]
    )
    made = converted(model, IMAGE, quantizer)
    assert (count(made, Q), count(made, DQ), count(made, "batch_norm.default")) == (2, 3, 0)


def test_an_observer_may_be_taken_out_by_hand() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3)

        def forward(self, x: Tensor) -> Any:
            y = self.conv(x)
            return y, y + 1

    prepared = prepare_pt2e(exported(Twice().eval(), IMAGE), xnnpack())
    prepared(*IMAGE)
    (output,) = prepared.graph.find_nodes(op="output")
    observer = output.args[0][0]
    assert observer.target.startswith("activation_post_process_")
    observer.replace_all_uses_with(observer.args[0])
    prepared.graph.erase_node(observer)
    prepared.recompile()
    assert len(convert_pt2e(prepared)(*IMAGE)) == 2


class Moving(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(x, 2, 2)
        return nn.functional.pixel_shuffle(x, 2).permute(0, 2, 3, 1)


def test_observers_are_changed_by_a_callback() -> None:
    targets = (aten.max_pool2d.default, aten.permute.default, aten.pixel_shuffle.default)

    class Fixing(Doing):
        def prepare_obs_or_fq_callback(self, model: fx.GraphModule, edge_or_node_to_obs_or_fq: Any) -> None:
            (output,) = model.graph.find_nodes(op="output")
            old = edge_or_node_to_obs_or_fq[output.args[0][0]]
            fixed = theirs.FixedQParamsObserver(0.125, 42, torch.uint8, torch.per_tensor_affine, 0, 255)
            for place, found in list(edge_or_node_to_obs_or_fq.items()):
                if found is old:
                    edge_or_node_to_obs_or_fq[place] = fixed

    def annotation(node: fx.Node) -> Any:
        if node.target not in targets:
            return None
        source: Any = node.args[0]
        return QuantizationAnnotation({source: UINT8}, SharedQuantizationSpec((source, node)))

    prepared = prepare_pt2e(exported(Moving().eval(), (torch.rand(1, 8, 8, 8),)), Fixing(annotation))
    made = convert_pt2e(prepared)
    steps = [node for node in made.graph.nodes if str(node.target).endswith((Q, DQ))]
    assert steps
    assert {node.args[1:3] for node in steps} == {(0.125, 42)}


def test_items_of_tuples_are_quantized() -> None:
    class Split(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b = x.chunk(2, 1)
            return a + b

    made = converted(Split(), (torch.randn(2, 4),), Annotating(aten.add.Tensor, (UINT8, UINT8), UINT8))
    assert (count(made, Q), count(made, DQ)) == (3, 3)
    assert sum(node.target is getitem for node in made.graph.nodes) == 2
