"""The conformance report: rows, a table, JSON, and one error that lists what failed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from quantc.errors import ConformanceError
from quantc.testing import Check, check_backend
from quantc.testing.conformance import Fault, Ledger
from tests.support.faulty_backends import FAULTY, Faulty


def test_rows_are_told_as_a_table_as_json_and_as_an_error() -> None:
    faulty = next(faulty for faulty in FAULTY if faulty.name == "range-too-small")
    found = check_backend(replace(faulty.backend, table=faulty.backend.table.only("sigmoid"), roles=_used(faulty)))
    text = str(found)
    assert "sigmoid" in text
    assert "reaches from 0 to 0.498" in text
    assert "what to do: fix a scale of 0.0039" in text
    data = json.loads(found.to_json())
    assert data["backend"] == "good"
    assert data["passed"] is False
    assert {row["check"] for row in data["rows"] if not row["passed"]} >= {"range"}
    with pytest.raises(ConformanceError, match=r"fails \d+ of \d+ checks") as caught:
        found.raise_if_failed()
    assert len(caught.value.failures) == len(found.failures)
    assert all(failure in str(caught.value) for failure in caught.value.failures)
    assert "0.498" in str(caught.value)


def _used(faulty: Faulty) -> dict[str, Any]:
    return {name: role for name, role in faulty.backend.roles.items() if name in ("act", "unit")}


def test_every_row_says_where_and_what_to_do() -> None:
    found = check_backend(next(faulty.backend for faulty in FAULTY if faulty.name == "cat-does-not-share"))
    row = found.row("cat", Check.SHARING)
    assert row is not None
    assert row.where == "cat"
    assert row.advice == 'give out the role "like xs"'


def ledger() -> Ledger:
    made = Ledger("mine")
    made.add("late", Check.ZERO, [], where="one")
    made.add("early", Check.FIDELITY, [], where="one", note="all well")
    made.add("early", Check.RUNS, [Fault("it broke", "mend it")], where="first")
    made.add("early", Check.RUNS, [Fault("again", "mend it", "its own place")], where="second")
    made.add("early", Check.RUNS, [], where="third")
    made.add("early", Check.BIAS, None, where="first")
    made.add("", Check.ROLES, [Fault("one", "a"), Fault("two", "b")])
    return made


def test_rows_are_in_the_order_of_rules_and_checks() -> None:
    found = ledger().conformance(("early", "late"))
    assert [(row.rule, row.check.value) for row in found.rows] == [
        ("", "roles"),
        ("early", "runs"),
        ("early", "fidelity"),
        ("late", "zero"),
    ]
    assert found.row("early", "bias") is None, "a check that does not apply has no row"


def test_findings_for_several_models_are_one_row_with_the_first_fault() -> None:
    found = ledger().conformance(("early", "late"))
    row = found.row("early", Check.RUNS)
    assert row is not None
    assert (row.models, row.passed) == (3, False)
    assert row.what == "it broke (and 1 models more)"
    assert (row.where, row.advice) == ("first", "mend it")
    whole = found.row("", Check.ROLES)
    assert whole is not None
    assert whole.what == "one (and 1 faults more)"


def test_what_passed_keeps_its_note() -> None:
    found = ledger().conformance(("early", "late"))
    row = found.row("early", Check.FIDELITY)
    assert row is not None
    assert row.passed
    assert str(row) == "early, fidelity: all well"
    assert len(found.failures) == 2
    with pytest.raises(ConformanceError, match="fails 2 of 4 checks") as caught:
        found.raise_if_failed()
    assert caught.value.where == "the backend as a whole, roles"


def test_nothing_is_raised_if_nothing_failed() -> None:
    made = Ledger("mine")
    made.add("rule", Check.ZERO, [])
    found = made.conformance(("rule",))
    found.raise_if_failed()
    assert str(found).startswith("mine: 1 of 1 checks passed")
