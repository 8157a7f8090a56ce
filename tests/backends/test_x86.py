"""x86: products read uint8 and yield float; what joins them computes on what is quantized already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import quantizer_of
from quantc.backends.x86 import X86
from quantc.errors import AnnotationError
from quantc.ir.decisions import Quantize
from quantc.spec.formats import Offer
from quantc.spec.spec import UINT8
from tests.support.backend_cases import captured, decided, image


def test_a_follower_that_computes_takes_what_comes_and_asks_for_nothing() -> None:
    def alone(self: Any, x: Tensor) -> Any:
        return self.b(F.avg_pool2d(self.a(x), 2))

    def beside(self: Any, x: Tensor) -> Any:
        pooled = F.max_pool2d(self.a(x), 2)
        return self.b(pooled), self.b(F.avg_pool2d(pooled, 2))

    convs = {"a": nn.Conv2d(4, 4, 1), "b": nn.Conv2d(4, 4, 1)}
    prepared = qc.prepare(captured(alone, image(), **convs), "x86")
    average = prepared.node("avg_pool2d")
    assert prepared.plan.left_float.get(average) == "average: its input conv2d is not quantized"
    prepared = qc.prepare(captured(beside, image(), **convs), "x86")
    claim = prepared.plan.claims.get(prepared.node("avg_pool2d"))
    assert claim is not None
    assert claim.rule == "average"


def test_a_follower_whose_input_is_float_stays_float() -> None:
    def run(self: Any, x: Tensor) -> Any:
        return self.a(torch.cat([self.a(x), x.exp()], 1)[:, :4])

    prepared = qc.prepare(captured(run, image(), a=nn.Conv2d(4, 4, 1)), "x86")
    assert prepared.plan.left_float.get(prepared.node("cat")) == "cat: its input exp is not quantized"


@pytest.mark.parametrize("activation", [F.silu, F.mish, F.softplus, F.hardsigmoid])
def test_linear_layers_take_the_activation_behind_them_whichever_it_is(activation: Any) -> None:
    def run(self: Any, x: Tensor) -> Any:
        return self.b(activation(self.a(x)))

    prepared = qc.prepare(captured(run, torch.randn(4, 8), a=nn.Linear(8, 8), b=nn.Linear(8, 8)), "x86")
    name = activation.__name__
    claims = [prepared.plan.claims.get(prepared.node(each)) for each in ("linear", name)]
    assert [(claim.rule, claim.root) for claim in claims if claim is not None] == [("linear", name)] * 2


def test_residual_sums_of_linears_norms_and_softmax_stay_float_on_x86() -> None:
    def run(self: Any, x: Tensor) -> Any:
        x = x + self.a(F.layer_norm(x, (8,)))
        return x + self.b(F.layer_norm(x, (8,))).softmax(-1)

    prepared = qc.prepare(captured(run, torch.randn(2, 8), a=nn.Linear(8, 8), b=nn.Linear(8, 8)), "x86")
    read = {site.node for site in prepared.plan.outcomes}
    assert read == {"linear", "linear_1"}


def test_a_convolution_that_is_broadcast_itself_has_no_sum_fused_into_it() -> None:
    def run(self: Any, x: Tensor) -> Any:
        return x + self.a(x.mean((2, 3), keepdim=True))

    program = captured(run, image(), a=nn.Conv2d(4, 4, 1))
    rules, sites = decided(program, "x86")
    assert rules == {"conv2d": "conv"}
    assert sites == {"conv2d:in0", "conv2d:in1"}, "what is added to it is not rounded"


def test_a_sum_that_broadcasts_is_not_fused_into_a_convolution() -> None:
    def run(self: Any, x: Tensor) -> Any:
        return self.a(x) + x.mean((2, 3), keepdim=True)

    prepared = qc.prepare(captured(run, image(), a=nn.Conv2d(4, 4, 1)), "x86")
    assert "conv-add" not in {claim.rule for claim in prepared.plan.claims.rows.values()}
    explained = str(quantizer_of("x86").explain(prepared, "add"))
    assert "mean is f32[batch,4,1,1], and the sum f32[batch,4,8,8]" in explained


def test_tied_weights_are_stored_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.table(ids), self.table.weight)

    prepared = qc.prepare(qc.capture(Tied().eval(), (torch.tensor([[1, 2]]),)), "x86")
    assert len([group for group in prepared.plan.groups if group.source.value == "constants"]) == 1


def test_roles_can_be_changed() -> None:
    other = X86.but(act=UINT8.but(observe="minmax"))
    assert other.outcome("act") == Quantize(UINT8.but(observe="minmax"))
    assert other.table is X86.table
    with pytest.raises(AnnotationError, match="no role 'activation'"):
        X86.but(activation=UINT8)


def test_a_sum_after_a_convolution_is_one_match_with_it() -> None:
    program = captured(
        lambda self, x: torch.relu(self.a(x) + self.b(x)), image(), a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 1)
    )
    rules, sites = decided(program, "x86")
    assert sorted(rules.values()) == ["conv", "conv-add", "conv-add", "conv-add"]
    assert {rules["add"], rules["relu"]} == {"conv-add"}
    assert not {site for site in sites if ":out" in site}, "the sum yields float"
    assert len([site for site in sites if site.startswith("add:in")]) == 1, "the other side is read in uint8"


@pytest.mark.parametrize(
    ("name", "act"),
    [("gelu", F.gelu), ("tanh", torch.tanh), ("elu", F.elu), ("leaky_relu", F.leaky_relu)],
)
def test_more_activations_belong_to_a_linear_than_to_a_convolution(name: str, act: Any) -> None:
    after_linear = captured(lambda self, x: act(self.a(x)), torch.randn(2, 8), a=nn.Linear(8, 8))
    assert decided(after_linear, "x86")[0] == {"linear": "linear", name: "linear"}
    after_conv = captured(lambda self, x: act(self.a(x)), image(), a=nn.Conv2d(4, 4, 1))
    assert decided(after_conv, "x86")[0] == {"conv2d": "conv"}


def test_products_of_two_activations_are_quantized_where_a_config_names_them() -> None:
    program = captured(lambda self, x: self.a(x) @ x, torch.randn(8, 8), a=nn.Linear(8, 8))
    assert decided(program, "x86")[0] == {"linear": "linear"}
    named = qc.prepare(program, "x86", config=qc.QuantConfig().set_op("matmul", UINT8))
    assert {claim.rule for claim in named.plan.claims.rows.values()} == {"linear", "matmul"}
    assert {rule.name for rule in X86.table if rule.static is Offer.NAMED} == {
        *("linear-computed", "matmul", "addmm", "baddbmm")
    }


def test_run_time_scales_leave_the_top_bit_free() -> None:
    """Sums of two products of 7 and 8 bits fit 16: 2 * 127 * 127 < 2**15 <= 2 * 255 * 127."""
    assert X86.modes["dynamic"].qmax == 127
    assert 2 * X86.modes["dynamic"].qmax * 127 < 2**15
    assert X86.why_not(X86.modes["dynamic"]) is None
