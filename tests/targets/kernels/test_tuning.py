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
from quantc.files.sealed_data import seal
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


# -- times -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "expected"),
    [([5.0], 5.0), ([3.0, 1.0, 2.0], 1.0), ([8.0, 1.0, 2.0, 9.0, 7.0, 6.0, 5.0, 4.0], 1.5), ([4.0] * 40, 4.0)],
)
def test_the_lowest_quarter_of_the_times_counts(times: list[float], expected: float) -> None:
    assert tuning.low(times) == expected


@pytest.mark.usefixtures("target")
def test_new_times_come_before_known_ones_and_outlive_the_process(tmp_path: Path) -> None:
    times = Times.remembered()
    assert times.path == tmp_path / tuning.FILE
    assert times.get("a") is None
    times.known["a"] = 1.0
    assert times.get("a") == 1.0
    times.put("a", 2.006)
    assert times.get("a") == 2.01
    times.put(None, 5.0)
    assert times.get(None) is None
    times.write()
    assert Times.remembered().get("a") == 2.01


@pytest.mark.usefixtures("target")
def test_a_kernel_is_known_by_its_name_its_work_and_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times()
    key = times.key_of("quick", "linear, 5 × 8→6")
    assert key.startswith(tuning.processor())
    assert key.endswith("| quick | linear, 5 × 8→6")
    assert torch.__version__ in key
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert "7 threads" in times.key_of("quick", "linear, 5 × 8→6")
    assert times.key(Unmeasured(), [torch.zeros(1)]) is None


class Unmeasured(Kernel):
    """A kernel that does not say what it has to do."""

    name = "unmeasured"

    def pack(self) -> Any:
        return ()

    def run(self, packed: Any, *inputs: Any) -> Any:
        return inputs[0]


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("times", [{"a": -1.0}, {"a": "fast"}, {"a": 3}, [1.0]])
def test_a_file_of_other_things_than_times_is_not_used(times: Any, tmp_path: Path) -> None:
    content = seal({"format": tuning.FORMAT, "times": times})
    (tmp_path / tuning.FILE).write_text(json.dumps(content), encoding="utf-8")
    with pytest.warns(UserWarning, match="no times of kernels"):
        assert Times.remembered().known == {}


@pytest.mark.usefixtures("target")
def test_nothing_is_written_where_nothing_is_new(tmp_path: Path) -> None:
    Times.remembered().write()
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUANTC_CACHE", str(tmp_path))
    assert tuning.cache_folder() == tmp_path
    monkeypatch.setenv("QUANTC_CACHE", "")
    assert tuning.cache_folder().name == "quantc"
