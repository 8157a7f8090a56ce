"""`quantc passes`, `backends` and `ops`."""

from __future__ import annotations

import json

from quantc.pipeline.registry import BACKENDS
from tests.support.cli_runs import quantc, succeed


def test_passes_lists_passes_and_pipelines() -> None:
    out = succeed("passes")
    assert "eliminate-dead" in out
    assert "inference" in out
    data = json.loads(succeed("passes", "--json"))
    (row,) = [row for row in data["passes"] if row["name"] == "eliminate-dead"]
    assert row["provider"] == "quantc"
    assert row["needs"] == "captured"
    assert row["summary"] == "Remove calls without users, and constants without readers."
    assert "## eliminate-dead" in succeed("passes", "--markdown")


def test_backends_lists_backends() -> None:
    assert isinstance(json.loads(succeed("backends", "--json"))["backends"], list)
    assert quantc("backends").exit_code == 0


def test_backends_are_listed_with_their_rules() -> None:
    rows = {row["name"]: row for row in json.loads(succeed("backends", "--json"))["backends"]}
    for name in ("x86", "qnnpack", "executorch"):
        assert rows[name]["rules"] == len(BACKENDS[name].table) > 0
        assert rows[name]["provider"] == "quantc"
        assert rows[name]["summary"]
        assert list(rows[name]["modes"]) == ["static", *BACKENDS[name].modes]
        assert rows[name]["dynamic"]["linear"] == "yes"
    assert rows["x86"]["dynamic"]["matmul"] == "named"
    assert "add" not in rows["x86"]["dynamic"]
    assert "x86" in succeed("backends")


def test_ops_lists_the_formulas_of_the_integer_form() -> None:
    rows = json.loads(succeed("ops", "--json"))["ops"]
    (conv,) = [row for row in rows if "conv2d" in row["ops"] and row["timing"] == "static"]
    assert conv["formula"]
    assert "conv2d" in succeed("ops")
    assert succeed("ops", "--markdown").startswith("# ")
