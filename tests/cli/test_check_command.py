"""`quantc check-backend`: the verdict, the exit code, and backends by place."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner, Result

from quantc.annotate.quantizer import Backend
from quantc.cli.app import app
from quantc.cli.check_command import FAILED
from quantc.patterns import Rule, RuleTable, aten, const
from quantc.pipeline.registry import BACKENDS
from quantc.spec.spec import INT8_WEIGHT, UINT8
from quantc.targets.target import TARGETS, Invariant, Target, register_target

LINEAR = Rule(
    "linear", aten.linear("x", const("w"), const("b?")), {"x": "act", "w": "weight", "out": "act"}, supports={"qdq"}
)
TINY = Backend("tiny", RuleTable("tiny", (LINEAR,)), roles={"act": UINT8, "weight": INT8_WEIGHT})
WRONG = replace(
    TINY, name="wrong", table=RuleTable("wrong", (replace(LINEAR, roles={"x": "act", "w": "act", "out": "act"}),))
)


def check(*args: str) -> Result:
    return CliRunner().invoke(app, ["check-backend", *args])


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS.session, "tiny", TINY)


@pytest.mark.usefixtures("tiny")
def test_a_backend_by_name() -> None:
    found = check("tiny")
    assert found.exit_code == 0, found.output
    assert "tiny: " in found.stdout
    assert "checks passed" in found.stdout


def test_a_backend_by_place_as_json() -> None:
    found = check(f"{__name__}:TINY", "--json")
    told = json.loads(found.stdout)
    assert (found.exit_code, told["backend"], told["passed"]) == (0, "tiny", True)


def test_one_that_fails_leaves_with_its_own_code() -> None:
    found = check(f"{__name__}:WRONG")
    assert found.exit_code == FAILED, found.output
    assert "what to do" in found.stdout


def test_a_name_that_nobody_knows() -> None:
    found = check("tinny")
    assert found.exit_code == 1
    assert "tinny" in found.stderr


@pytest.mark.usefixtures("tiny")
def test_the_target_of_the_same_name_holds_its_invariants() -> None:
    never = Invariant("nothing is quantized", lambda program: [(next(iter(program.nodes())), "it is there")])
    register_target(Target("tiny", lambda program: program, invariants=(never,)))
    try:
        found = check("tiny", "--json")
    finally:
        TARGETS.forget("tiny")
    assert found.exit_code == FAILED
    assert any("nothing is quantized" in row["what"] for row in json.loads(found.stdout)["rows"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tests.support.faulty_plugins:MergeRelus", "pass"),
        ("tests.support.faulty_plugins:Copied", "observation"),
        ("minmax", "observation"),
        ("fuse", "pass"),
        ("tests.support.hand_quantizers:BY_HAND", "quantizer"),
    ],
)
def test_other_plugins_are_checked_too(name: str, kind: str) -> None:
    found = check(name, "--json")
    told = json.loads(found.stdout)
    assert (found.exit_code, told["kind"], told["passed"]) == (0, kind, True), found.output


def test_what_is_no_plugin_is_refused() -> None:
    found = check("json:dumps")
    assert found.exit_code == 1
    assert "is not a quantizer" in found.stderr
    assert found.exception is None or isinstance(found.exception, SystemExit)
