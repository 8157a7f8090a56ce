"""Sealed JSON and TOML: a digest of the data, and limits on depth and size before anything is parsed."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import quantc as qc
from quantc.errors import ConfigError, LoadError
from quantc.files.sealed_data import MAX_DEPTH, parse_json, parse_toml, seal, unseal
from quantc.store import file_versions

DEEP = {
    "deep.json": '{"rules": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "deeper.json": "[" * 5_000_000,
    "tables.json": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "deep.toml": "rules = " + "[" * 100_000 + "]" * 100_000,
    "tables.toml": "rules = " + "{a=" * 100_000 + "1" + "}" * 100_000,
    "dots.toml": ".".join("a" * 20_000) + " = 1",
    "spaced.toml": " . ".join('"a"' * 1 for _ in range(20_000)) + " = 1",
    "header.toml": "[" + ".".join("a" * 20_000) + "]",
    "hidden.toml": 'x = "\\"" # "\n' + ".".join("a" * 20_000) + " = 1",
    "escapes.toml": '\\"""' * 100_000,
    "quotes.toml": '"\\"' + '\\"' * 200_000,
    "large.toml": "# comment\n" * 2_000_000,
    "large.json": " " * 20_000_000,
}


@pytest.mark.parametrize("name", DEEP)
def test_what_is_nested_too_deep_is_refused_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(DEEP[name])
    start = time.process_time()
    with pytest.raises(ConfigError, match="does not read"):
        qc.QuantConfig.load(tmp_path / name)
    assert time.process_time() - start < 5


def test_brackets_and_dots_in_text_are_no_nesting(tmp_path: Path) -> None:
    path = "[{" * 200 + "a.b." * 200 + '"]'
    for ending in ("toml", "json"):
        config = qc.QuantConfig().set(path, qc.FLOAT).set("layer.0.conv", qc.INT8)
        config.save(tmp_path / f"config.{ending}")
        assert qc.QuantConfig.load(tmp_path / f"config.{ending}") == config
    text = (tmp_path / "config.toml").read_text().replace('use = "INT8"', "use = 'INT8' # " + "[" * 200)
    (tmp_path / "config.toml").write_text(text)
    assert qc.QuantConfig.load(tmp_path / "config.toml") == config


def test_deep_parts_of_other_files_are_refused(tmp_path: Path) -> None:
    document = "[" * 100_000
    text = torch.tensor(list(document.encode()), dtype=torch.uint8)
    file_versions.write(tmp_path / "deep.qc", {"document": text})
    with pytest.raises(LoadError):
        qc.load(tmp_path / "deep.qc")


DATA = {"name": "conv", "sizes": [1, 2.5, None], "inner": {"b": True, "a": "é"}}


def test_what_was_sealed_comes_back() -> None:
    made = seal(DATA)
    assert next(iter(made)) == "seal"
    assert unseal(made, needed=True) == DATA
    assert unseal(parse_json(json.dumps(made))) == DATA


def test_the_order_of_keys_is_not_sealed_and_everything_else_is() -> None:
    made = seal(DATA)
    assert unseal({**dict(reversed(list(made.items()))), "inner": {"a": "é", "b": True}}) == DATA
    changes: list[dict[str, Any]] = [
        {"name": "conv2"},
        {"sizes": [2.5, 1, None]},
        {"inner": {"b": 1.5, "a": "é"}},
        {"more": 0},
        {"seal": None},
        {"seal": "0" * 32},
    ]
    for change in changes:
        with pytest.raises(ConfigError, match="changed since it was written") as caught:
            unseal({**made, **change}, ConfigError)
        assert "remove its line 'seal'" in str(caught.value.advice)


def test_what_was_written_by_hand_is_taken_unless_a_seal_is_needed() -> None:
    assert unseal(DATA) == DATA
    with pytest.raises(LoadError, match="no seal"):
        unseal(DATA, needed=True)


def test_what_json_does_not_hold_fits_no_seal() -> None:
    data = parse_toml('day = 2020-01-01\nseal = ""')
    assert data["day"] == datetime.date(2020, 1, 1)
    with pytest.raises(LoadError):
        unseal({**data, "seal": "0" * 32})


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_the_deepest_that_is_parsed() -> None:
    assert parse_json(nested(3), depth=3) == [[[]]]
    for text in (nested(4), '{"a": [[{}]]}'):
        with pytest.raises(LoadError, match="nested deeper than 3"):
            parse_json(text, depth=3)
    parse_json(nested(MAX_DEPTH))
    parse_toml(f"a = {nested(MAX_DEPTH)}")
    with pytest.raises(LoadError, match="nested"):
        parse_toml(f"a = {nested(MAX_DEPTH + 1)}")


def test_the_longest_key_of_toml() -> None:
    found: Any = parse_toml(".".join("a" * MAX_DEPTH) + " = 1")
    for _ in range(MAX_DEPTH):
        found = found["a"]
    assert found == 1
    with pytest.raises(LoadError, match=f"{MAX_DEPTH + 1} parts"):
        parse_toml(".".join("a" * (MAX_DEPTH + 1)) + " = 1")


@pytest.mark.parametrize("text", ['"[[[["', '"\\"[[[["', '{"[[[[": "}{"}', '["[", "]"]'])
def test_brackets_inside_strings_of_json_do_not_count(text: str) -> None:
    assert parse_json(text, depth=1) == json.loads(text)


def test_malformed_and_overlong_texts_are_refused() -> None:
    assert parse_json("[1]", most=3) == [1]
    with pytest.raises(LoadError, match="4 characters long"):
        parse_json("[12]", most=3)
    for text in ("", "{", "[1,]", "]", '"open'):
        with pytest.raises(LoadError, match="not JSON"):
            parse_json(text)
    for text in ("a", "a = ", '"""', "a = 1\na = 2"):
        with pytest.raises(LoadError, match="not TOML"):
            parse_toml(text)
