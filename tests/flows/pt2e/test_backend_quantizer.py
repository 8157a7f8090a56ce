"""quantc's own quantizers in the PT2 export flow: they say what the backends' tables say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import quantc as qc
from quantc.errors import AnnotationError, ConfigError
from quantc.flows.observers import MinMaxObserver
from quantc.flows.pt2e import (
    ComposableQuantizer,
    EmbeddingQuantizer,
    QNNPackQuantizer,
    QuantizationAnnotation,
    QuantizationConfig,
    QuantizationSpec,
    X86Quantizer,
    XNNPACKQuantizer,
    convert_pt2e,
    get_symmetric_quantization_config,
    prepare_pt2e,
    to_program,
)
from quantc.flows.pt2e.backend_quantizer import BackendQuantizer
from quantc.flows.pt2e.x86_inductor_quantizer import get_default_x86_inductor_quantization_config
from tests.support.custom_quantizer import CustomQuantizer, Network
from tests.support.oracle_models import SUBJECTS, Subject
from tests.support.oracles import Batches, differences, placement, sqnr, whole_sqnr
from tests.support.pt2e_runs import quantized

SYMMETRIC = get_symmetric_quantization_config(is_per_channel=True)


def by_name(name: str) -> BackendQuantizer:
    """A quantizer with its default config."""
    if name == "x86":
        return X86Quantizer().set_global(get_default_x86_inductor_quantization_config())
    return (XNNPACKQuantizer() if name == "xnnpack" else QNNPackQuantizer()).set_global(SYMMETRIC)


SLOW = {"inverted", "attending", "smooth_convs", "joined", "moved", "pooled", "residual"}


@pytest.mark.parametrize("name", ["x86", "xnnpack", "qnnpack"])
@pytest.mark.parametrize(
    "subject",
    [pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.name in SLOW else []) for each in SUBJECTS],
)
def test_models_are_quantized_well(name: str, subject: Subject) -> None:
    model, batches = subject.with_norms(), subject.batches(3, seed=1)
    converted = quantized(model, by_name(name), batches)
    assert whole_sqnr(model, converted, batches) > 30


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_products_are_placed_as_executorch_has_them(subject: Subject) -> None:
    """Beside ExecuTorch's own XNNPACKQuantizer: every product reads the same bits, unless what precedes it differs."""
    from tests.flows.pt2e.test_pt2e_third_party import xnnpack

    batches = subject.batches(3, seed=1)
    ours = placement(quantized(subject.with_norms(), by_name("xnnpack"), batches))
    theirs = placement(quantized(subject.with_norms(), xnnpack(), batches))
    found = differences(ours, theirs)
    assert not [name for name in found if name.endswith("[1]") and name.startswith(("conv", "linear"))]
    assert all(
        read is not None for name, reads in ours.items() if name.startswith(("conv", "linear")) for read in reads
    )


# -- configs -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        return y.relu() + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.second(self.first(x)).mean((2, 3)))


def annotated(quantizer: Any) -> set[str]:
    """The ops that a quantizer wants quantized."""
    exported: Any = torch.export.export(Net().eval(), (torch.randn(1, 4, 8, 8),)).module()
    prepared = prepare_pt2e(exported, quantizer)
    annotations = {node.name: node.meta.get("quantization_annotation") for node in prepared.graph.nodes}
    return {name for name, found in annotations.items() if found is not None and found.input_qspec_map}


def test_everywhere() -> None:
    assert annotated(by_name("xnnpack")) >= {"conv2d", "add", "conv2d_1", "add_1", "linear"}


def test_by_module_name() -> None:
    assert annotated(XNNPACKQuantizer().set_module_name("first", SYMMETRIC)) == {"conv2d", "add"}
    assert annotated(by_name("xnnpack").set_module_name("second", None)) >= {"conv2d", "add", "linear"}
    assert "conv2d_1" not in annotated(by_name("xnnpack").set_module_name("second", None))


def test_by_module_type() -> None:
    assert annotated(XNNPACKQuantizer().set_module_type(nn.Linear, SYMMETRIC)) == {"linear"}
    assert annotated(XNNPACKQuantizer().set_module_type(Block, SYMMETRIC)) >= {"conv2d", "add", "conv2d_1", "add_1"}
    assert "linear" not in annotated(by_name("xnnpack").set_module_type(nn.Linear, None))


@pytest.mark.parametrize("operator", [torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.add])
def test_by_operator(operator: Any) -> None:
    assert annotated(XNNPACKQuantizer().set_operator_type(operator, SYMMETRIC)) == {"add", "add_1"}
    rest = annotated(by_name("xnnpack").set_operator_type(operator, None))
    assert {"conv2d", "conv2d_1", "linear"} <= rest
    assert not {"add", "add_1"} & rest


def test_names_go_before_types_and_types_before_operators() -> None:
    quantizer = by_name("xnnpack").set_operator_type(torch.ops.aten.conv2d, None)
    assert not {"conv2d", "conv2d_1"} & annotated(quantizer)
    quantizer.set_module_type(Block, SYMMETRIC)
    assert {"conv2d", "conv2d_1"} <= annotated(quantizer)
    quantizer.set_module_name("first", None)
    assert "conv2d_1" in annotated(quantizer)
    assert "conv2d" not in annotated(quantizer)


def test_what_matches_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="third"):
        annotated(by_name("xnnpack").set_module_name("third", None))
    with pytest.raises(ConfigError, match="no LSTM"):
        annotated(by_name("xnnpack").set_module_type(nn.LSTM, None))
    with pytest.raises(ConfigError, match="no operator"):
        XNNPACKQuantizer().set_operator_type("nonsense", None)
    with pytest.raises(ConfigError, match="has no config"):
        annotated(XNNPACKQuantizer())


