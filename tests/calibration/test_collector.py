"""Statistics collected while a calibration runs: the same bits for any split, order of merging, interruption and file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.calibration.collect import Collect
from quantc.calibration.collector import MOST
from quantc.errors import CalibrationError, DataError
from quantc.ir.program import Program
from quantc.observe import Gram, Moments, Reservoir, Statistics
from tests.support.calibration import (
    BATCHES,
    batch,
    captured,
    data,
    digest,
    digest_of_collected,
    prepared,
    small,
    torchrun,
)
from tests.support.paths import ROOT

ALL = ["moments", "gram", "reservoir{rows=7}", "fisher"]
TEXT = ",".join(ALL)


def whole() -> Program:
    program = prepared()
    qc.calibrate(program, data(), collect=ALL)
    return program


def test_nothing_is_collected_unless_asked_for(tmp_path: Path) -> None:
    program, other = prepared(), prepared()
    report = qc.calibrate(program, data(), checkpoint=tmp_path / "file")
    assert program.plan.collected == {}
    assert report.notes == ()
    assert "collect" not in Statistics.load(tmp_path / "file").notes
    qc.calibrate(other, data(), collect="recover")
    assert digest(other) == digest(program)  # ranges are not touched
    assert qc.convert(other).plan.collected == {}


def test_grams_are_those_of_eager_torch() -> None:
    program = prepared()
    qc.calibrate(program, data(), collect=Collect(statistics="gram,moments", effort=100.0))
    assert sorted(program.plan.collected) == [
        "gram mean:out0",
        "gram relu:out0 window 3x3 padding 1x1",
        "gram x:out0 window 3x3 padding 1x1",
        "moments mean:out0",
        "moments relu:out0 window 3x3 padding 1x1",
        "moments x:out0 window 3x3 padding 1x1",
    ]
    model = small()
    for half, batches in (("even", data()[::2]), ("odd", data()[1::2])):
        first = torch.relu(model.conv1(torch.cat(batches)))  # type: ignore[operator]
        patches = nn.functional.unfold(first.detach(), 3, padding=1).transpose(1, 2).reshape(-1, 72).double()
        gram = getattr(program.plan.collected["gram relu:out0 window 3x3 padding 1x1"], half)
        moments = getattr(program.plan.collected["moments relu:out0 window 3x3 padding 1x1"], half)
        assert isinstance(gram, Gram)
        assert isinstance(moments, Moments)
        assert gram.seen == moments.seen == len(patches)
        assert torch.allclose(gram.matrix()[0], patches.T @ patches, rtol=1e-4)
        assert torch.allclose(moments.mean()[0], patches.mean(0), rtol=1e-3)
        assert torch.equal(moments.mean(), gram.mean())


def test_fewer_rows_for_less_effort() -> None:
    program = prepared()
    qc.calibrate(program, data(), collect=Collect(effort=0.5))
    halves = program.plan.collected["gram relu:out0 window 3x3 padding 1x1"]
    assert halves.seen == BATCHES * 72  # of 128: more than half the layer's own 8 outputs, as there are 72 inputs
    program = prepared()
    qc.calibrate(program, [torch.cat([each] * 8) for each in data()], collect=Collect(effort=5.0))
    rows = 8 * 2 * 8 * 8
    assert program.plan.collected["gram relu:out0 window 3x3 padding 1x1"].seen == BATCHES * -(-rows * 8 * 5 // 72)


def test_moments_alone_take_few_rows() -> None:
    program = prepared()
    many = [torch.cat([each] * 40) for each in data(2)]
    qc.calibrate(program, many, collect="moments")
    seen = {name: halves.seen for name, halves in program.plan.collected.items()}
    assert seen["moments relu:out0 window 3x3 padding 1x1"] == 2 * MOST
    assert seen["moments mean:out0"] == 2 * 80  # all rows there are


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_parts_merged_from_files_have_the_same_bits(shards: int, tmp_path: Path) -> None:
    paths = [tmp_path / f"{part}.safetensors" for part in range(shards)]
    for part, path in enumerate(paths):
        qc.calibrate(prepared(), data(), collect=ALL, shard=(part, shards)).statistics.save(path)
    merged = prepared()
    qc.merge_statistics(merged, reversed(paths))
    assert merged.plan.batches == BATCHES
    assert digest_of_collected(merged) == digest_of_collected(whole())
    assert digest(merged) == digest(whole())


@pytest.mark.parametrize("part", [(3, 3), (-1, 2), (0, 0), (0.0, 2), (1,)])
def test_parts_that_are_none(part: tuple[int, int]) -> None:
    with pytest.raises(CalibrationError, match="is not a part of the data"):
        qc.calibrate(prepared(), data(), shard=part)


def test_parts_collected_differently_are_refused() -> None:
    parts = [qc.calibrate(prepared(), data(2), collect=what).statistics for what in ("gram", "moments")]
    with pytest.raises(CalibrationError, match="some have 'gram"):
        qc.merge_statistics(prepared(), parts)


def test_calibrating_again_adds(tmp_path: Path) -> None:
    program = prepared()
    for some in (data()[:1], data()[1:4], data()[4:]):
        qc.calibrate(program, some, collect=ALL[:2])
    again = prepared()
    qc.calibrate(again, data(), collect=ALL[:2])
    assert digest_of_collected(program) == digest_of_collected(again)


class Stop(Exception):  # noqa: N818 - a stand-in for whatever stops a process
    pass


def until(count: int) -> Iterator[Tensor]:
    yield from data(count)
    raise Stop


@pytest.mark.parametrize("every", [1, 2, 100])
def test_an_interrupted_collection_goes_on_with_the_same_bits(every: int, tmp_path: Path) -> None:
    file, program = tmp_path / "seen", prepared()
    with pytest.raises(Stop):
        qc.calibrate(program, until(5), checkpoint=file, every=every, collect=ALL)
    assert program.plan.collected == {}
    with pytest.raises(CalibrationError, match="its collect is"):
        qc.calibrate(prepared(), data(), checkpoint=file)
    qc.calibrate(program, data(), checkpoint=file, collect=ALL)
    assert digest_of_collected(program) == digest_of_collected(whole())


def test_after_an_error_the_whole_batches_count() -> None:
    program, expected = prepared(), prepared()
    with pytest.raises(Stop):
        qc.calibrate(program, until(5), collect=ALL)
    qc.calibrate(expected, data(5), collect=ALL)
    assert digest_of_collected(program) == digest_of_collected(expected)


def test_a_collection_interrupted_while_a_batch_is_added_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, file = prepared(), tmp_path / "seen"
    update, calls = Gram.update, []

    def stopping(self: Gram, x: Tensor, *, batch: int = 0, where: str = "") -> None:
        calls.append(batch)
        if calls.count(4) == 2:
            raise KeyboardInterrupt
        update(self, x, batch=batch, where=where)

    monkeypatch.setattr(Gram, "update", stopping)
    with pytest.raises(KeyboardInterrupt):
        qc.calibrate(program, data(), collect="gram")
    assert (program.plan.batches, program.plan.collected) == (0, {})
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        qc.calibrate(program, data(), collect="gram", checkpoint=file, every=2)
    monkeypatch.undo()
    assert Statistics.load(file).notes["batches"] == 4
    qc.calibrate(program, data(), collect="gram", checkpoint=file)
    again = prepared()
    qc.calibrate(again, data(), collect="gram")
    assert digest_of_collected(program) == digest_of_collected(again)


def test_a_killed_process_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    file = tmp_path / "seen"
    command = [sys.executable, "-m", "tests.support.calibration", str(tmp_path / "out"), "--collect", TEXT]
    command += ["--checkpoint", str(file), "--hang-at", "4"]
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
    resumed = prepared()
    qc.calibrate(resumed, data(), checkpoint=file, collect=TEXT)
    assert digest_of_collected(resumed) == digest_of_collected(whole())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_processes_end_with_the_bits_of_one(processes: int, tmp_path: Path) -> None:
    expected = f"{BATCHES} {digest(whole())} {digest_of_collected(whole())}"
    assert torchrun(processes, tmp_path / "out", "--collect", TEXT) == [expected] * processes


def test_statistics_and_programs_are_saved_with_what_was_collected(tmp_path: Path) -> None:
    program = prepared()
    report = qc.calibrate(program, data(), collect=ALL)
    report.statistics.save(tmp_path / "seen.safetensors")
    used = prepared("minmax")
    qc.use_statistics(used, tmp_path / "seen.safetensors")
    assert digest_of_collected(used) == digest_of_collected(program)
    program = qc.prepare(captured(), "x86")
    qc.calibrate(program, data(), collect=ALL)
    program.save(tmp_path / "program.qc")
    loaded = qc.load(tmp_path / "program.qc")
    assert isinstance(loaded, Program)
    assert digest_of_collected(loaded) == digest_of_collected(program) == digest_of_collected(program.clone())
    qc.calibrate(loaded, data(1), collect=ALL)
    assert loaded.plan.collected["gram mean:out0"].seen > program.plan.collected["gram mean:out0"].seen


def test_a_reservoir_holds_rows_of_the_data() -> None:
    program = prepared()
    qc.calibrate(program, data(), collect="reservoir{rows=7}")
    sample = program.plan.collected["reservoir x:out0 window 3x3 padding 1x1"].even
    assert isinstance(sample, Reservoir)
    patches = nn.functional.unfold(torch.cat(data()[::2]), 3, padding=1).transpose(1, 2).reshape(-1, 27)
    assert sample.rows is not None
    assert sample.rows.shape == (1, 7, 27)
    assert all(bool((patches == row).all(1).any()) for row in sample.rows[0])


def test_layers_that_read_one_tensor_share_it() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 8)
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.table(x)
            out: Tensor = self.q(y) @ self.k(y).transpose(1, 2).repeat(1, 2, 1)
            return out

    ids = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(0))
    config = qc.QuantConfig().set_op("embedding", qc.INT8_WEIGHT)
    program = qc.prepare(qc.capture(Heads().eval(), (ids,)), "x86", config=config)
    qc.calibrate(program, [(ids,)], collect="gram,tokens")
    assert sorted(name.partition(" ")[0] for name in program.plan.collected) == ["gram", "tokens"]
    tokens = program.plan.collected["tokens x:out0"].even
    assert tokens.to_state().tensors["counts"].tolist() == torch.bincount(ids.reshape(-1)).tolist()


def test_weight_only_programs_are_looked_at_too() -> None:
    program = qc.prepare(captured(), "x86", config=qc.QuantConfig().set("*", qc.INT8_WEIGHT_ONLY))
    qc.calibrate(program, data(2), collect="gram")
    assert "gram mean:out0" in program.plan.collected
    with pytest.raises(DataError, match="NaN"):
        qc.calibrate(program, [batch(0) * float("nan")], collect="gram")
