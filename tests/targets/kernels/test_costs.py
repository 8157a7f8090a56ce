"""Cost tables: kernel times measured beforehand, looked up at the nearest shape."""

from __future__ import annotations

import json
from pathlib import Path

from quantc.targets.kernels import costs, kernel_table


def test_the_table_is_of_kinds_and_families_that_there_are() -> None:
    rows = json.loads((Path(costs.__file__).parent / "costs_x86.json").read_text(encoding="utf-8"))["rows"]
    kinds = {row["kind"] for row in rows}
    assert {"conv2d 1x1 s1", "conv2d 3x3 s1", "conv2d depthwise 3x3 s1", "conv2d depthwise 3x3 s2", "linear"} <= kinds
    assert all(time > 0 for row in rows for time in row["microseconds"].values())
    assert {family for row in rows for family in row["microseconds"]} <= {"onednn", "fbgemm", "float32", "torch"}
    assert len({(row["kind"], row["size"], *row["channels"]) for row in rows}) == len(rows)


def test_the_tables_that_are_shipped_are_sound() -> None:
    for name in kernel_table.KERNELS:
        for rows in costs.measured(name).values():
            for row in rows:
                assert row.work.size > 0
                assert row.microseconds
                assert all(time > 0 for time in row.microseconds.values())
                assert costs.nearest(name, row.work) is not None
