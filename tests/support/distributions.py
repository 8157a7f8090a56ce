"""Packages as pip would install them, for tests of plugins."""

from __future__ import annotations

from pathlib import Path


def write_distribution(folder: Path, name: str, module: str, source: str, **groups: dict[str, str]) -> None:
    """Write a distribution with one module and entry points, by the last part of their group, to a folder."""
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    rows = [
        f"[quantc.{group}]\n" + "\n".join(f"{key} = {value}" for key, value in entries.items())
        for group, entries in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(rows), encoding="utf-8")
