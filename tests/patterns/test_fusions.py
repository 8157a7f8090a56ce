"""The table of fusions: what it finds, with all its operands, and why it refuses the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from quantc.patterns import (
    RuleTable,
)
from quantc.patterns.fusions import FUSIONS
from tests.support.pattern_graphs import Build


def fused(build: Callable[[Build], fx.Node]) -> tuple[list[str], str]:
    """The fusions found in a small program, and why the others were not."""
    b = Build()
    program = b.done(build(b))
    matches = FUSIONS.match(program)
    return [match.rule.name for match in matches], "\n".join(str(refusal) for refusal in matches.refusals())


def norm(b: Build, x: fx.Node, channels: int, *, training: bool = False, stats: bool = True) -> fx.Node:
    mean, var = (b.const(name, channels) if stats else None for name in ("mean", "var"))
    gamma, beta = b.const("gamma", channels), b.const("beta", channels)
    return b("batch_norm", x, gamma, beta, mean, var, training, 0.1, 1e-5, False)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", ["conv", "conv_transpose"])
def test_conv_bn_is_found_with_all_its_operands(kind: str, dims: int) -> None:
    b = Build()
    x, w, bias = b.input("x", 2, 4, *[8] * dims), b.const("w", 4, 4, *[3] * dims), b.const("bias", 4)
    conv = b(f"{kind}{dims}d", x, w, bias)
    bn = norm(b, conv, 4)
    (match,) = FUSIONS.match(b.done(bn))
    assert match.rule.name == "conv-bn"
    assert match.nodes == (conv, bn)
    assert {name: node.name for name, node in match.bindings.items()} == {
        "conv": f"{kind}{dims}d",
        "x": "x",
        "w": "w",
        "b": "bias",
        "gamma": "gamma",
        "beta": "beta",
        "mean": "mean",
        "var": "var",
    }


def conv_of(b: Build, *, constant: bool = True) -> fx.Node:
    x = b.input("x", 2, 4, 8, 8)
    return b("conv2d", x, b.const("w", 4, 4, 1, 1) if constant else b.input("w", 4, 4, 1, 1))


def linear_of(b: Build, *lead: int) -> fx.Node:
    return b("linear", b.input("x", *lead, 4), b.const("w", 6, 4))


@pytest.mark.parametrize(
    ("build", "rules", "reason"),
    [
        (lambda b: norm(b, conv_of(b), 4), ["conv-bn"], ""),
        (lambda b: norm(b, linear_of(b, 2), 6), ["linear-bn"], ""),
        (lambda b: norm(b, conv_of(b), 4, training=True), [], "training = True, wanted training == False"),
        (lambda b: norm(b, conv_of(b), 4, stats=False, training=True), [], "training = True"),
        (lambda b: norm(b, conv_of(b, constant=False), 4), [], "expected a constant tensor for w, found w"),
        (lambda b: norm(b, linear_of(b, 2, 6), 6), [], "its channels lie on axis 2, not 1"),
        (lambda b: norm(b, b("relu", conv_of(b)), 4), [], "found relu"),
        (lambda b: b("mul", conv_of(b), 2), ["conv-mul"], ""),
        (lambda b: b("mul", b.const("c", 4, 1, 1), conv_of(b)), ["conv-mul"], ""),
        (lambda b: b("mul", conv_of(b), b.const("c", 1, 4, 1, 1)), ["conv-mul"], ""),
        (lambda b: b("mul", conv_of(b), b.const("c", 8)), [], "does not go by the 4 channels"),
        (lambda b: b("mul", conv_of(b), b.const("c", 1, 1, 1, 1, 1)), [], "has 5 axes"),
        (lambda b: b("mul", conv_of(b), b.const("c", 4, 1, 1, dtype=torch.float64)), [], "into torch.float64"),
        (lambda b: b("add", conv_of(b), 1.5), ["conv-add"], ""),
        (lambda b: b("add", conv_of(b), b.const("c", 4, 1, 1), alpha=2), [], "alpha = 2, wanted alpha == 1"),
        (lambda b: b("add", conv_of(b), b.input("y", 2, 4, 8, 8)), [], "expected a constant tensor for c"),
        (lambda b: b("sub", conv_of(b), b.const("c", 4, 1, 1)), ["conv-sub"], ""),
        (lambda b: b("sub", b.const("c", 4, 1, 1), conv_of(b)), [], "found c"),
        (lambda b: b("div", conv_of(b), 3), ["conv-div"], ""),
        (lambda b: b("add", linear_of(b, 2, 3), b.const("c", 6)), ["linear-add"], ""),
        (lambda b: b("mul", linear_of(b, 2, 3), b.const("c", 3, 1)), [], "does not go by the 6 channels"),
        (lambda b: b("div", linear_of(b, 2, 3), b.const("c")), ["linear-div"], ""),
    ],
)
def test_fusions_found_and_refused(build: Callable[[Build], fx.Node], rules: list[str], reason: str) -> None:
    names, refusals = fused(build)
    assert names == rules
    assert reason in refusals


def test_nothing_is_fused_into_a_producer_with_two_users() -> None:
    b = Build()
    conv = conv_of(b)
    program = b.done(norm(b, conv, 4), b("neg", conv))
    assert len(FUSIONS.match(program)) == 0
    assert "conv2d has 2 users; neg uses it too" in str(FUSIONS.explain(program, "batch_norm"))


def test_batch_norm_without_statistics_is_refused() -> None:
    b = Build()
    conv = conv_of(b)
    bn = b.graph.create_node(
        "call_function", torch.ops.aten.batch_norm.default, (conv, None, None, None, None, False, 0.1, 1e-5, False)
    )
    told = FUSIONS.explain(b.done(bn), bn)
    assert told.tried[0].reason == "expected a constant tensor for mean, found nothing"


def test_unknown_shapes_are_refused_where_they_matter() -> None:
    b = Build()
    x, w = b.input("x"), b.const("w", 4, 4, 1, 1)
    conv = b("conv2d", x, w)
    scaled = b("mul", b("conv2d", norm(b, conv, 4), w), b.const("c", 4, 1, 1))
    program = b.done(scaled)
    assert [match.rule.name for match in FUSIONS.match(program)] == ["conv-mul"]
    assert "the shape of conv2d is unknown" in str(FUSIONS.explain(program, "batch_norm"))


def test_the_fusion_table_survives_json() -> None:
    assert RuleTable.from_json(FUSIONS.to_json()) == FUSIONS
