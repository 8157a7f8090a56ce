"""Run mypy and pyright, and insist that each looked at every source file.

Both can pass while reading only a part of the tree: mypy without the links in `quantc/`, pyright with too short an
`include`. So the number of files they report is compared with the number there are.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

FOLDERS = ("quantc", "passes", "patterns", "backends", "tests", "benchmarks", "examples")


def source_files(root: Path = ROOT) -> list[Path]:
    """Every Python file of the project, each once (the links in `quantc/` lead to folders listed here). Examples that are
    packages of their own import what is not installed here."""
    found = {path.resolve() for folder in FOLDERS for path in (root / folder).rglob("*.py")}
    apart = {path.parent.resolve() for path in (root / "examples").rglob("pyproject.toml")}
    return sorted(path for path in found if apart.isdisjoint(path.parents))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, text=True, capture_output=True, check=False)


def mypy_files() -> tuple[int, str]:
    """How many files mypy checked, and what it said; -1 if it found faults."""
    done = run("mypy")
    found = re.search(r"no issues found in (\d+) source files", done.stdout)
    return (int(found[1]) if found else -1), done.stdout + done.stderr


def pyright_files() -> tuple[int, str]:
    done = run("pyright", "--outputjson")
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        return -1, done.stdout + done.stderr
    faults = [
        f"{fault['file']}:{fault['range']['start']['line'] + 1}: {fault['message']}"
        for fault in report["generalDiagnostics"]
        if fault["severity"] == "error"
    ]
    return (-1 if faults else int(report["summary"]["filesAnalyzed"])), "\n".join(faults)


def main() -> int:
    expected = len(source_files())
    failed = False
    for name, (count, said) in (("mypy", mypy_files()), ("pyright", pyright_files())):
        if count == expected:
            sys.stdout.write(f"{name}: {count} files, no faults\n")
            continue
        failed = True
        reason = said if count < 0 else f"it checked {count} files, but there are {expected}\n{said}"
        sys.stdout.write(f"{name}: {reason}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
