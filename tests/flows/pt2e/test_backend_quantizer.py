"""quantc's own quantizers in the PT2 export flow: they say what the backends' tables say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import AnnotationError, ConfigError
from quantc.flows.observers import MinMaxObserver
from quantc.flows.pt2e import (
    EmbeddingQuantizer,
    QNNPackQuantizer,
    QuantizationAnnotation,
    QuantizationConfig,
    QuantizationSpec,
    X86Quantizer,
    XNNPACKQuantizer,
    prepare_pt2e,
)
from tests.support.oracle_models import SUBJECTS, Subject
from tests.support.oracles import differences, placement, whole_sqnr
from tests.support.pt2e_runs import quantized
from tests.support.pt2e_small import SYMMETRIC, Block, Net, by_name

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
