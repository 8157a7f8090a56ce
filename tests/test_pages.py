"""docs/passes.md is what the passes say of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from quantc.pages import pass_rows, passes_page
from quantc.pipeline import Pass
from quantc.program import Program
from quantc.registry import PASSES, register_pass

PAGE = Path(__file__).parent.parent / "docs" / "passes.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == passes_page(), "run: quantc passes --markdown > docs/passes.md"


def test_every_pass_of_ours_is_on_the_page_and_has_a_docstring() -> None:
    page = PAGE.read_text()
    for row in pass_rows():
        assert row.error == ""
        assert f"## {row.name}\n" in page
        assert row.summary.endswith((".", ":"))
        assert (Path(__file__).parent.parent / "passes" / f"{row.name.replace('-', '_')}.py").is_file()


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
