"""The shape of the repository: how long files are, and that packaging sees them all."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib
from collections import Counter
from pathlib import Path

import grimp
import networkx as nx

from tests.support.check_types import source_files
from tests.support.paths import ROOT

LINKS = {"passes": "../passes", "patterns": "../patterns", "backends": "../backends"}
MAX_LINES = 600


def module_name(path: Path) -> str:
    relative = path.relative_to(ROOT).with_suffix("")
    parts = relative.parts if relative.parts[0] == "quantc" else ("quantc", *relative.parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FLAT = {"__init__", "__main__", "errors", "hooks", "pipelines", "reference"}


def test_the_root_holds_packages_and_the_public_modules() -> None:
    assert {path.stem for path in (ROOT / "quantc").glob("*.py")} == FLAT


def library_files() -> list[Path]:
    return [
        path for path in source_files() if path.relative_to(ROOT).parts[0] not in ("tests", "benchmarks", "examples")
    ]


def test_no_file_is_too_long() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in source_files()}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


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


def facade() -> set[tuple[str, str]]:
    """The imports upwards that the layers allow: the methods of Program that print, verify and save it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = next(row for row in project["tool"]["importlinter"]["contracts"] if row.get("containers") == ["quantc"])
    return {
        (importer, imported) for importer, _, imported in (row.partition(" -> ") for row in layers["ignore_imports"])
    }


def test_no_modules_import_each_other() -> None:
    """Neither at the top, nor inside functions, nor for types alone; packages count as their `__init__`."""
    found = grimp.build_graph("quantc", cache_dir=None)
    imports = {(module, other) for module in found.modules for other in found.find_modules_directly_imported_by(module)}
    graph: nx.DiGraph[str] = nx.DiGraph(imports - facade())
    assert [sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1] == []


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


MIN_SHARE = 0.9
"""The share of modules whose tests are found by their path."""
WITHOUT = {
    "capture/refused_trace.py",
    "flows/executorch/exir.py",
}
"""Modules without a test file of their own; tests of their callers hold them."""
HOMES = {"support": "engine_support"}
"""Folders of tests that have another name than the package: `tests/support` holds what tests share."""


def home_of_tests(module: Path) -> Path:
    first, *rest = module.parts
    return ROOT / "tests" / Path(HOMES.get(first, first), *rest).with_name(f"test_{module.name}")


def test_tests_are_found_by_path() -> None:
    modules = [path for path in library_files() if not path.stem.startswith("__")]
    homes = [path.relative_to(ROOT) for path in modules]
    inner = [home.relative_to("quantc") if home.parts[0] == "quantc" else home for home in homes]
    missing = {module.as_posix() for module in inner if not home_of_tests(module).is_file()}
    assert missing == WITHOUT
    assert len(missing) <= (1 - MIN_SHARE) * len(inner)


def test_what_tests_share_is_apart_from_tests() -> None:
    assert list((ROOT / "tests/support").rglob("test_*.py")) == []


def test_no_test_module_imports_another() -> None:
    """What several share lies in tests/support."""
    wrong = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in (ROOT / "tests").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"(from|import) tests\.(\w+\.)*test_\w+", line) or re.match(r"from tests\S* import .*\btest_", line)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_engine_module_has_the_name_of_another() -> None:
    engine = [path for path in library_files() if not path.stem.startswith("__")]
    stems = [path.stem for path in engine if not {"flows", "nn"} & {*path.relative_to(ROOT).parts[:2]}]
    assert [stem for stem, count in Counter(stems).items() if count > 1] == []
