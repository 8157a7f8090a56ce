"""What users may rely on, as data: public names and signatures, entry points, import paths of the documents, commands.

`python -m tests.support.surface` writes `tests/golden/surface.json`; `tests/test_surface.py` holds the package to it. A line may be
added; one that changes or goes is a break, and has a line in the CHANGELOG.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import warnings
from importlib.metadata import entry_points
from typing import Any

import typer.main

import quantc
from quantc.cli.app import app
from tests.support.doc_pages import PAGES, blocks
from tests.support.paths import ROOT

FILE = ROOT / "tests" / "golden" / "surface.json"
GROUPS = ("quantc.backends", "quantc.observations", "quantc.passes", "quantc.pipelines", "quantc.statistics")


def names() -> dict[str, list[str]]:
    """The public names of the package, each with its parameters."""
    return {name: parameters_of(getattr(quantc, name)) for name in sorted(quantc.__all__)}


def parameters_of(value: Any) -> list[str]:
    """The parameters of a function or class, with their defaults; none for a value."""
    try:
        rows = inspect.signature(value).parameters.values() if callable(value) else ()
    except (ValueError, TypeError):
        return []
    public = [row for row in rows if not row.name.startswith("_")]
    return [f"{row.name}={row.default!r}" if row.default is not row.empty else row.name for row in public]


def plugins() -> dict[str, list[str]]:
    """The names that are registered in each group of entry points."""
    return {group: sorted({row.name for row in entry_points(group=group)}) for group in GROUPS}


def imports() -> list[str]:
    """`module:name` for everything that README, docs and examples import from quantc."""
    found: set[str] = set()
    sources = [code for page in PAGES for _, code in blocks(page)]
    sources += [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").rglob("*.py"))]
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "quantc":
                found.update(f"{node.module}:{row.name}" for row in node.names)
            elif isinstance(node, ast.Import):
                found.update(f"{row.name}:" for row in node.names if row.name.partition(".")[0] == "quantc")
    return sorted(found)


def imported(path: str) -> Any:
    """What `module:name` stands for. Old paths warn that they are old."""
    module, _, name = path.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = importlib.import_module(module)
        if not name:
            return found
        return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")


def commands() -> dict[str, list[str]]:
    """The commands, each with its arguments and options as they are typed, and their defaults."""
    whole: Any = typer.main.get_command(app)
    return {name: [_option(row) for row in command.params] for name, command in sorted(whole.commands.items())}


def _option(row: Any) -> str:
    default = row.default if isinstance(row.default, str | int | float | bool | type(None)) else "..."
    return f"{' '.join((*row.opts, *row.secondary_opts))}={default!r}"


def surface() -> dict[str, Any]:
    """All of it. Import paths only join: one that a document once gave stays, also when the document gives another now."""
    kept = json.loads(FILE.read_text(encoding="utf-8"))["imports"]
    return {
        "names": names(),
        "commands": commands(),
        "plugins": plugins(),
        "imports": sorted({*imports(), *kept}),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(surface(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
