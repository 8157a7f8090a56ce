"""The PT2 export flow: what prepare and convert give, what they keep, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quantc.errors import AnnotationError, CalibrationError, QuantcError
from quantc.flows.pt2e import (
    QuantizationAnnotation,
    Quantizer,
    convert_pt2e,
    prepare_pt2e,
)
from quantc.flows.pt2e.quantizer import EdgeOrNode
from tests.support.custom_quantizer import ACT, CustomQuantizer, Network
from tests.support.oracles import sqnr
from tests.support.pt2e_small import RESIDUAL, calibrated, captured, nodes, own

aten = torch.ops.aten


# -- what others rely on ---------------------------------------------------------------------------------------


def test_observers_are_called_by_their_number() -> None:
    prepared = prepare_pt2e(captured(RESIDUAL.with_norms(), *RESIDUAL.batches(1, seed=1)[0]), own())
    calls = [node for node in prepared.graph.nodes if node.op == "call_module" and node.target != "_guards_fn"]
    assert sorted(str(node.target) for node in calls) == sorted(
        f"activation_post_process_{number}" for number in range(len(calls))
    )


# -- what is refused -------------------------------------------------------------------------------------------


def test_what_was_not_prepared_is_an_error() -> None:
    exported = captured(nn.Linear(2, 2), torch.randn(1, 2))
    with pytest.raises(CalibrationError, match="no observers"):
        convert_pt2e(exported)
    with pytest.raises(ValueError, match=r"torch\.export"):
        prepare_pt2e(nn.Linear(2, 2), own())  # type: ignore[arg-type]
    with pytest.raises(AnnotationError, match=r"lacks .*annotate"):
        prepare_pt2e(exported, "xnnpack")


def test_nothing_quantized_is_an_error() -> None:
    exported = captured(nn.Sequential(nn.Tanh()), torch.randn(1, 2))
    with pytest.raises(AnnotationError, match="annotated nothing"):
        prepare_pt2e(exported, own())
    assert prepare_pt2e(exported, own(), allow_empty=True)(torch.zeros(1, 2)).shape == (1, 2)


# -- quantizers of one's own -------------------------------------------------------------------------------------


def test_a_quantizer_in_the_shape_of_the_tutorials() -> None:
    torch.manual_seed(0)
    model, x = Network().eval(), torch.randn(2, 3, 8, 8)
    prepared = calibrated(model, CustomQuantizer(), x)
    made = convert_pt2e(prepared)
    with torch.no_grad():
        assert sqnr(model(x), made(x)) > 30
    by_op = {node.name: node for node in made.graph.nodes}
    pool, sigmoid, conv = by_op["max_pool2d"], by_op["sigmoid"], by_op["conv2d"]
    read, (written,) = pool.args[0], pool.users
    assert read.args[1:3] == written.args[1:3]
    (fixed,) = sigmoid.users
    assert fixed.args[1:6] == (1 / 256, 0, 0, 255, torch.uint8)
    x_read, w_read, b_read = (operand.args for operand in conv.all_input_nodes)
    scales = [getattr(made, str(args[1].target)) for args in (w_read, b_read)]
    assert b_read[-1] is torch.int32
    assert torch.allclose(scales[1], x_read[1] * scales[0])


def test_validate_is_asked() -> None:
    grouped = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
    with pytest.raises(QuantcError, match="has groups"):
        prepare_pt2e(captured(grouped, torch.randn(1, 4, 8, 8)), CustomQuantizer())


class Callback(CustomQuantizer):
    """Looks at every observer before it is placed, and rewrites the graph before it is annotated."""

    def __init__(self) -> None:
        self.seen: dict[EdgeOrNode, nn.Module] = {}
        self.transformed = False

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        self.transformed = True
        return model

    def prepare_obs_or_fq_callback(
        self, model: fx.GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, nn.Module]
    ) -> None:
        self.seen = dict(edge_or_node_to_obs_or_fq)


def test_the_hooks_of_a_quantizer_are_called() -> None:
    quantizer = Callback()
    prepared = prepare_pt2e(captured(Network().eval(), torch.randn(2, 3, 8, 8)), quantizer)
    assert quantizer.transformed
    placed = {id(part) for name, part in prepared.named_children() if name.startswith("activation_post_process_")}
    assert placed <= {id(part) for part in quantizer.seen.values()}
    assert len(quantizer.seen) == 19


class Linears(Quantizer):
    """What a linear layer reads, whatever makes it: in a loop the weight is an input."""

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.find_nodes(op="call_function", target=aten.linear.default):
            x, weight = node.all_input_nodes[:2]
            node.meta["quantization_annotation"] = QuantizationAnnotation({x: ACT, weight: ACT})
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """Anything goes."""


class Looping(nn.Module):
    """A linear layer in the body of a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        def go_on(step: Tensor, _: Tensor) -> Tensor:
            return step < 3

        def body(step: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return step + 1, torch.tanh(self.fc(state))

        return torch.while_loop(go_on, body, (torch.tensor(0), x))[1]  # type: ignore[no-untyped-call]


def test_bodies_of_loops_are_quantized() -> None:
    torch.manual_seed(0)
    model, x = Looping().eval(), torch.randn(2, 4)
    with torch.no_grad():
        prepared = prepare_pt2e(captured(model, x), Linears(), allow_empty=True)
        assert torch.allclose(prepared(x), model(x))
        made = convert_pt2e(prepared)
        assert sqnr(model(x), made(x)) > 25
    bodies = [part for part in made.modules() if isinstance(part, fx.GraphModule) and part is not made]
    assert any(nodes(body, "dequantize") for body in bodies)


def test_sizes_that_vary() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.randn(3, 4)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported: Any = torch.export.export(model, (x,), dynamic_shapes=({0: batch},)).module()
    prepared = prepare_pt2e(exported, own())
    with torch.no_grad():
        prepared(x)
        prepared(torch.randn(8, 4))
        made = convert_pt2e(prepared)
        again = convert_pt2e(prepared, use_reference_representation=True)
        assert made(torch.randn(5, 4)).shape == again(torch.randn(5, 4)).shape == (5, 2)
