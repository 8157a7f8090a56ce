"""Code of the documents that the flows go back to, run as it stands there.

Import lines are changed to quantc's. A document can have slips, and places left open with `...`; each is read in one
way, which is listed beside it, and must occur."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def run(code: str, imports: Mapping[str, str], readings: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Run the code of a document; the names it leaves."""
    for written, read in {**imports, **readings}.items():
        if written not in code:
            raise ValueError(f"the document does not say {written!r}")
        code = code.replace(written, read)
    namespace: dict[str, Any] = {"__name__": "document", **given}
    exec(compile(code, "document", "exec"), namespace)  # noqa: S102 - the documents are part of the tests
    return namespace
