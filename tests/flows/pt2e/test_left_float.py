"""Nothing stays float without a reason in the PT2 export flow, and what cannot be quantized is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import CalibrationError, DataError
from quantc.flows.pt2e import (
    ComposableQuantizer,
    EmbeddingQuantizer,
    X86InductorQuantizer,
    XNNPACKQuantizer,
    convert_pt2e,
    get_symmetric_quantization_config,
    prepare_pt2e,
    prepare_qat_pt2e,
)
from quantc.flows.pt2e.x86_inductor_quantizer import get_default_x86_inductor_quantization_config
from tests.support.oracle_models import SUBJECTS, Subject

SYMMETRIC = get_symmetric_quantization_config(is_per_channel=True)
DEQUANTIZE = "dequantize_per"


def xnnpack() -> XNNPACKQuantizer:
    return XNNPACKQuantizer().set_global(SYMMETRIC)


def converted(model: nn.Module, inputs: tuple[Tensor, ...], quantizer: Any) -> Any:
    exported: Any = torch.export.export(model.eval(), inputs).module()
    prepared = prepare_pt2e(exported, quantizer)
    prepared(*inputs)
    return convert_pt2e(prepared)


def quantized_linears(graph: Any) -> list[bool]:
    """For each linear of a graph, whether it reads what was quantized."""
    linears = [node for node in graph.nodes if node.target is torch.ops.aten.linear.default]
    return [all(DEQUANTIZE in str(operand.target) for operand in node.args[:2]) for node in linears]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.gru(x)[0])


def test_a_gru_beside_a_linear_is_listed() -> None:
    quantizer = xnnpack()
    model = converted(Recurrent(), (torch.randn(2, 5, 8),), quantizer)
    assert quantized_linears(model.graph) == [True]
    assert "no static form" in quantizer.left_float["gru"]
    assert "linear" not in quantizer.left_float


def test_a_gru_is_quantized_where_the_backend_can() -> None:
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    model = converted(Recurrent(), (torch.randn(2, 5, 8),), quantizer)
    (gru,) = model.graph.find_nodes(op="call_function", target=torch.ops.aten.gru.input)
    assert all(DEQUANTIZE in str(weight.target) for weight in gru.args[2][:2])
    assert "gru" not in quantizer.left_float


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            y = self.a(x) + self.shift
            with torch.enable_grad():
                z = self.a(y).relu()
        return self.b(z)


def test_a_region_under_no_grad_is_quantized() -> None:
    torch.manual_seed(0)
    quantizer, x = xnnpack(), torch.randn(2, 8)
    model = Frozen()
    made = converted(model, (x,), quantizer)
    assert quantized_linears(made.graph) == [True, True, True]
    assert not [name for name in quantizer.left_float if "linear" in name or "/" in name]
    torch.testing.assert_close(made(x), model(x), atol=0.05, rtol=0)


def test_a_region_under_no_grad_keeps_its_gradients_while_training() -> None:
    """In training the region matters, so it stays, float and listed."""
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True, is_qat=True))
    exported: Any = torch.export.export(Frozen().train(), (torch.randn(2, 8),)).module()
    prepared = prepare_qat_pt2e(exported, quantizer)
    prepared(torch.randn(2, 8)).sum().backward()
    gradients = {name: parameter.grad is not None for name, parameter in prepared.named_parameters()}
    assert gradients["b.weight"]
    assert [name for name in quantizer.left_float if "linear" in name]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fc = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        y = torch.cond(x.sum() > 0, self.a, lambda t: self.b(t).relu(), (x,))
        return self.fc(y)


def test_branches_of_cond_are_listed() -> None:
    quantizer = xnnpack()
    model = converted(Branching(), (torch.randn(2, 8),), quantizer)
    assert quantized_linears(model.graph) == [True]
    assert {"true_graph_0/linear", "false_graph_0/linear", "false_graph_0/relu"} <= set(quantizer.left_float)
    assert "linear" not in quantizer.left_float


class Looping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        from torch._higher_order_ops.scan import scan

        def step(carry: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
            y = self.fc(carry) + item
            return y, y.clone()

        carried, _ = scan(step, x[0], x)
        return self.last(carried)


def test_bodies_of_loops_are_listed_beside_the_graph_around_them() -> None:
    quantizer = xnnpack()
    model = converted(Looping(), (torch.randn(3, 2, 4),), quantizer)
    assert quantized_linears(model.graph) == [True]
    inside = [name for name in quantizer.left_float if name.endswith("/linear")]
    assert len(inside) == 1, quantizer.left_float


def test_every_float_op_is_annotated_or_has_a_reason() -> None:
    """Over models with a bit of everything: what reads no quantized tensor is in `left_float`."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
            self.words = nn.Embedding(10, 8)

        def forward(self, x: Tensor, ids: Tensor) -> Any:
            y = torch.fft.rfft(self.fc(x)).abs()
            z = self.norm(x + self.words(ids)).cumsum(-1)
            return y, torch.sinc(self.fc(z)).sort().values

    quantizer = xnnpack()
    model = converted(Mixed(), (torch.randn(2, 8), torch.randint(10, (2,))), quantizer)
    assert unexplained(model, quantizer) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["xnnpack", "x86"])
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_every_float_op_of_the_zoo_has_a_reason(subject: Subject, kind: str) -> None:
    quantizer: Any = xnnpack()
    if kind == "x86":
        quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    (batch,) = subject.batches(1, seed=1)
    assert unexplained(converted(subject.with_norms(), tuple(batch), quantizer), quantizer) == []


