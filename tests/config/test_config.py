"""Configs: values that are built rule by rule, files, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from quantc.config.config import QuantConfig
from quantc.config.config_rule import ConfigRule, Use
from quantc.config.selectors import AnySelector, ByAll, ByEdge, ByModule, ByNode, ByOp, ByRegex, ByType
from quantc.errors import ConfigError
from quantc.ir.decisions import FLOAT, Fixed, Float, Quantize
from quantc.spec.spec import (
    INT8_WEIGHT,
    NAMED,
    UINT8,
    QuantSpec,
)
from tests.support.programs import chain
from tests.support.specs import specs

# the rules that lost were still used: they are not unmatched


def test_configs_are_values() -> None:
    first = QuantConfig().set("layer1", FLOAT)
    second = first.set_op("add", UINT8)
    assert (len(first.rules), len(second.rules)) == (1, 2)
    assert second == first + QuantConfig().set_op("add", UINT8)
    assert hash(second) == hash(first.set_op("add", UINT8))
    assert str(second) == "layer1: float: asked for\nop add: quantize as UINT8"
    assert str(QuantConfig()) == "no rules: the backend decides"
    assert QuantConfig().resolve(chain(2)).nodes == {}


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
        ('[[rules]]\nselect = { by = "all" }\nuse = "INT9"', "unknown spec INT9"),
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
