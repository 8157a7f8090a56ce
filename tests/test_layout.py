"""The shape of the repository: which module may import which, how long files are, and that packaging sees them all."""

from __future__ import annotations

import ast
import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from tests.check_types import ROOT, source_files

LINKS = {"passes": "../passes", "patterns": "../patterns", "backends": "../backends"}
TOP = {
    "api",
    "batches",
    "bench",
    "__main__",
    "cli",
    "compare_command",
    "compare_job",
    "compare_sides",
    "delivery",
    "engines",
    "executorch",
    "integer_page",
    "kernels",
    "nn",
    "one_call",
    "onnx",
    "pages",
    "quantize_job",
    "report",
    "report_page",
    "source",
    "summary",
    "targets",
    "terminal",
    "testing",
}
"""Modules of `quantc/` that stand above the passes."""
LAYERS = ("core", "patterns", "passes", "backends", "top")
MAX_LINES = 600


def layer(module: str) -> str:
    """The layer of `quantc.x.y`."""
    part = module.split(".")[1] if "." in module else "top"
    if part in ("patterns", "passes", "backends"):
        return part
    return "top" if part in TOP or part in ("flows", "inspect") else "core"


def module_name(path: Path) -> str:
    relative = path.relative_to(ROOT).with_suffix("")
    parts = relative.parts if relative.parts[0] == "quantc" else ("quantc", *relative.parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def library_files() -> list[Path]:
    return [
        path for path in source_files() if path.relative_to(ROOT).parts[0] not in ("tests", "benchmarks", "examples")
    ]


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of what a file imports when it is itself imported: not inside functions, nor for types only."""
    found: list[tuple[int, str]] = []
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.lineno, node.module))
        pending.extend(ast.iter_child_nodes(node))
    return found


def test_imports_point_one_way() -> None:
    wrong = []
    for path in library_files():
        name = module_name(path)
        if name == "quantc":
            continue
        for line, target in imports(path):
            if target == "quantc" or not target.startswith("quantc."):
                continue
            if LAYERS.index(layer(target)) > LAYERS.index(layer(name)):
                wrong.append(
                    f"{path.relative_to(ROOT)}:{line}: {name} ({layer(name)}) imports {target} ({layer(target)})"
                )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_too_long(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_links_are_relative_and_lead_to_the_folders() -> None:
    for name, target in LINKS.items():
        link = ROOT / "quantc" / name
        assert link.is_symlink()
        assert link.readlink() == Path(target)
        assert link.resolve() == ROOT / name


def test_passes_patterns_and_backends_are_flat() -> None:
    for name in LINKS:
        assert [path for path in (ROOT / name).iterdir() if path.is_dir() and path.name != "__pycache__"] == []


def test_the_package_list_is_the_folders() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    present = {module_name(path) for path in library_files() if path.name == "__init__.py"}
    assert listed == present


def test_every_pass_file_is_a_registered_pass_of_the_same_name() -> None:
    registered = {entry.name: entry.value for entry in importlib.metadata.entry_points(group="quantc.passes")}
    for path in (ROOT / "passes").glob("*.py"):
        if path.stem == "__init__":
            continue
        name = path.stem.replace("_", "-")
        assert registered[name].partition(":")[0] == f"quantc.passes.{path.stem}"


def test_torch_is_pinned_for_set_up_and_a_range_for_users() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert "torch==2.13.0" in pins
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "torch>=2.13" in project["project"]["dependencies"]
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in pins}
    for requirement in [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["dev"]]:
        name = requirement.partition(">=")[0].partition("[")[0]
        assert name.lower() in pinned, f"{name} is not pinned in constraints.txt"


def test_library_code_has_no_bare_asserts_and_prints_nothing() -> None:
    for path in library_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}: raise a QuantcError instead"
            is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            assert not is_print, f"{path}:{getattr(node, 'lineno', 0)}: library code prints nothing"


WRITES = {"write_text", "write_bytes", "save_file", "NamedTemporaryFile", "mkstemp"}


def test_files_are_written_in_one_place() -> None:
    """`quantc.files` writes whole files, follows links, cleans up and reports faults; nobody else opens a file to write."""
    wrong = []
    for path in library_files():
        if path.relative_to(ROOT).parts[:2] == ("quantc", "files"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            is_open = name == "open" or (isinstance(node.func, ast.Name) and node.func.id == "open")
            modes = [value.value for value in ast.walk(node) if isinstance(value, ast.Constant)] if is_open else []
            if name in WRITES - {"write_text", "write_bytes"} or any(
                mode in ("w", "wb", "a", "x", "r+b") for mode in modes
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:60]}")
            elif name in ("write_text", "write_bytes") and ast.unparse(node.func) != f"draft.{name}":
                # `write_text(path, text)` is ours, and `path.write_text(text)` is not, but to a draft
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:60]}")
    assert not wrong, "\n".join(wrong)
