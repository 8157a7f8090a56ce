"""Cost tables: kernel times measured beforehand, looked up at the nearest shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantc.targets.kernels import costs, kernel_table
from quantc.targets.kernels.kernel import Work


def test_the_table_is_of_kinds_and_families_that_there_are() -> None:
    rows = json.loads((Path(costs.__file__).parent / "costs_x86.json").read_text(encoding="utf-8"))["rows"]
    kinds = {row["kind"] for row in rows}
    assert {"conv2d 1x1 s1", "conv2d 3x3 s1", "conv2d depthwise 3x3 s1", "conv2d depthwise 3x3 s2", "linear"} <= kinds
    assert all(time > 0 for row in rows for time in row["microseconds"].values())
    assert {family for row in rows for family in row["microseconds"]} <= {
        "onednn",
        "fbgemm",
        "float32",
        "torch",
        "native",
    }
    assert len({(row["kind"], row["size"], *row["channels"]) for row in rows}) == len(rows)


def test_the_tables_that_are_shipped_are_sound() -> None:
    for name in kernel_table.KERNELS:
        for rows in costs.cost_table(name).values():
            for row in rows:
                assert row.work.size > 0
                assert row.microseconds
                assert all(time > 0 for time in row.microseconds.values())
                assert costs.nearest(name, row.work) is not None


FIRST, LAST = Work("linear", 8, (16, 16)), Work("linear", 1024, (16, 16))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (costs.Measured(FIRST, {"onednn": 1.0}), costs.Measured(LAST, {"fbgemm": 2.0}))
    monkeypatch.setattr(costs, "cost_table", lambda target: {("linear", 2): rows} if target == "toy" else {})


def test_distances_are_doublings_and_channels_count_half() -> None:
    row = costs.Measured(Work("linear", 8, (16, 16)), {})
    assert row.distance(Work("linear", 32, (16, 16))) == 2.0
    assert row.distance(Work("linear", 2, (16, 16))) == 2.0
    assert row.distance(Work("linear", 8, (64, 16))) == 1.0
    assert row.distance(Work("linear", 16, (8, 32))) == 2.0
    assert row.distance(row.work) == 0.0


def test_a_size_of_nothing_is_as_near_as_one() -> None:
    row = costs.Measured(Work("linear", 1, (1, 4)), {})
    assert row.distance(Work("linear", 0, (0, 4))) == 0.0


@pytest.mark.usefixtures("table")
def test_the_nearest_row_of_the_kind_is_found() -> None:
    found = [costs.nearest("toy", Work("linear", size, (16, 16))) for size in (1, 64, 128, 10**6)]
    assert [row is not None and row.work for row in found] == [FIRST, FIRST, LAST, LAST]


@pytest.mark.usefixtures("table")
def test_an_epilogue_that_was_not_measured_is_looked_up_without() -> None:
    found = costs.nearest("toy", Work("linear + gelu", 1024, (16, 16)))
    assert found is not None
    assert found.work == LAST


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("work", [Work("conv2d", 8, (16, 16)), Work("linear", 8, (16, 16, 16))], ids=["kind", "rank"])
def test_other_kinds_and_other_numbers_of_channels_have_no_row(work: Work) -> None:
    assert costs.nearest("toy", work) is None
    assert costs.nearest("other", FIRST) is None


@pytest.mark.parametrize(("in_16_bits", "name"), [(True, "costs_x86.json"), (False, "costs_x86_vnni.json")])
def test_processors_that_add_in_32_bits_have_a_table_of_their_own(
    in_16_bits: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "adds_in_16_bits", lambda: in_16_bits)
    assert costs.file_of("x86") == name
    costs.cost_table.cache_clear()
    try:
        rows = [row for rows in costs.cost_table("x86").values() for row in rows]
        written = json.loads((Path(costs.__file__).parent / name).read_text(encoding="utf-8"))["rows"]
        read = sorted((row.work.kind, row.work.size, *row.work.channels) for row in rows)
        assert read == sorted((row["kind"], row["size"], *row["channels"]) for row in written)
        assert costs.cost_table("no such target") == {}
    finally:
        costs.cost_table.cache_clear()
