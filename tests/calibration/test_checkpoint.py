"""Calibration that is interrupted and goes on: the same bits as if it had not been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import quantc as qc
from quantc.errors import CalibrationError, LoadError
from quantc.observe import Statistics
from tests.support.calibration import BATCHES, batch, captured, data, digest, observing, prepared
from tests.support.paths import ROOT


class Stop(Exception):  # noqa: N818 - a stand-in for whatever stops a process
    pass


def until(count: int) -> Iterator[Tensor]:
    yield from data(count)
    raise Stop


@pytest.mark.parametrize("observe", ["minmax", "mse", "moving-average", "recording"])
@pytest.mark.parametrize("every", [1, 2, 100])
def test_an_interrupted_calibration_goes_on_with_the_same_bits(observe: str, every: int, tmp_path: Path) -> None:
    whole = prepared(observe)
    qc.calibrate(whole, data())
    file = tmp_path / "seen.safetensors"
    for count in (2, 5):
        program = prepared(observe)
        with pytest.raises(Stop):
            qc.calibrate(program, until(count), checkpoint=file, every=every)
        assert program.plan.batches == 0  # they are in the file
        assert Statistics.load(file).notes["batches"] == count
    resumed = prepared(observe)
    report = qc.calibrate(resumed, data(), checkpoint=str(file), every=every)
    assert (report.batches, resumed.plan.batches, report.samples) == (BATCHES, BATCHES, 2 * BATCHES)
    assert "5 batches from the checkpoint" in report.notes
    assert digest(resumed) == digest(whole)


def test_the_same_process_can_go_on_with_the_same_program(tmp_path: Path) -> None:
    program, whole = prepared(), prepared()
    qc.calibrate(whole, data())
    with pytest.raises(Stop):
        qc.calibrate(program, until(4), checkpoint=tmp_path / "file")
    qc.calibrate(program, data(), checkpoint=tmp_path / "file")
    assert digest(program) == digest(whole)


def test_batches_before_the_checkpoint_count_once(tmp_path: Path) -> None:
    program, whole = prepared(), prepared()
    qc.calibrate(whole, data())
    qc.calibrate(program, data()[:3])
    with pytest.raises(Stop):
        qc.calibrate(program, _then_stop(data()[3:5]), checkpoint=tmp_path / "file")
    again = prepared()
    qc.calibrate(again, data()[:3])
    qc.calibrate(again, data()[3:], checkpoint=tmp_path / "file")
    assert again.plan.batches == BATCHES
    assert digest(again) == digest(whole)


def _then_stop(batches: list[Tensor]) -> Iterator[Tensor]:
    yield from batches
    raise Stop


def test_a_finished_checkpoint_runs_nothing_again(tmp_path: Path) -> None:
    first, second = prepared(), prepared()
    qc.calibrate(first, data(), checkpoint=tmp_path / "file")
    told: list[int] = []
    qc.calibrate(second, data(), checkpoint=tmp_path / "file", progress=lambda done, total: told.append(done))
    assert told == [BATCHES]
    assert digest(first) == digest(second)


def other_weights() -> qc.Program:
    copy = captured().clone()
    next(copy.root.parameters()).data[0] += 1e-3
    return qc.prepare(copy, observing("mse"))


REFUSED: dict[str, Callable[[], qc.Program]] = {
    "another spec": lambda: prepared("percentile"),
    "other weights": other_weights,
    "another config": lambda: qc.prepare(captured(), observing("mse"), config=qc.QuantConfig().set("conv2", qc.FLOAT)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_checkpoint_of_something_else_is_refused_and_kept(what: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    qc.calibrate(prepared("mse"), data(2), checkpoint=file)
    before = file.read_bytes()
    with pytest.raises(CalibrationError, match="of another calibration") as found:
        qc.calibrate(REFUSED[what](), data(2), checkpoint=file)
    assert str(file) in str(found.value.where)
    assert found.value.advice
    assert file.read_bytes() == before


def test_data_shorter_than_the_checkpoint_is_refused(tmp_path: Path) -> None:
    qc.calibrate(prepared(), data(5), checkpoint=tmp_path / "file")
    with pytest.raises(CalibrationError, match="has 5 batches, and the data ended after 3"):
        qc.calibrate(prepared(), data(3), checkpoint=tmp_path / "file")


def test_a_damaged_checkpoint_is_an_error_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "file"
    qc.calibrate(prepared(), data(2), checkpoint=file)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(LoadError):
        qc.calibrate(prepared(), data(), checkpoint=file)
    with pytest.raises(CalibrationError, match="every 0 batches"):
        qc.calibrate(prepared(), data(), checkpoint=tmp_path / "other", every=0)


def test_another_number_of_threads_is_said(tmp_path: Path) -> None:
    qc.calibrate(prepared("minmax"), data(2), checkpoint=tmp_path / "file")
    torch.set_num_threads(2)
    report = qc.calibrate(prepared("minmax"), data(3), checkpoint=tmp_path / "file")
    assert any("the last bits may differ" in note for note in report.notes)


def test_a_process_killed_in_the_middle_leaves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    file, out = tmp_path / "seen.safetensors", tmp_path / "digest"
    command = [sys.executable, "-m", "tests.support.calibration", str(out), "--checkpoint", str(file), "--hang-at", "4"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        deadline = time.monotonic() + 120
        while not file.exists() or Statistics.load(file).notes["batches"] < 4:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "digest.0").exists()
    resumed, whole = prepared(), prepared()
    ran: list[int] = []

    def stream() -> Iterator[Tensor]:
        for index in range(BATCHES):
            ran.append(index)
            yield batch(index)

    report = qc.calibrate(resumed, stream(), checkpoint=file)
    qc.calibrate(whole, data())
    assert ran == list(range(BATCHES))
    assert "4 batches from the checkpoint" in report.notes
    assert digest(resumed) == digest(whole)
