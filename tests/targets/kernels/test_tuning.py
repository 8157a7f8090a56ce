"""`tune=True`: kernels are timed on this machine, and the times remembered in a file."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import quantc as qc
from quantc.errors import InputError
from quantc.targets.kernels import tuning
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.tuning import Times
from tests.support.toy_kernels import AsWritten, chosen, offer_toys, program


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    return offer_toys(monkeypatch, tmp_path)


def test_tuning_takes_the_fastest_and_remembers(target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = qc.lower(program(), target, tune=True)
    assert chosen(first) == [("quick", "measured"), ("quick", "measured")]
    assert {type(kernel) for kernel in first.module.modules() if isinstance(kernel, Kernel)} == {AsWritten}
    times = next(row.microseconds for row in first.placed if row.op == "linear")
    assert times["slow"] > 2500 > times["quick"]
    found = json.loads((tmp_path / tuning.FILE).read_text())["times"]
    assert sum(" | whole | " in key for key in found) == 2  # as measured, and as the table has it
    kept = [key for key in found if " | whole | " not in key]
    assert len(kept) == 4
    assert all("linear, 5 ×" in key and torch.__version__ in key and "1 threads" in key for key in kept)
    assert all("quantc " in key for key in kept)

    monkeypatch.setattr(tuning, "measure", lambda *args: pytest.fail("it was measured before"))
    again = qc.lower(program(), target, tune=True)
    assert chosen(again) == [("quick", "remembered"), ("quick", "remembered")]


def test_other_sizes_are_measured_anew(target: str, tmp_path: Path) -> None:
    qc.lower(program(dynamic=True), target, tune=True)
    lowered = qc.lower(program(dynamic=True), target, tune=(torch.randn(3, 8),))
    assert {row.chosen for row in lowered.placed if row.op == "linear"} == {"measured"}
    assert lowered.to_data()["ops"][1]["work"].startswith("linear, 3 × ")


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"a": "b"}', '{"a": 2.5}'])
def test_a_cache_that_cannot_be_read_is_written_anew(target: str, content: str, tmp_path: Path) -> None:
    (tmp_path / tuning.FILE).write_text(content)
    with pytest.warns(UserWarning, match="is not used"):
        qc.lower(program(), target, tune=True)
    found = json.loads((tmp_path / tuning.FILE).read_text())["times"]
    assert sum(" | whole | " not in key for key in found) == 4


def test_a_folder_that_cannot_be_written_is_told_before_the_timing(
    target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("QUANTC_CACHE", str(tmp_path / "file" / "below"))
    measure, told = tuning.measure, []

    def measured_after(*args: Any) -> Any:
        told.append(len(caught))
        return measure(*args)

    monkeypatch.setattr(tuning, "measure", measured_after)
    with pytest.warns(UserWarning, match="are not kept in .*: Not a directory") as caught:
        lowered = qc.lower(program(), target, tune=True)
    assert chosen(lowered) == [("quick", "measured"), ("quick", "measured")]
    assert told == [1]


def test_what_others_wrote_in_the_meantime_is_kept(target: str, tmp_path: Path) -> None:
    one, other = Times.remembered(), Times.remembered()
    one.put("a", 1.0)
    other.put("b", 2.0)
    threads = [threading.Thread(target=times.write) for times in (one, other)]
    one.write()
    other.write()
    assert Times.remembered().known == {"a": 1.0, "b": 2.0}
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Times.remembered().known == {"a": 1.0, "b": 2.0}
    assert [path.name for path in tmp_path.iterdir()] == [tuning.FILE]


def test_without_inputs_there_is_nothing_to_time(target: str) -> None:
    made = program()
    made.example_inputs = None
    with pytest.raises(InputError, match="nothing to time kernels on"):
        qc.lower(made, target, tune=True)
    assert chosen(qc.lower(made, target, tune=(torch.randn(5, 8),)))[0][1] == "measured"


def test_inputs_that_do_not_fit_are_refused(target: str) -> None:
    with pytest.raises(InputError):
        qc.lower(program(), target, tune=(torch.randn(5, 9),))