NO_OPS = {
    "aten.dropout.default",
    "aten.contiguous.default",
    "aten.clone.default",
    "aten.alias.default",
    "aten.to.dtype",
}


def unexplained(model: Any, quantizer: Any) -> list[str]:
    """The ops that neither read what was dequantized nor follow an op that does, and are not in `left_float`."""
    inside: set[Any] = set()
    found = []
    for node in model.graph.nodes:
        if node.op != "call_function" or not str(node.target).startswith("aten."):
            continue
        reads = [operand for operand in node.all_input_nodes if DEQUANTIZE in str(operand.target) or operand in inside]
        is_quantized = bool(reads) and node.name not in quantizer.left_float
        if is_quantized:
            inside.add(node)
        value = node.meta.get("val")
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        if is_float and not is_quantized and node.name not in quantizer.left_float and str(node.target) not in NO_OPS:
            found.append(node.format_node())
    return found


def test_what_another_quantizer_took_is_not_listed() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc = nn.Embedding(20, 8), nn.Linear(8, 4)

        def forward(self, words: Tensor) -> Any:
            return self.fc(self.table(words)).erf()

    quantizer = xnnpack()
    converted(Words(), (torch.randint(20, (3, 5)),), ComposableQuantizer([EmbeddingQuantizer(), quantizer]))
    assert set(quantizer.left_float) == {"erf"}


def test_the_next_model_starts_afresh() -> None:
    quantizer = xnnpack()
    converted(Recurrent(), (torch.randn(2, 5, 8),), quantizer)
    converted(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4),), quantizer)
    assert quantizer.left_float == {}


def observed(prepared: Any, x: Tensor) -> Any:
    prepared(x)
    return prepared


# -- numbers that are none -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_qat", [False, True])
def test_nan_names_its_node(is_qat: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).train(is_qat)
    x = torch.randn(2, 8)
    exported: Any = torch.export.export(model, (x,)).module()
    config = get_symmetric_quantization_config(is_per_channel=True, is_qat=is_qat)
    prepared = (prepare_qat_pt2e if is_qat else prepare_pt2e)(exported, XNNPACKQuantizer().set_global(config))
    run = (lambda x: convert_pt2e(observed(prepared, x))) if is_qat else prepared  # an average is asked at the end
    with pytest.raises(DataError, match="NaN") as caught:
        run(x.fill_(torch.nan))
    assert str(caught.value.where).startswith(str(prepared.graph.find_nodes(op="placeholder")[0].name))


def test_a_weight_that_is_nan_is_named() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    model[1].weight.data[0, 0] = torch.nan
    x = torch.randn(2, 8)
    exported: Any = torch.export.export(model, (x,)).module()
    prepared = prepare_pt2e(exported, xnnpack())
    with pytest.raises(DataError, match="NaN or infinity") as caught:
        prepared(x)
    assert "1" in str(caught.value.where)
    assert "weight" in str(caught.value.where)


def test_nan_before_an_observer_of_others_is_named_when_it_is_converted() -> None:
    from torchao.quantization.pt2e.observer import MinMaxObserver

    from quantc.flows.pt2e import QuantizationSpec
    from tests.support.pt2e_quantizers import Annotating

    spec = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)
    x = torch.randn(2, 8)
    exported: Any = torch.export.export(nn.Linear(8, 8).eval(), (x,)).module()
    prepared = prepare_pt2e(exported, Annotating(torch.ops.aten.linear.default, (spec, spec), spec))
    with pytest.raises(CalibrationError, match="no data"):
        convert_pt2e(prepared)
    prepared(x.fill_(torch.nan))
    with pytest.raises(DataError, match="NaN") as caught:
        convert_pt2e(prepared)
    assert "read by linear" in str(caught.value.where)
