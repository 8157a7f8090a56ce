"""Configs on captured programs: what each selector selects, which rule wins, and rules that match nothing."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.config.config import QuantConfig
from quantc.config.config_rule import ConfigRule, Use
from quantc.config.resolve import Resolution, resolve
from quantc.config.selectors import ByAll, ByNode, ByOp, ByType
from quantc.errors import ConfigError
from quantc.ir.decisions import FLOAT, Fixed, Quantize
from quantc.ir.program import Program
from quantc.spec.formats import Role
from quantc.spec.spec import INT4_GROUP, INT8, INT8_DYNAMIC, INT8_WEIGHT, UINT8
from tests.support.growth import calls, exponent


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x) + x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Block(), Block())
        self.layer2 = nn.Sequential(Block())
        self.head = nn.Linear(3 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer2(self.layer1(x)).flatten(1))
        return y


@pytest.fixture(scope="module")
def program() -> Program:
    return qc.capture(Net().eval(), (torch.randn(2, 3, 4, 4),), method="fx")


def chosen(program: Program, resolution: Resolution, role: Role = Role.ACT) -> dict[str, Use]:
    """What is said for each node that something is said for."""
    found = {node.name: resolution.setting(node, role) for node in program.nodes()}
    return {name: setting.use for name, setting in found.items() if setting is not None}


LAYER1 = {"conv2d", "add", "relu", "conv2d_1", "add_1", "relu_1"}


ALL = LAYER1 | {"conv2d_2", "add_2", "relu_2", "flatten", "linear"}


CONVS = {"conv2d", "conv2d_1", "conv2d_2"}


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("layer1", LAYER1),
        ("layer1.*", LAYER1),
        ("layer1.0", {"conv2d", "add", "relu"}),
        ("layer1.0.conv", {"conv2d"}),
        ("*.conv", CONVS),
        ("layer?.0", {"conv2d", "add", "relu", "conv2d_2", "add_2", "relu_2"}),
        ("*", ALL),
        (re.compile(r"layer\d\.0"), {"conv2d", "add", "relu", "conv2d_2", "add_2", "relu_2"}),
        (re.compile(r".*conv"), CONVS),
        (nn.Linear, {"linear"}),
        (nn.Conv2d, CONVS),
        (Block, ALL - {"flatten", "linear"}),
        (Net, ALL),
        (ByType(name="Conv2d"), CONVS),
        (ByOp(op="add"), {"add", "add_1", "add_2"}),
        (ByNode(node="add_1"), {"add_1"}),
        (ByAll(), ALL),
    ],
    ids=lambda value: ",".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_each_selector_selects_what_it_says(program: Program, key: Any, names: set[str]) -> None:
    assert chosen(program, QuantConfig().set(key, FLOAT).resolve(program)) == dict.fromkeys(names, FLOAT)


def test_both_captures_are_selected_alike() -> None:
    config = QuantConfig().set("layer1.*", FLOAT).set(nn.Linear, INT8_DYNAMIC).set_op("add", UINT8)
    model, x = Net().eval(), torch.randn(2, 3, 4, 4)
    by_fx, by_export = (qc.capture(model, (x,), method=method) for method in ("fx", "export"))
    assert list(chosen(by_fx, config.resolve(by_fx)).values()) == list(
        chosen(by_export, config.resolve(by_export)).values()
    )


def test_the_last_match_wins(program: Program) -> None:
    config = QuantConfig().set_all(UINT8).set("layer1", FLOAT).set_op("add", INT8).set_node("add_1", UINT8)
    found = chosen(program, config.resolve(program))
    assert found["conv2d"] == FLOAT
    assert found["add"] == Quantize(INT8)
    assert found["add_1"] == found["linear"] == Quantize(UINT8)
    turned = QuantConfig(rules=tuple(reversed(config.rules)))
    assert set(chosen(program, turned.resolve(program)).values()) == {Quantize(UINT8)}


def test_roles_are_kept_apart(program: Program) -> None:
    resolution = QuantConfig().set_all(INT8_WEIGHT).set("layer2", FLOAT, role="weight").resolve(program)
    assert chosen(program, resolution, Role.ACT) == {}
    weights = chosen(program, resolution, Role.WEIGHT)
    assert weights["conv2d"] == Quantize(INT8_WEIGHT)
    assert weights["conv2d_2"] == FLOAT


def test_weight_only_leaves_the_rest_float(program: Program) -> None:
    resolution = QuantConfig().set(nn.Linear, INT4_GROUP).resolve(program)
    linear = program.node("linear")
    assert {role: str(setting.use) for role, setting in resolution.nodes[linear].items()} == {
        Role.WEIGHT: "quantize as INT4_GROUP",
        Role.ACT: "float: weight only",
        Role.BIAS: "float: weight only",
    }


def test_edges(program: Program) -> None:
    config = QuantConfig().set_op("add", INT8).set_edge("relu", "add_1", FLOAT).set_edge("layer1.1", "layer2", UINT8)
    resolution = config.resolve(program)
    node = program.node
    one, other = resolution.edge(node("relu"), node("add_1")), resolution.edge(node("conv2d_1"), node("add_1"))
    assert one is not None
    assert other is not None
    assert (one.use, other.use) == (FLOAT, Quantize(INT8))
    assert {(a.name, b.name) for a, b in resolution.edges} == {
        ("relu", "add_1"),
        ("relu_1", "conv2d_2"),
        ("relu_1", "add_2"),
    }
    assert resolution.edge(node("relu"), node("conv2d_1")) is None
    assert str(one) == "float: asked for (rule edge relu -> add_1: float: asked for)"


def test_nested_graphs_are_selected_by_their_path() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: x.relu() + 1, lambda x: x.sigmoid(), (x,))  # type: ignore[no-any-return]

    nested = qc.capture(Branches(), (torch.randn(3),), method="export")
    path, graph = list(nested.graphs())[1]
    relu = next(node for node in graph.nodes if node.name == "relu")
    resolution = QuantConfig().set_node(f"{path}/relu", FLOAT).resolve(nested)
    assert list(resolution.nodes) == [relu]


def test_fixed_qparams_can_be_asked_for(program: Program) -> None:
    fixed = Fixed(1 / 256, 0, UINT8)
    assert chosen(program, QuantConfig().set_op("relu", fixed).resolve(program))["relu"] == fixed


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (QuantConfig().set("layr1", FLOAT), "layr1: did you mean layer1"),
        (QuantConfig().set("layer3.*", FLOAT), "did you mean layer2"),
        (QuantConfig().set(re.compile("lay"), FLOAT), "/lay/: did you mean layer"),
        (QuantConfig().set(nn.Conv1d, FLOAT), "did you mean Conv2d"),
        (QuantConfig().set(nn.Sequential, FLOAT), "known types: Block, Conv2d, Linear, Net"),
        (QuantConfig().set_op("conv", FLOAT), "did you mean conv2d"),
        (QuantConfig().set_op("placeholder", FLOAT), "known ops: add, conv2d, flatten, linear, relu"),
        (QuantConfig().set_node("liner", FLOAT), "did you mean linear"),
        (QuantConfig().set_node("x", FLOAT), "it is an input or a constant; use set_edge"),
        (QuantConfig().set_edge("relu", "lnear", FLOAT), "did you mean linear"),
        (QuantConfig().set_edge("relu", "linear", FLOAT), "no tensor goes that way; linear takes flatten"),
    ],
    ids=str,
)
def test_a_selector_that_matches_nothing_is_an_error_with_the_closest_names(
    program: Program, config: QuantConfig, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        QuantConfig().set_all(UINT8).__add__(config).resolve(program)
    assert "1 of 2 rules match nothing" in caught.value.what
    assert caught.value.advice is not None
    assert told in caught.value.advice


def test_the_cost_is_linear_in_nodes_even_with_many_rules() -> None:
    class Chain(nn.Module):
        def __init__(self, blocks: int) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(blocks)))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.blocks(x)
            return y

    costs = {}
    for blocks in (50, 200):
        chain = qc.capture(Chain(blocks).eval(), (torch.randn(1, 2),), method="fx")
        nodes = [node.name for node in chain.nodes() if node.op == "call_function"]
        config = QuantConfig(rules=tuple(ConfigRule(select=ByNode(node=name), use=FLOAT) for name in nodes))
        costs[len(nodes)] = float(calls(partial(config.resolve, chain)))
    assert exponent(costs) < 1.1


def test_a_rule_for_activations_ends_what_was_said_of_the_op_as_a_whole(program: Program) -> None:
    config = QuantConfig().set(nn.Linear, INT4_GROUP).set_op("linear", INT8)
    found = config.resolve(program).nodes[program.node("linear")]
    assert {role: setting.use for role, setting in found.items()} == {Role.ACT: Quantize(INT8)}
    config = QuantConfig().set_op("linear", FLOAT, role="weight").set_op("linear", INT8)
    found = config.resolve(program).nodes[program.node("linear")]
    assert set(found) == {Role.WEIGHT, Role.ACT}, "FLOAT for one role is not about the op"


def test_a_setting_is_its_own_where_the_rule_names_the_layer_itself(program: Program) -> None:
    cases = {"head": True, "hea?": True, "*": True}
    for path, expected in cases.items():
        setting = QuantConfig().set(path, INT8).resolve(program).setting(program.node("linear"))
        assert setting is not None
        assert setting.is_own is expected
    outer = QuantConfig().set("layer1", INT8).resolve(program).setting(program.node("conv2d"))
    named = QuantConfig().set_op("linear", INT8).resolve(program).setting(program.node("linear"))
    left = QuantConfig().set("head", FLOAT).resolve(program).setting(program.node("linear"))
    assert [setting.is_own for setting in (outer, named, left) if setting is not None] == [False, False, False]


def test_rules_that_match_nothing_are_accepted_where_asked_for(program: Program) -> None:
    rules = QuantConfig().set("nowhere", FLOAT).rules
    assert resolve(rules, program, must_match=False).nodes == {}


def test_the_reason_for_float_names_the_rule(program: Program) -> None:
    left = QuantConfig().set_op("add", FLOAT).resolve(program).setting(program.node("add"))
    weights = QuantConfig().set("*", INT4_GROUP).resolve(program).setting(program.node("add"))
    assert left is not None
    assert weights is not None
    assert "op add" in left.why_float
    assert "no weight" in weights.why_float
