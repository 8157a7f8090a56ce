"""docs/passes.md and docs/backends.md are what passes and backends say of themselves."""

from __future__ import annotations

from typing import ClassVar

import pytest

from quantc.cli.reference_pages import backends_page, pass_rows, passes_page
from quantc.ir.program import Program
from quantc.pipeline.pipeline import Pass
from quantc.pipeline.registry import BACKENDS, PASSES, register_pass
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "passes.md"
BACKENDS_PAGE = ROOT / "docs" / "backends.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == passes_page(), "run: quantc passes --markdown > docs/passes.md"


def test_every_pass_of_ours_is_on_the_page_and_has_a_docstring() -> None:
    page = PAGE.read_text()
    for row in pass_rows():
        if row.provider != "quantc":
            continue  # of another test in this process
        assert row.error == ""
        assert f"## {row.name}\n" in page
        assert row.summary.endswith((".", ":"))
        assert (ROOT / "passes" / f"{row.name.replace('-', '_')}.py").is_file()


def test_options_are_shown_with_type_default_and_meaning() -> None:
    @register_pass
    class Choosy(Pass):
        """Has options."""

        name: ClassVar[str] = "test-choosy"

        backend: str
        """The backend to ask."""
        sample_sizes: tuple[int, ...] | None = (1, 2)

        def run(self, program: Program) -> bool:
            return False

    try:
        page = passes_page("this session")
    finally:
        PASSES.forget("test-choosy")
    assert "| `backend` | `str` | required | The backend to ask. |" in page
    assert r"| `sample-sizes` | `tuple[int, ...] \| None` | `1,2` |  |" in page
    assert "numbers: every output keeps its bits" in page


@pytest.mark.parametrize("name", ["eliminate-dead"])
def test_the_page_says_what_a_pass_needs(name: str) -> None:
    section = PAGE.read_text().split(f"## {name}\n")[1].split("\n## ")[0]
    assert "needs captured" in section


def test_the_page_of_backends_is_up_to_date() -> None:
    assert BACKENDS_PAGE.read_text() == backends_page(), "run: quantc backends --markdown > docs/backends.md"


@pytest.mark.parametrize("name", ["executorch", "qnnpack", "x86"])
def test_every_rule_role_and_capability_of_ours_is_on_the_page(name: str) -> None:
    section = BACKENDS_PAGE.read_text().split(f"## {name}\n")[1].split("\n## ")[0]
    backend = BACKENDS[name]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [*backend.roles, *backend.table.names]
    assert section.count("| act |") + section.count("| weight |") == len(backend.takes)
    for rule in backend.table:
        row = next(row for row in rows if row.startswith(f"| `{rule.name}` | `"))
        cells = [cell.strip() for cell in row.replace(r"\|", "").split("|")]
        assert cells[4:6] == ["" if offer == "no" else offer for offer in (rule.static, rule.dynamic)]
        assert cells[6:].count("yes") == len(rule.supports)


@pytest.mark.parametrize("name", ["executorch", "qnnpack", "x86"])
def test_every_mode_is_on_the_page_with_what_it_asks_for(name: str) -> None:
    section = BACKENDS_PAGE.read_text().split(f"## {name}\n")[1].split("\n## ")[0]
    backend = BACKENDS[name]
    assert "| static | the roles above |" in section
    for mode, spec in backend.modes.items():
        assert f"| {mode} | `{spec}` |" in section
        assert backend.why_not(spec) is None
