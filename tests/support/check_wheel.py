"""`make wheel`: builds sdist and wheel, looks for every file of every package inside, and imports the installed wheel."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

from tests.support.paths import ROOT

CODE = """
import sys
from importlib.metadata import entry_points
import quantc
assert quantc.__file__.startswith(sys.prefix), quantc.__file__
for group in ("quantc.backends", "quantc.observations", "quantc.passes", "quantc.pipelines"):
    for found in entry_points(group=group):
        found.load()
assert callable(quantc.capture)
"""


def expected() -> set[str]:
    """The files that a wheel holds, by their paths in it: all modules of the listed packages, and package data."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found: set[str] = set()
    for package in settings["packages"]:
        folder = ROOT / settings["package-dir"].get(package, package.replace(".", "/"))
        found |= {f"{package.replace('.', '/')}/{path.name}" for path in folder.glob("*.py")}
    for package, patterns in settings["package-data"].items():
        for pattern in patterns:
            data = [path.relative_to(ROOT).as_posix() for path in (ROOT / package).glob(pattern)]
            if not data:
                raise SystemExit(f"no file is {package}/{pattern}")
            found.update(data)
    return found


def check_imports(wheel: Path, folder: Path) -> None:
    """Import the wheel in an environment of its own; only its dependencies come from this one."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    site = Path(paths["purelib"])
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], check=True
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    subprocess.run([python, "-I", "-c", CODE], check=True, cwd=folder)


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        out = Path(made)
        command = [sys.executable, "-m", "build", "--outdir", str(out / "dist"), str(ROOT)]
        if (built := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
            raise SystemExit(built.stdout + built.stderr)
        (wheel,) = (out / "dist").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        wanted = expected()
        if inside != wanted:
            raise SystemExit(f"missing: {sorted(wanted - inside)}; too many: {sorted(inside - wanted)}")
        check_imports(wheel, out / "venv")
        sys.stdout.write(f"{wheel.name}: {len(inside)} files, imports\n")


if __name__ == "__main__":
    main()
