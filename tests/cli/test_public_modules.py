"""docs/public-modules.md is up to date, and documents import from public modules alone."""

from __future__ import annotations

from quantc.cli.public_modules import PUBLIC_MODULES, public_modules_page, summary
from tests.support.paths import ROOT
from tests.support.surface import imports


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "public-modules.md").read_text(encoding="utf-8") == public_modules_page(), "run: make docs"


def test_documents_import_from_public_modules() -> None:
    used = {row.partition(":")[0] for row in imports()}
    assert used - {*PUBLIC_MODULES} == set()


def test_public_modules_are_sorted_and_say_what_they_are() -> None:
    assert list(PUBLIC_MODULES) == sorted({*PUBLIC_MODULES})
    for module in PUBLIC_MODULES:
        assert summary(module).endswith((".", ":")), module