def test_specs_that_the_backend_cannot_run_are_refused() -> None:
    act = QuantizationSpec(torch.int16, MinMaxObserver.with_args(eps=2**-12), -32768, 32767, torch.per_tensor_symmetric)
    config = QuantizationConfig(act, act, SYMMETRIC.weight, None)
    with pytest.raises(AnnotationError, match="int16"):
        annotated(XNNPACKQuantizer().set_global(config))


def test_validate_looks_at_the_graph() -> None:
    """Also at what somebody else has annotated."""
    exported: Any = torch.export.export(Net().eval(), (torch.randn(1, 4, 8, 8),)).module()
    quantizer = by_name("xnnpack")
    quantizer.annotate(exported)
    quantizer.validate(exported)
    node = next(node for node in exported.graph.nodes if node.target is torch.ops.aten.linear.default)
    spec = QuantizationSpec(torch.uint8, MinMaxObserver, 0, 255, torch.per_tensor_affine)
    node.meta["quantization_annotation"] = QuantizationAnnotation({node.args[0]: spec})
    with pytest.raises(AnnotationError, match="cannot run") as caught:
        quantizer.validate(exported)
    assert "linear" in str(caught.value.where)


@pytest.mark.parametrize("kind", [XNNPACKQuantizer, QNNPackQuantizer, X86Quantizer, EmbeddingQuantizer])
def test_supported_operators(kind: Any) -> None:
    rows = kind.get_supported_operators()
    assert rows
    assert all(isinstance(row.config, QuantizationConfig) and row.operators for row in rows)
    if kind is XNNPACKQuantizer:
        known = {target for row in rows for pattern in row.operators for target in pattern}
        assert {torch.ops.aten.conv2d.default, torch.ops.aten.linear.default, torch.ops.aten.add.Tensor} <= known
        assert torch.ops.aten.softmax.int not in known
        assert SYMMETRIC in kind.get_supported_quantization_configs()
        assert kind.get_supported_operator_for_quantization_config(SYMMETRIC) == rows[0].operators


# -- several at once ---------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.fc = nn.Linear(8, 4)

    def forward(self, words: Tensor) -> Any:
        return self.fc(self.table(words))


def test_quantizers_compose() -> None:
    torch.manual_seed(0)
    model, words = Words().eval(), torch.randint(20, (3, 5))
    composed = ComposableQuantizer([EmbeddingQuantizer(), by_name("xnnpack")])
    exported: Any = torch.export.export(model, (words,)).module()
    prepared = prepare_pt2e(exported, composed)
    with torch.no_grad():
        prepared(words)
        converted = convert_pt2e(prepared)
        assert sqnr(model(words), converted(words)) > 30
    dtypes = {tensor.dtype for name, tensor in converted.named_buffers() if name.startswith("_frozen_param")}
    assert dtypes == {torch.uint8, torch.int8}
    assert len(composed.get_supported_operators()) == 1 + len(XNNPACKQuantizer.get_supported_operators())


def test_composing_with_a_quantizer_of_another_package() -> None:
    from torchao.quantization.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer as Theirs

    torch.manual_seed(0)
    model, words = Words().eval(), torch.randint(20, (3, 5))
    batches: Batches = [(words,)]
    ours = quantized(model, ComposableQuantizer([EmbeddingQuantizer(), by_name("xnnpack")]), batches)
    theirs = quantized(model, ComposableQuantizer([Theirs(), by_name("xnnpack")]), batches)
    with torch.no_grad():
        assert torch.equal(ours(*batches[0]), theirs(*batches[0]))


class Overwriting(EmbeddingQuantizer):
    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.nodes:
            node.meta.pop("quantization_annotation", None)
        return super().annotate(model)


def test_who_changes_what_another_said_is_named() -> None:
    exported: Any = torch.export.export(Words().eval(), (torch.randint(20, (3, 5)),)).module()
    with pytest.raises(RuntimeError, match="Overwriting changed the annotation of embedding"):
        prepare_pt2e(exported, ComposableQuantizer([by_name("xnnpack"), Overwriting()]))


# -- back to the engine ------------------------------------------------------------------------------------------


def test_coverage_says_what_a_quantizer_did() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    converted = quantized(Network().eval(), CustomQuantizer(), [(x,)])
    coverage = to_program(converted).coverage()
    assert {row.op for row in coverage.rows} >= {"conv2d", "linear", "add", "max_pool2d", "sigmoid"}
    assert "100.0%" in str(coverage)


def test_a_converted_model_runs_on_quantcs_kernels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    batches: Batches = [(torch.randn(4, 16),) for _ in range(3)]
    converted = quantized(model, by_name("x86"), batches)
    program = to_program(converted)
    with torch.no_grad():
        assert torch.equal(program(*batches[0]), converted(*batches[0]))
        assert sqnr(converted(*batches[0]), qc.lower(program, "x86")(*batches[0])) > 35


def test_the_integer_form_agrees_with_the_float_one() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    x = torch.randn(2, 4, 8, 8)
    exported: Any = torch.export.export(model, (x,)).module()
    prepared = prepare_pt2e(exported, by_name("qnnpack"))
    with torch.no_grad():
        prepared(x)
        integer = convert_pt2e(prepared, use_reference_representation=True)
        assert sqnr(convert_pt2e(prepared)(x), integer(x)) > 30
    targets = {str(node.target) for node in integer.graph.nodes}
    assert not [target for target in targets if "quantized_decomposed" in target]
    assert "out_dtype" in targets
