"""Quantizers written by hand, several of them at once, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

import quantc as qc
from quantc.annotate.annotator import Annotator
from quantc.annotate.quantizer import quantizer_of
from quantc.errors import AnnotationError
from quantc.flows.pt2e import XNNPACKQuantizer
from quantc.ir.decisions import SameAs, TensorOutcome
from quantc.ir.dialect import is_op
from quantc.ir.site_index import operand_nodes
from quantc.patterns import aten
from quantc.patterns.table import Rule
from quantc.qdq.ops import is_dequantize, is_quantize
from tests.support.hand_quantizers import LINEAR, TANH, ByHand, claimed, table, two_linears

# -- by hand -----------------------------------------------------------------------------------------------------


def test_a_quantizer_written_by_hand_quantizes_what_it_decides_and_no_more() -> None:
    model, program, batches = two_linears()
    prepared = qc.prepare(program, ByHand())
    qc.calibrate(prepared, batches)
    quantized = qc.convert(prepared)
    linears = [node for node in quantized.graph.nodes if is_op(node, "linear")]
    assert len(linears) == 2
    for node in linears:
        x, w, *_ = operand_nodes(node)
        assert is_dequantize(x)
        assert is_dequantize(w)
    tanh = next(node for node in quantized.graph.nodes if is_op(node, "tanh"))
    assert operand_nodes(tanh) == (linears[0],)
    # the oracle: torch's own observers and fake quantization around the same two products
    expected = _fake_quantized(model, batches)
    torch.testing.assert_close(quantized(batches[0]), expected, rtol=1e-5, atol=1e-5)


def _fake_quantized(model: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver

    layers = [module for module in model if isinstance(module, nn.Linear)]  # type: ignore[attr-defined]
    with torch.no_grad():
        seen = [torch.cat(batches), torch.cat([model[1](model[0](batch)) for batch in batches])]  # type: ignore[index]
        x = batches[0]
        for number, (layer, values) in enumerate(zip(layers, seen, strict=True)):
            act = MinMaxObserver(dtype=torch.qint8, eps=2**-12)
            act(values)
            scale, zero_point = act.calculate_qparams()
            weight = PerChannelMinMaxObserver(dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
            weight(layer.weight)
            scales, zero_points = weight.calculate_qparams()
            xq = torch.fake_quantize_per_tensor_affine(x, scale.item(), int(zero_point.item()), -128, 127)
            wq = torch.fake_quantize_per_channel_affine(layer.weight, scales, zero_points.int(), 0, -128, 127)
            x = nn.functional.linear(xq, wq, layer.bias)
            x = torch.tanh(x) if number == 0 else x
    return x


def test_passes_it_asks_for_run_before_it_annotates() -> None:
    from quantc.passes.eliminate_dead import EliminateDead

    _, program, _ = two_linears()
    once = EliminateDead()
    both = qc.Quantizers((ByHand(steps=(once,)), ByHand(name="other", takes="tanh", steps=(once,))))
    assert both.transforms() == (once,)
    prepared = qc.prepare(program, both)
    assert [entry.name for entry in prepared.log].count("eliminate-dead") == 2  # one is of the tidying up


# -- several at once ---------------------------------------------------------------------------------------------


def test_the_first_of_several_has_the_first_choice() -> None:
    _, program, _ = two_linears()
    backend = table("table", LINEAR, TANH)
    hand = ByHand(takes="tanh")
    assert set(claimed(qc.prepare(program, [hand, backend])).values()) == {"by-hand/first", "table/linear"}
    assert set(claimed(qc.prepare(program, [backend, hand])).values()) == {"table/tanh", "table/linear"}


def test_what_is_composed_gives_what_its_parts_give_alone() -> None:
    """Two tables with nothing in common decide together what they decide one by one."""
    _, program, _ = two_linears()
    left, right = table("left", LINEAR), table("right", TANH)
    together = qc.prepare(program, [left, right]).plan.outcomes
    assert together == {**qc.prepare(program, left).plan.outcomes, **qc.prepare(program, right).plan.outcomes}


def test_each_is_asked_about_its_own_decisions_alone() -> None:
    _, program, _ = two_linears()
    # each takes its own spec and not the other's: fine as long as nobody judges the other
    signed, unsigned = table("signed", LINEAR, act=qc.INT8), table("unsigned", TANH)
    prepared = qc.prepare(program, [signed, unsigned])
    assert set(claimed(prepared).values()) == {"signed/linear", "unsigned/tanh"}
    with pytest.raises(AnnotationError, match="not mine") as caught:
        qc.prepare(program, [signed, ByHand(takes="tanh", refuses="not mine")])
    assert "tanh:in0" in str(caught.value.where)
    assert "linear" not in str(caught.value.where)


def test_a_member_whose_spec_cannot_be_run_is_named() -> None:
    _, program, _ = two_linears()
    narrow = replace(table("narrow", TANH), takes=table("other", TANH, act=qc.INT8).capabilities)
    with pytest.raises(AnnotationError, match="backend 'narrow' cannot run UINT8: dtype must be int8") as caught:
        qc.prepare(program, [table("left", LINEAR), narrow])
    assert "tanh" in str(caught.value.where)
    assert caught.value.advice


def test_composition_flattens_and_names_itself() -> None:
    inner = qc.Quantizers((ByHand(name="a"), ByHand(name="b")))
    outer = quantizer_of([inner, ByHand(name="c", takes="tanh")])
    assert outer.name == "a+b+c"
    assert isinstance(outer, qc.Quantizers)
    assert [member.name for member in outer.members] == ["a", "b", "c"]
    assert outer.supported_operators() == ("linear", "tanh")
    _, program, _ = two_linears()
    with pytest.raises(AnnotationError, match="refused by b"):  # members of members are asked too
        qc.prepare(
            program, [qc.Quantizers((ByHand(name="a", takes="tanh"), ByHand(name="b", refuses="refused by b"))), "x86"]
        )


def test_explaining_goes_to_the_member_that_took_the_node() -> None:
    _, program, _ = two_linears()
    both = quantizer_of([table("left", LINEAR), table("right", TANH)])
    prepared = qc.prepare(program, both)
    assert both.explain(prepared, "tanh").matched == "tanh"
    assert both.explain(prepared, "tanh").table == "right"
    assert both.explain(prepared, "linear").table == "left"


def test_the_program_that_was_captured_stays_as_it_was() -> None:
    _, program, batches = two_linears()
    before = program.dump()
    prepared = qc.prepare(program, [ByHand(), table("right", TANH)])
    qc.calibrate(prepared, batches)
    qc.convert(prepared)
    assert program.dump() == before
    assert program.plan.is_empty


# -- refusals ----------------------------------------------------------------------------------------------------


class Annotates:
    """A quantizer in the manner of torchao's and ExecuTorch's."""

    def transform_for_annotation(self, model: Any) -> Any:
        return model

    def annotate(self, model: Any) -> Any:
        return model

    def validate(self, model: Any) -> None: ...


@pytest.mark.parametrize("given", [Annotates(), XNNPACKQuantizer()], ids=lambda given: type(given).__name__)
def test_a_quantizer_of_exported_graphs_is_shown_the_way_to_its_flow(given: Any) -> None:
    _, program, _ = two_linears()
    for backend in (given, [given, "x86"]):
        with pytest.raises(AnnotationError, match=f"{type(given).__name__} annotates exported graphs") as caught:
            qc.prepare(program, backend)
        assert "prepare_pt2e(torch.export.export(" in str(caught.value.advice)


class Lacking:
    name = "lacking"

    def annotate(self, annotator: Annotator) -> None: ...


def test_something_that_lacks_members_is_refused_by_their_names() -> None:
    _, program, _ = two_linears()
    given: Any = Lacking()
    with pytest.raises(qc.QuantcError) as caught:
        qc.prepare(program, given)
    told = str(caught.value)
    assert "is not a quantizer" in told
    for member in ("transforms", "validate", "supported_operators", "explain"):
        assert member in told
    assert "annotate," not in told.split("it lacks")[1].splitlines()[0]


def test_no_quantizers_at_all_are_refused() -> None:
    _, program, _ = two_linears()
    with pytest.raises(qc.QuantcError, match="no quantizers to compose"):
        qc.prepare(program, [])


def test_two_of_one_name_are_refused() -> None:
    _, program, _ = two_linears()
    with pytest.raises(qc.QuantcError, match="more than one of the quantizers is named 'x86'"):
        qc.prepare(program, ["x86", "x86"])


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        pytest.param(SameAs, "in a circle", id="circle"),
        pytest.param(lambda site: SameAs(replace(site, node="nowhere")), "nowhere", id="nowhere"),
    ],
)
def test_what_is_like_itself_or_like_nothing_is_refused(outcome: Callable[[Any], TensorOutcome], says: str) -> None:
    _, program, _ = two_linears()

    def tie(annotator: Annotator, node: fx.Node) -> None:
        annotator.output(node, outcome(annotator.places.out(node)))

    with pytest.raises(qc.QuantcError, match=says):
        qc.prepare(program, ByHand(then=tie))


def test_a_refused_annotation_leaves_nothing_behind() -> None:
    _, program, _ = two_linears()
    with pytest.raises(AnnotationError):
        qc.prepare(program, [ByHand(takes="tanh"), ByHand(name="other", refuses="no")])
    assert program.plan.is_empty
    assert qc.prepare(program, ByHand()).plan.claims


def test_nothing_quantized_is_an_error_that_says_what_is_known() -> None:
    _, program, _ = two_linears()
    with pytest.raises(AnnotationError, match="nothing was quantized") as caught:
        qc.prepare(program, [table("cats", Rule("cat", aten.cat, {"xs": "act", "out": "like xs"}))])
    assert "cats" in str(caught.value)
    prepared = qc.prepare(program, ByHand(takes="cat"), allow_empty=True)
    assert not any(is_quantize(node) for node in prepared.graph.nodes)
