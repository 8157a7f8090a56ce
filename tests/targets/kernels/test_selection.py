"""Which kernel runs an op where several could: by the cost table at the nearest shape, or by times."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import quantc as qc
from quantc.targets.kernels import costs
from quantc.targets.kernels.kernel import Kernel, Work
from quantc.targets.kernels.selection import by_table, by_times
from tests.support.toy_kernels import AsWritten, chosen, offer_toys, program


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    return offer_toys(monkeypatch, tmp_path)


def given_table(monkeypatch: pytest.MonkeyPatch, *rows: tuple[str, int, tuple[int, int], dict[str, float]]) -> None:
    measured: dict[tuple[str, int], tuple[costs.Measured, ...]] = {}
    for kind, size, channels, times in rows:
        key = (kind, len(channels))
        measured[key] = (*measured.get(key, ()), costs.Measured(Work(kind, size, channels), times))
    monkeypatch.setattr(costs, "cost_table", lambda target: measured)


def test_the_first_is_taken_where_nothing_is_known(target: str) -> None:
    assert chosen(qc.lower(program(), target)) == [("slow", ""), ("slow", "")]


def test_the_table_decides_at_the_nearest_shape(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given_table(
        monkeypatch,
        ("linear", 1, (8, 8), {"torch": 1.0, "onednn": 9.0}),
        ("linear", 4096, (8, 8), {"torch": 9.0, "onednn": 1.0}),
        ("conv2d", 4, (8, 6), {"torch": 9.0, "onednn": 1.0}),
    )
    lowered = qc.lower(program(), target)
    assert chosen(lowered) == [("quick", "table"), ("quick", "table")]
    assert lowered.placed[1].microseconds == {"quick": 1.0, "slow": 9.0}
    assert "table: quick 1 µs, slow 9 µs" in str(lowered)


def test_dynamic_sizes_are_those_of_the_example_inputs(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given_table(
        monkeypatch,
        ("linear", 1, (8, 8), {"torch": 9.0, "onednn": 1.0}),
        ("linear", 8, (8, 8), {"torch": 1.0, "onednn": 9.0}),
    )
    lowered = qc.lower(program(dynamic=True), target)
    assert chosen(lowered) == [("quick", "table"), ("quick", "table")]
    assert lowered(torch.randn(17, 8)).shape == (17, 4)


def test_the_choice_changes_no_numbers(target: str) -> None:
    made = program()
    x = torch.randn(5, 8)
    one, other = qc.lower(made, target), qc.lower(made, target, tune=True)
    assert chosen(one) != chosen(other)
    assert torch.equal(one(x), other(x))


class Named(AsWritten):
    """A kernel that is never run."""

    def __init__(self, name: str) -> None:
        Kernel.__init__(self)
        self.name = name  # type: ignore[misc]


def test_the_fastest_comes_first_and_those_without_a_time_last() -> None:
    kernels = [Named(name) for name in ("unknown", "slow", "other", "fast")]
    found = by_times(kernels, "measured", None, {"fast": 1.0, "slow": 2.4, "gone": 0.1})
    assert [kernel.name for kernel in found.candidates] == ["fast", "slow", "unknown", "other"]
    assert found.taken.name == "fast"
    assert found.microseconds == {"fast": 1.0, "slow": 2.4}
    assert str(found) == "measured: fast 1 µs, slow 2 µs"


def test_one_candidate_is_no_choice() -> None:
    (kernel,) = kernels = [Named("only")]
    found = by_table("x86", kernels, (), {})
    assert (found.taken, found.by, str(found)) == (kernel, "", "")
