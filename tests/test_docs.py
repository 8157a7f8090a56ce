"""The code in the documents runs: all Python blocks of a page, top to bottom, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quantc.pipeline.registry import BACKENDS, PASSES
from quantc.targets.target import TARGETS
from tests.support.doc_pages import PAGES, blocks
from tests.support.paths import ROOT


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if blocks(page)])
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for registry in (PASSES, BACKENDS, TARGETS):
        monkeypatch.setattr(registry, "session", dict(registry.session))
    namespace: dict[str, object] = {"__name__": "page"}
    for line, code in blocks(page):
        # newlines in front, so that an error names the line of the page
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)  # noqa: S102 - our own documents


def test_pages_link_to_files_that_exist() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_glossary_names_paths_that_exist() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:quantc|passes|patterns|backends)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), f"glossary.md names {path}"


def test_documents_speak_of_the_project_alone() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        text = page.read_text(encoding="utf-8")
        assert str(ROOT.parent) + "/" not in text, f"{page.name} names a path of this machine"
