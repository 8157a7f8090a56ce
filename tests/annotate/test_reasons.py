"""Why an op was left float: of all the reasons there are, the best."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import fx

import quantc as qc
from quantc.annotate.reasons import Reason, Reasons, Why
from quantc.ir.program import Program
from quantc.patterns import aten as patterns
from quantc.patterns.operand_patterns import const
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.capability import Capability
from quantc.spec.formats import Offer
from quantc.spec.spec import INT8_WEIGHT, INT8_WEIGHT_ONLY, UINT8, UINT8_DYNAMIC
from tests.support.hand_quantizers import ByHand, annotated
from tests.support.pattern_graphs import Build
from tests.support.small_backend import SMALL

aten = torch.ops.aten
NAMED = qc.Backend(
    "named",
    RuleTable(
        "named",
        (
            Rule("linear", patterns.linear("x", const("w")), {"x": "act", "w": "weight"}),
            Rule("matmul", patterns.matmul, {"x": "act", "y": "act"}, static=Offer.NAMED),
        ),
    ),
    {"act": UINT8, "weight": INT8_WEIGHT},
    takes=tuple(map(Capability.of, (UINT8, INT8_WEIGHT, UINT8_DYNAMIC))),
)


def linear(build: Build) -> fx.Node:
    return build("linear", build.input("x", 2, 4), build.const("w", 3, 4), None)


def reason(
    make: Callable[[Build], fx.Node], backend: object = SMALL, config: qc.QuantConfig | None = None
) -> tuple[Reason, fx.Node, Program]:
    build = Build()
    node = make(build)
    program = annotated(build.done(node), backend, config)
    return Reasons(program)(node), node, program


CASES: dict[str, tuple[Callable[[Build], fx.Node], qc.Backend, qc.QuantConfig | None, Why, str]] = {
    "config": (linear, SMALL, qc.QuantConfig().set_op("linear", qc.FLOAT), Why.CONFIG, "as the config says: op linear"),
    "config, of what would not be fed either": (
        lambda build: build("reshape", build.input("x", 2, 4), [8]),
        SMALL,
        qc.QuantConfig().set_all(INT8_WEIGHT_ONLY),
        Why.CONFIG,
        "only weights are quantized",
    ),
    "input is float": (
        lambda build: build("reshape", build.input("x", 2, 4), [8]),
        SMALL,
        None,
        Why.NOT_FED,
        "its input x is not quantized",
    ),
    "no canonical form": (
        lambda build: build.call(math.sqrt, build.input("x")),
        SMALL,
        None,
        Why.OPAQUE,
        "no canonical form",
    ),
    "integers": (
        lambda build: build.call(aten.argmax.default, build.input("x", 2, 4), 1),
        SMALL,
        None,
        Why.INTEGER,
        "it yields i64[2]",
    ),
    "no rule": (lambda build: build("tanh", build.input("x", 2, 4)), SMALL, None, Why.NO_RULE, "no rule for tanh"),
    "refused": (
        lambda build: build("linear", build.input("x", 2, 4), build.input("w", 3, 4), None),
        SMALL,
        None,
        Why.REFUSED,
        "linear of small: ",
    ),
    "not named": (
        lambda build: build("matmul", build.input("x", 2, 4), build.input("y", 4, 2)),
        NAMED,
        None,
        Why.NOT_NAMED,
        'config.set_op("matmul", spec) asks for it',
    ),
    "not dynamic": (
        linear,
        NAMED,
        qc.QuantConfig().set_all(UINT8_DYNAMIC),
        Why.NOT_DYNAMIC,
        "linear has no dynamic form on named",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_reason(name: str) -> None:
    make, backend, config, why, says = CASES[name]
    found, node, program = reason(make, backend, config)
    assert node not in program.plan.claims
    assert found.why is why
    assert says in found.text


def test_a_reason_by_a_rule_has_the_rule_at_hand() -> None:
    found, node, _ = reason(CASES["refused"][0])
    assert found.refusal is not None
    assert found.refusal.node is node
    assert found.trial is not None
    assert found.trial.backend is SMALL
    fed, node, _ = reason(CASES["input is float"][0])
    assert fed.follower is not None
    assert fed.follower.root is node


def test_what_the_quantizer_said_comes_before_what_its_rules_would_say() -> None:
    build = Build()
    node = build("tanh", build.input("x", 2, 4))
    program = annotated(build.done(node), SMALL)
    program.plan.left_float[node] = "it is too hot"
    assert Reasons(program)(node) == Reason(Why.SAID, "it is too hot")


def test_naming_an_op_helps_only_with_float32() -> None:
    def halves(build: Build) -> fx.Node:
        x = build("cast", build.input("x", 4, 4), torch.float16)
        return build("matmul", x, x)

    assert reason(halves, NAMED)[0].why is not Why.NOT_NAMED


def test_without_a_quantizer_nothing_is_known() -> None:
    build = Build()
    node = build("tanh", build.input("x", 2, 4))
    found = Reasons(build.done(node))(node)
    assert found.why is Why.NOT_RECORDED
    assert "not recorded" in found.text


def test_a_quantizer_without_a_table_is_asked_for_the_ops_it_knows() -> None:
    build = Build()
    x = build.input("x", 2, 4)
    tanh, neg = build("tanh", x), build("neg", x)
    program = annotated(build.done(tanh, neg), ByHand(takes="relu"))
    assert Reasons(program)(neg) == Reason(Why.NO_RULE, "by-hand has no rule for neg")
    again = annotated(build.done(tanh, neg), ByHand(takes="tanh"), qc.QuantConfig().set_op("tanh", qc.FLOAT))
    again.plan.config = None
    again.plan.left_float.drop(tanh)
    assert Reasons(again)(tanh) == Reason(Why.NOT_RECORDED, "by-hand knows tanh, and left this one out")


def test_the_setting_that_keeps_a_node_float() -> None:
    build = Build()
    node = linear(build)
    program = annotated(build.done(node), SMALL, qc.QuantConfig().set_op("linear", qc.FLOAT))
    setting = Reasons(program).setting(node)
    assert setting is not None
    assert "op linear" in str(setting.rule)
    program.plan.config = qc.QuantConfig().set_op("linear", UINT8)
    assert Reasons(program).setting(node) is None
