"""Configs: what each selector selects in captured programs, which rule wins, files, and what is refused."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.config.config import QuantConfig
from quantc.config.config_rule import ConfigRule, Use
from quantc.config.resolve import Resolution
from quantc.config.selectors import AnySelector, ByAll, ByEdge, ByModule, ByNode, ByOp, ByRegex, ByType
from quantc.errors import ConfigError
from quantc.ir.decisions import FLOAT, Fixed, Float, Quantize
from quantc.ir.program import Program
from quantc.spec.formats import Role
from quantc.spec.spec import (
    INT4_GROUP,
    INT8,
    INT8_DYNAMIC,
    INT8_WEIGHT,
    NAMED,
    UINT8,
    QuantSpec,
)
from tests.support.growth import calls, exponent
from tests.support.specs import specs


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
    # the rules that lost were still used: they are not unmatched


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


def test_configs_are_values(program: Program) -> None:
    first = QuantConfig().set("layer1", FLOAT)
    second = first.set_op("add", UINT8)
    assert (len(first.rules), len(second.rules)) == (1, 2)
    assert second == first + QuantConfig().set_op("add", UINT8)
    assert hash(second) == hash(first.set_op("add", UINT8))
    assert str(second) == "layer1: float: asked for\nop add: quantize as UINT8"
    assert str(QuantConfig()) == "no rules: the backend decides"
    assert QuantConfig().resolve(program).nodes == {}


# -- files -----------------------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8)
selectors: st.SearchStrategy[AnySelector] = st.one_of(
    st.builds(ByModule, path=names),
    st.builds(ByRegex, pattern=names.map(re.escape)),
    st.builds(ByType, name=names),
    st.builds(ByOp, op=names),
    st.builds(ByNode, node=names),
    st.builds(ByEdge, producer=names, consumer=names),
    st.just(ByAll()),
)
uses: st.SearchStrategy[Use] = st.one_of(
    st.sampled_from([Quantize(spec) for spec in NAMED.values()]),
    specs().map(Quantize),
    st.just(FLOAT),
    names.map(Float),
    st.floats(1e-6, 1.0).map(lambda scale: Fixed(scale, 0, UINT8)),
)
rules = st.builds(lambda select, use: ConfigRule.model_validate({"select": select, "use": use}), selectors, uses)


@given(
    st.lists(rules, max_size=4).map(lambda found: QuantConfig(rules=tuple(found))), st.sampled_from(["toml", "json"])
)
def test_files_round_trip(tmp_path_factory: pytest.TempPathFactory, config: QuantConfig, suffix: str) -> None:
    path = tmp_path_factory.mktemp("config") / f"config.{suffix}"
    config.save(path)
    assert QuantConfig.load(path) == config
    assert QuantConfig.model_validate_json(config.model_dump_json()) == config


def test_files_are_written_for_people(tmp_path: Path) -> None:
    config = QuantConfig().set("layer1.*", FLOAT).set(nn.Linear, UINT8.but(observe="mse")).set_all(FLOAT, role="bias")
    config.save(tmp_path / "config.toml")
    seal, text = (tmp_path / "config.toml").read_text().split("\n\n", 1)
    assert seal.startswith('seal = "')
    assert text == (
        '[[rules]]\nselect = { by = "module", path = "layer1.*" }\nuse = "FLOAT"\n\n'
        '[[rules]]\nselect = { by = "type", name = "torch.nn.modules.linear.Linear" }\nuse = "uint8{observe=mse}"\n\n'
        '[[rules]]\nselect = { by = "all" }\nuse = "FLOAT"\nrole = "bias"\n'
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rules = 3", "a config is a list of rules"),
        ("[[rulez]]", "a config is a list of rules"),
        ("rules = [", "does not read"),
        ('[[rules]]\nuse = "FLOAT"', "select: Field required"),
        ('[[rules]]\nselect = { by = "name" }\nuse = "FLOAT"', "select: Input tag 'name'"),
        ('[[rules]]\nselect = { by = "module" }\nuse = "FLOAT"', "path: Field required"),
        ('[[rules]]\nselect = { by = "module", path = "" }\nuse = "FLOAT"', "path: String should have at least 1"),
        ('[[rules]]\nselect = { by = "regex", pattern = "(" }\nuse = "FLOAT"', "pattern: it is no regular expression"),
        ('[[rules]]\nselect = { by = "all" }\nuse = "INT9"', "there is no spec named INT9"),
        ('[[rules]]\nselect = { by = "all" }\nuse = "int8{qmin=3}"', "must contain 0"),
        ('[[rules]]\nselect = { by = "all" }\nuse = { kind = "same" }', "use: "),
        ('[[rules]]\nselect = { by = "all" }\nuse = "INT8"\nrole = "weight"', "INT8 is meant for act, not for weight"),
        ('[[rules]]\nselect = { by = "all" }\nuse = "INT8"\nrole = "input"', "role: Input should be 'act'"),
    ],
)
def test_a_faulty_file_is_refused_and_the_field_named(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        QuantConfig.load(tmp_path / "config.toml")
    assert told in caught.value.what
    assert "config.toml" in str(caught.value)


def test_other_files_and_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither .toml nor .json"):
        QuantConfig().save(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="does not read"):
        QuantConfig.load(tmp_path / "missing.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="selects nothing"):
        QuantConfig().set(3, FLOAT)  # type: ignore[arg-type]


def test_there_is_a_schema_and_it_knows_every_selector() -> None:
    schema = json.dumps(QuantConfig.model_json_schema())
    for word in ("ByModule", "ByRegex", "ByType", "ByOp", "ByNode", "ByEdge", "ByAll", "INT8_WEIGHT", '"act"'):
        assert word in schema
    assert set(QuantConfig.model_json_schema()["properties"]) == {"rules", "seal"}  # an editor knows what files have


def test_a_spec_for_another_role_is_refused() -> None:
    with pytest.raises(ConfigError, match="meant for weight, not for act"):
        QuantConfig().set_all(INT8_WEIGHT, role="act")
    assert QuantConfig().set_all(QuantSpec.parse("INT8").but(role="weight"), role="weight").rules


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
