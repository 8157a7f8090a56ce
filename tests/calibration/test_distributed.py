"""Calibration in several processes, and statistics collected apart: the same bits as one process over all data."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

import quantc as qc
from quantc.calibration import loop
from quantc.calibration.calibration_report import CalibrationReport
from quantc.calibration.distributed import Shard, Team, team_for
from quantc.errors import CalibrationError, DataError, ObservationError, UnknownNameError
from tests.support.calibration import BATCHES, batch, data, digest, prepared, torchrun


def alone(observe: str = "mse") -> str:
    program = prepared(observe)
    qc.calibrate(program, data())
    return f"{BATCHES} {digest(program)}"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("observe", ["minmax", "mse"])
def test_any_number_of_processes_ends_with_the_bits_of_one(processes: int, observe: str, tmp_path: Path) -> None:
    found = torchrun(processes, tmp_path / "out", "--observe", observe)
    assert found == [alone(observe)] * processes


@pytest.mark.slow
def test_each_process_has_a_checkpoint_of_its_own_and_can_go_on_from_it(tmp_path: Path) -> None:
    file = tmp_path / "seen"
    failed = torchrun(2, tmp_path / "failed", "--checkpoint", str(file), "--fail-on", "6")
    assert "NaN" in failed[0]
    assert failed[0].startswith("DataError") or "NotFiniteError" in failed[0]
    assert failed[1].startswith("CalibrationError: process 0 failed")  # it does not hang, and does not go on
    assert {path.name for path in tmp_path.glob("seen*")} == {"seen.0-of-2", "seen.1-of-2"}
    assert torchrun(2, tmp_path / "out", "--checkpoint", str(file)) == [alone()] * 2


@pytest.mark.slow
def test_moving_averages_are_refused_in_several_processes(tmp_path: Path) -> None:
    for text in torchrun(2, tmp_path / "out", "--observe", "moving-average"):
        assert text.startswith("CalibrationError: moving-average cannot be collected by several processes")
        assert "the data must come in one order" in text
        assert "shard='alone'" in text


# -- without processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_shares_of_a_team_are_all_of_the_data_each_batch_once(size: int) -> None:
    teams = [Team(rank, size) for rank in range(size)]
    shares = [list(team.share(iter(range(11)))) for team in teams]
    assert sorted(itertools.chain(*shares)) == list(range(11))
    for team, share in zip(teams, shares, strict=True):
        assert [team.number(index) for index in range(len(share))] == share
    given = [Team(rank, size, "given") for rank in range(size)]
    assert [list(team.share(iter(range(3)))) for team in given] == [[0, 1, 2]] * size


def test_one_process_is_a_team_of_one() -> None:
    with team_for("auto") as team:
        assert team == Team()
        assert team.exchange(b"all") == [b"all"]
    with pytest.raises(CalibrationError, match="there is no process group"), team_for("split"):
        pass
    with pytest.raises(UnknownNameError, match="unknown sharding 'both'"), team_for("both"):  # type: ignore[arg-type]
        pass


class Meeting:
    """Where threads that play processes exchange what they have."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.parts: list[bytes] = [b""] * size

    def exchange(self, rank: int, payload: bytes) -> list[bytes]:
        self.parts[rank] = payload
        self.barrier.wait()
        found = list(self.parts)
        self.barrier.wait()
        return found


@dataclass(frozen=True)
class Threads(Team):
    """A team whose members are threads of this process."""

    def exchange(self, payload: bytes) -> list[bytes]:
        meeting: Meeting = self.group
        return meeting.exchange(self.rank, payload)


def in_threads(
    programs: list[qc.Program], batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> list[CalibrationReport | Exception]:
    """What `qc.calibrate` comes to in each of several processes."""
    meeting, rank = Meeting(len(programs)), threading.local()

    @contextmanager
    def team_of_threads(shard: Shard) -> Iterator[Team]:
        yield Threads(rank.number, len(programs), "split", meeting)

    monkeypatch.setattr(loop, "team_for", team_of_threads)

    def member(number: int) -> CalibrationReport | Exception:
        rank.number = number
        try:
            return qc.calibrate(programs[number], batches)
        except qc.QuantcError as error:
            return error

    with ThreadPoolExecutor(len(programs)) as pool:
        return list(pool.map(member, range(len(programs))))


@pytest.mark.parametrize("size", [2, 3, 12])
def test_a_team_ends_with_the_bits_of_one(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [prepared() for _ in range(size)]
    for program in programs:
        qc.calibrate(program, data(2), shard="alone")  # what was there before counts once
    reports = in_threads(programs, data()[2:], monkeypatch)  # and some members have nothing to do
    whole = prepared()
    monkeypatch.undo()
    qc.calibrate(whole, data())
    for program, report in zip(programs, reports, strict=True):
        assert isinstance(report, CalibrationReport)
        assert (report.batches, report.total, report.samples) == (7, 9, 14)
        assert digest(program) == digest(whole)


def test_all_fail_if_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [*data(3), batch(3) * float("inf"), *data(3)]
    programs = [prepared() for _ in range(2)]
    first, second = in_threads(programs, batches, monkeypatch)
    assert isinstance(second, DataError)
    assert str(second.where).startswith("batch 3, x")
    assert isinstance(first, CalibrationError)
    assert "process 1 failed: NotFiniteError" in first.what
    assert [program.plan.batches for program in programs] == [0, 0]


def test_members_must_calibrate_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in in_threads([prepared("mse"), prepared("minmax")], data(2), monkeypatch):
        assert isinstance(found, CalibrationError)
        assert "do not calibrate the same thing: plan" in found.what


def test_what_depends_on_the_order_is_refused_in_a_team(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in in_threads([prepared("moving-average") for _ in range(2)], data(2), monkeypatch):
        assert isinstance(found, CalibrationError)
        assert "moving-average cannot be collected by several processes" in found.what
        assert found.where


# -- statistics collected apart --------------------------------------------------------------------------------


@pytest.mark.parametrize("observe", ["minmax", "mse"])
def test_statistics_of_shards_merge_to_those_of_all_the_data(observe: str, tmp_path: Path) -> None:
    shards = [data()[:2], data()[2:3], data()[3:]]
    paths = []
    for index, shard in enumerate(shards):
        path = tmp_path / f"{index}.safetensors"
        qc.calibrate(prepared(observe), shard).statistics.save(path)
        paths.append(path)
    whole = prepared(observe)
    qc.calibrate(whole, data())
    for order in ([0, 1, 2], [2, 0, 1]):
        merged = prepared(observe)
        report = qc.merge_statistics(merged, [paths[index] for index in order])
        assert (report.batches, report.samples, merged.plan.batches) == (BATCHES, 2 * BATCHES, BATCHES)
        assert digest(merged) == digest(whole)


def test_merging_refuses_what_does_not_belong_together() -> None:
    parts = [qc.calibrate(prepared(observe), data(2)).statistics for observe in ("mse", "percentile")]
    with pytest.raises(CalibrationError, match="not collected in the same way"):
        qc.merge_statistics(prepared(), parts)
    with pytest.raises(CalibrationError, match="no statistics to merge"):
        qc.merge_statistics(prepared(), [])
    moving = [qc.calibrate(prepared("moving-average"), data(2)).statistics for _ in range(2)]
    with pytest.raises(ObservationError, match="depend on the order"):
        qc.merge_statistics(prepared("moving-average"), moving)
