"""Static, dynamic, weight-only and float in one model: the config says which op gets which, and the numbers follow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import quantc as qc
from quantc.config.config import QuantConfig
from quantc.errors import AnnotationError
from quantc.inspect.coverage import Row
from quantc.ir.decisions import FLOAT
from quantc.ir.plan import Source
from quantc.ir.program import Program
from quantc.qdq.ops import is_choice, is_dequantize
from quantc.spec.formats import PerGroup
from quantc.spec.spec import FP16_WEIGHT, INT4_GROUP_SYMMETRIC, INT8_WEIGHT_ONLY, UINT8, QuantSpec
from tests.support import fake_quantized as fake
from tests.support.mixed_model import (
    BACKENDS,
    BYTES,
    OPS,
    PRODUCTS,
    SELECTORS,
    TECHNIQUES,
    ByHand,
    expected,
    net,
    timing_of,
    use_of,
)


def check(name: str, rules: list[tuple[int, str]]) -> None:
    model, x, captured = net()
    backend = BACKENDS[name]
    act = backend.outcome("act").spec
    config = QuantConfig()
    for selector, technique in rules:
        config = SELECTORS[selector][1](config, use_of(technique, act))
    chosen, unmet = expected(rules)
    if unmet:
        with pytest.raises(AnnotationError, match="nothing came of the config's rule"):
            qc.prepare(captured, backend, config=config, allow_empty=True)
        return
    prepared = qc.prepare(captured, backend, config=config, allow_empty=True)
    claims = {node.name: claim.timing for node, claim in prepared.plan.claims.rows.items()}
    for node in PRODUCTS:
        assert claims.get(node) == timing_of(node, chosen[node]), (node, chosen[node])
        if node not in claims:
            reason = row_of(prepared, node).reason
            assert any(word in reason for word in ("as the config says", "per-token", "names the op"))
    if any(group.source is Source.DATA for group in prepared.plan.groups):
        qc.calibrate(prepared, [x])
    assert torch.equal(qc.convert(prepared, reduce_range="no")(x), ByHand(name, chosen).run(model, x))


def row_of(program: Program, node: str) -> Row:
    row = program.coverage().row(node)
    assert row is not None
    return row


def some_rules(techniques: tuple[str, ...]) -> Any:
    rule = st.tuples(st.integers(0, len(SELECTORS) - 1), st.sampled_from(techniques))
    return st.lists(rule, min_size=1, max_size=5)


FEW = settings(max_examples=60)
MANY = settings(max_examples=250)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_rule_that_matches_says_what_becomes_of_an_op(backend: str) -> None:
    _law(backend, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_rule_that_matches_says_what_becomes_of_an_op_in_many_configs(backend: str) -> None:
    _law(backend, MANY)


def _law(backend: str, how: settings) -> None:
    techniques = TECHNIQUES[:4] if backend == "executorch" else TECHNIQUES

    @how
    @given(some_rules(techniques))
    def holds(rules: list[tuple[int, str]]) -> None:
        check(backend, rules)

    holds()


def test_the_law_can_fail() -> None:
    """The judge tells techniques apart: the same rule with another technique is not what the program computes."""
    model, x, captured = net()
    config = QuantConfig().set("head", UINT8.but(timing="dynamic"))
    result = qc.quantize(captured, None, [x], BACKENDS["x86"], config=config, reduce_range="no")
    right, _ = expected([(3, "dynamic")])
    assert torch.equal(result(x), ByHand("x86", right).run(model, x))
    for technique in ("float", "static", "token", "bytes", "groups", "fp16"):
        wrong, _ = expected([(3, technique)])
        assert not torch.equal(result(x), ByHand("x86", wrong).run(model, x))


# -- neighbours --------------------------------------------------------------------------------------------------

UINT8_NOW = UINT8.but(timing="dynamic")


def choices(program: Program) -> int:
    """How many times scales are found as the program runs."""
    return sum(is_choice(node) for node in program.nodes())


def calls(program: Program, name: str) -> list[Any]:
    return [node for node in program.nodes() if name in str(node.target)]


def test_a_dynamic_layer_after_a_static_one_reads_the_float_that_x86_yields() -> None:
    """Nothing is rounded twice: products of x86 yield float, and run-time scales are found of that."""
    _, x, captured = net()
    result = qc.quantize(captured, None, [x], BACKENDS["x86"], config=QuantConfig().set("head.0", UINT8_NOW))
    (choice,) = (node for node in result.program.nodes() if is_choice(node))
    assert choice.args[0] is result.program.node("flatten")
    assert result.program.node("flatten").args[0] is result.program.node("relu")
    assert row_of(result.prepared, "linear").technique == "dynamic"
    assert row_of(result.prepared, "conv2d").technique == "static"


@pytest.mark.parametrize("backend", ["qnnpack", "executorch"])
def test_a_dynamic_layer_among_static_ones_reads_what_their_kernels_yield(backend: str) -> None:
    """Kernels of these backends yield integers: their float results do not exist, so scales are found of what the
    integers stand for."""
    model, x, captured = net()
    act = BACKENDS[backend].outcome("act").spec
    config = QuantConfig().set("head.0", act.but(timing="dynamic"))
    result = qc.quantize(captured, None, [x], BACKENDS[backend], config=config)
    (choice,) = (node for node in result.program.nodes() if is_choice(node))
    source = choice.args[0]
    assert isinstance(source, fx.Node)
    assert is_dequantize(source)
    chosen = {**dict.fromkeys(OPS, "static"), "linear": "dynamic"}
    assert torch.equal(result(x), ByHand(backend, chosen).run(model, x))


class Heads(nn.Module):
    """Several layers that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 8) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x), self.k(x), self.v(x)


