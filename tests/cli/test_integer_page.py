"""docs/integer-form.md: its tables are made from the ops and their semantics."""

from __future__ import annotations

import pytest

from quantc.cli.integer_page import integer_page, semantics_rows
from quantc.integer.library import OPS
from quantc.integer.semantics import MODULES
from quantc.pipeline.registry import BACKENDS
from quantc.spec.formats import Timing
from tests.support.paths import ROOT

INTEGER_PAGE = ROOT / "docs" / "integer-form.md"


def test_the_page_of_the_integer_form_is_up_to_date() -> None:
    assert INTEGER_PAGE.read_text() == integer_page(), "run: quantc ops --markdown > docs/integer-form.md"


def test_every_op_of_the_integer_form_is_on_the_page_and_says_what_it_is() -> None:
    page = INTEGER_PAGE.read_text()
    for op in OPS.values():
        assert f"| `{op.schema}` | {op.summary} |" in page
        assert op.summary.endswith(".")
        assert op.formula
    for row in semantics_rows():
        assert row.formula
        assert all(f"`{name}`" in page for name in row.ops)


@pytest.mark.parametrize("name", ["executorch", "qnnpack", "x86"])
def test_every_rule_without_an_integer_form_is_on_its_page_with_the_reason(name: str) -> None:
    section = INTEGER_PAGE.read_text().split("## Rules without an integer form\n")[1]
    for rule in BACKENDS[name].table:
        rows = [line for line in section.splitlines() if line.startswith(f"| {name} | `{rule.name}` |")]
        assert len(rows) == ("integer" not in rule.supports)
        assert all(len(row.split("|")[3].strip()) > 10 for row in rows)


def test_rows_are_in_the_order_of_the_modules_that_fill_them_and_none_is_twice() -> None:
    rows = semantics_rows()
    assert len({id(row) for row in rows}) == len(rows)
    written = [MODULES.index(row.write.__module__.removeprefix("quantc.integer.")) for row in rows]
    assert written == sorted(written)
    assert {row.timing for row in rows} == {Timing.STATIC, Timing.DYNAMIC}


def test_rules_of_other_distributions_are_left_out() -> None:
    section = integer_page("somebody else").split("## Rules without an integer form\n")[1]
    assert not any(line.startswith(("| x86 |", "| qnnpack |")) for line in section.splitlines())
