"""The pages of the documents, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line, code) of each Python block."""
    text = page.read_text(encoding="utf-8")
    return [(text[: found.start(1)].count("\n") + 1, found[1]) for found in BLOCK.finditer(text)]