@pytest.mark.parametrize("spec", [UINT8_NOW, UINT8_NOW.but(granularity="per-token")], ids=["tensor", "token"])
def test_layers_that_read_one_tensor_share_its_scale(spec: QuantSpec) -> None:
    model, x = Heads().eval(), torch.randn(2, 5, 16)
    result = qc.quantize(model, (x,), config=QuantConfig().set_all(spec), reduce_range="no")
    assert choices(result.program) == 1
    assert len(calls(result.program, "quantized_decomposed.quantize_per_t")) == 1
    y = fake.as_it_comes(x) if spec is UINT8_NOW else fake.by_token(x)
    for found, layer in zip(result(x), (model.q, model.k, model.v), strict=True):
        assert torch.equal(found, F.linear(y, fake.weight_by_channel(layer.weight), layer.bias))


def test_a_tensor_that_is_read_in_every_way() -> None:
    """One input, read statically, dynamically, by token, and in float by a weight-only and a float layer."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d, self.e = (nn.Linear(16, 8) for _ in range(5))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.a(x), self.b(x), self.c(x), self.d(x), self.e(x)

    model, x, seen = Net().eval(), torch.randn(4, 16), torch.randn(8, 16)
    config = (
        QuantConfig()
        .set("b", UINT8_NOW)
        .set("c", UINT8_NOW.but(granularity="per-token"))
        .set("d", INT8_WEIGHT_ONLY.but(qmin=-127))
        .set("e", FLOAT)
    )
    result = qc.quantize(
        model, (x,), [(seen,)], BACKENDS["x86"], config=config, dynamic_shapes=({0: _any()},), reduce_range="no"
    )
    weights = [fake.weight_by_channel(layer.weight) for layer in (model.a, model.b, model.c, model.d)]
    inputs = [fake.known(x, seen), fake.as_it_comes(x), fake.by_token(x), x]
    by_hand = [F.linear(y, w, getattr(model, name).bias) for y, w, name in zip(inputs, weights, "abcd", strict=True)]
    for found, right in zip(result(x), [*by_hand, model.e(x)], strict=True):
        assert torch.equal(found, right)
    techniques = [row_of(result.prepared, name).technique for name in _names(result.prepared, "linear")]
    assert techniques == ["static", "dynamic", "dynamic", "weight-only", ""]


def _any() -> Any:
    return torch.export.Dim("batch", min=1, max=64)


def _names(program: Program, op: str) -> list[str]:
    return [node.name for node in program.nodes() if node.name.startswith(op)]


# -- edges -------------------------------------------------------------------------------------------------------


def test_an_edge_can_be_dynamic_and_the_op_then_yields_float() -> None:
    model, x, captured = net()
    for mode in ("static", "weight-only"):
        config = QuantConfig().set_edge("gelu", "linear_1", UINT8_NOW)
        batches = [x] if mode == "static" else None
        result = qc.quantize(captured, None, batches, BACKENDS["qnnpack"], config=config, mode=mode)
        others = "static" if mode == "static" else "bytes"
        chosen = {**dict.fromkeys(OPS, others), "linear_1": "dynamic"}
        assert torch.equal(result(x), ByHand("qnnpack", chosen).run(model, x))


# -- techniques that replace each other ---------------------------------------------------------------------------


def test_a_rule_for_activations_ends_float_and_weight_only() -> None:
    """`set_all(FLOAT)` and then one layer is how one says: only that layer. Its weight is quantized too."""
    _, _, captured = net()
    for before in (FLOAT, INT4_GROUP_SYMMETRIC.but(granularity=PerGroup(size=2)), FP16_WEIGHT):
        config = QuantConfig().set_all(before).set("out", UINT8_NOW)
        prepared = qc.prepare(captured, BACKENDS["x86"], config=config)
        weight = next(group for group in prepared.plan.groups if group.name == "linear_2:in1")
        assert str(weight.outcome) == "quantize as INT8_NARROW_WEIGHT"


def test_what_is_said_of_weights_alone_stays() -> None:
    _, _, captured = net()
    narrow = qc.INT8_WEIGHT.but(qmin=-64, qmax=63)
    config = QuantConfig().set("out", narrow).set("head", FLOAT, role="weight").set_all(UINT8_NOW)
    prepared = qc.prepare(captured, BACKENDS["x86"], config=config)
    outcomes = {str(site): str(outcome) for site, outcome in prepared.plan.outcomes.items()}
    assert outcomes["linear_2:in1"] == f"quantize as {narrow}"
    assert outcomes["linear:in1"].startswith("float")
    assert outcomes["linear:in0"] == "quantize as UINT8_DYNAMIC"


def test_a_rule_that_is_overridden_where_it_matters_is_no_error() -> None:
    _, _, captured = net()
    config = QuantConfig().set("head", UINT8_NOW).set(nn.Linear, BYTES)
    prepared = qc.prepare(captured, BACKENDS["x86"], config=config)
    assert prepared.coverage().techniques == {"static": 2, "dynamic": 0, "weight-only": 3}
    assert "gelu" not in {node.name for node in prepared.plan.claims.rows}


def test_nothing_of_the_model_changes() -> None:
    model, x, _ = net()
    before = copy.deepcopy(model.state_dict())
    qc.quantize(model, (x,), mode="dynamic", config=QuantConfig().set("out", BYTES))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())


def test_a_weight_only_layer_is_not_joined_to_a_sum_on_integers() -> None:
    """x86 has a rule for a convolution and the sum after it: only where both compute on integers."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Any:
            return torch.relu(self.conv(x) + x)

    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(2, 4, 6, 6)
    static = qc.prepare(qc.capture(model, (x,)), "x86")
    assert {claim.rule for claim in static.plan.claims.rows.values()} == {"conv-add"}
    result = qc.quantize(model, (x,), config=QuantConfig().set("conv", BYTES))
    assert row_of(result.prepared, "conv2d").technique == "weight-only"
    assert row_of(result.prepared, "add").technique == ""
    y = F.conv2d(x, fake.weight_by_channel(model.conv.weight), model.conv.bias, padding=1)
    assert torch.equal(result(x), torch.relu(y + x))
