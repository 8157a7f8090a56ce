"""What can be said of a backend's table without any model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantc.annotate.quantizer import Backend
from quantc.spec.spec import INT8
from quantc.testing.conformance import Check, Conformance, Ledger
from quantc.testing.table_checks import check_table
from tests.support.faulty_backends import FAULTY, GOOD, Faulty
from tests.support.faulty_techniques import TECHNIQUES

STATIC = {Check.JSON, Check.SPECS, Check.MODES, Check.ROLES, Check.SUPPORTS}
WRITTEN = [faulty for faulty in (*FAULTY, *TECHNIQUES) if faulty.check in STATIC]


def checked(backend: Backend) -> Conformance:
    ledger = Ledger(backend.name)
    check_table(backend, ledger)
    return ledger.conformance(backend.table.names)


def test_a_good_table_passes() -> None:
    found = checked(GOOD)
    assert found.passed, str(found)
    assert {row.check for row in found.rows} == {*STATIC, Check.SHARING}


@pytest.mark.parametrize("faulty", WRITTEN, ids=lambda faulty: faulty.name)
def test_what_is_wrong_as_written_is_found_without_a_model(faulty: Faulty) -> None:
    row = checked(faulty.backend).row(faulty.rule, faulty.check)
    assert row is not None
    assert not row.passed
    assert faulty.says in row.what
    assert row.advice


def test_an_output_like_another_operand_than_the_one_passed_on_is_found() -> None:
    roles = {"x": "pass", "y": "act", "out": "like y"}
    add = replace(GOOD.table["add"], roles=roles)
    row = checked(replace(GOOD, table=replace(GOOD.table, rules=(add,)))).row("add", Check.SHARING)
    assert row is not None
    assert (row.passed, row.where) == (False, "as written")
    assert row.advice == 'give out the role "like x"'


def test_a_backend_without_modes_is_not_asked_for_them() -> None:
    assert checked(replace(GOOD, modes={})).row("", Check.MODES) is None


def test_every_role_that_no_rule_uses_is_told() -> None:
    found = checked(replace(GOOD, roles={**GOOD.roles, "spare": INT8, "other": INT8})).row("", Check.ROLES)
    assert found is not None
    assert "'spare'" in found.what
    assert "1 faults more" in found.what
