"""The table of import lines: each line on the right imports what it says."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "migrate.md"
ROW = re.compile(r"^\| `((?:from|import) [^`]+)` \| `((?:from|import) quantc[^`]+)` \|$", re.MULTILINE)
LINES = [new for _, new in ROW.findall(PAGE.read_text(encoding="utf-8"))]


def _module(line: str) -> str:
    return line.split()[1]


def test_the_table_has_a_line_for_every_flow() -> None:
    modules = {_module(line) for line in LINES}
    flows = ("tracing", "fx", "pt2e", "executorch", "eager")
    assert all(any(module.startswith(f"quantc.flows.{flow}") for module in modules) for flow in flows)


@pytest.mark.parametrize("line", [pytest.param(line, id=line[:60]) for line in LINES])
def test_an_import_line_imports(line: str) -> None:
    exec(line, {})  # noqa: S102 - our own document
