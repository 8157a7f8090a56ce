"""Which kernel runs an op where several could: by the table, by timing, by what was timed before."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import InputError
from quantc.targets.kernels import costs, kernel_table, placement, tuning
from quantc.targets.kernels.kernel import Kernel, Work
from quantc.targets.kernels.kernel_table import Call
from quantc.targets.kernels.program_race import fastest
from quantc.targets.kernels.tuning import Times


@torch.library.custom_op("quantc_tests::wait", mutates_args=())
def wait(x: Tensor, seconds: float) -> Tensor:
    """A tensor after a while. It is an op, since Python between ops does not run where these are recorded."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return x.clone()


class AsWritten(Kernel):
    """Runs an op of the integer form as it is, after a while."""

    name: ClassVar[str] = "quick"
    family: ClassVar[str] = "torch"
    seconds: ClassVar[float] = 0.0

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.target: Any = call.node.target
        self.rest = tuple(list(call.arguments.values())[1:])
        self.outputs = call.tensor("w").shape[0]

    def pack(self) -> Any:
        return ()

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return self.target(wait(inputs[0], self.seconds), *self.rest)

    def work(self, *inputs: Tensor) -> Work:
        x = inputs[0]
        return Work("linear", x.numel() // x.shape[-1], (x.shape[-1], self.outputs))


class Slow(AsWritten):
    name: ClassVar[str] = "slow"
    family: ClassVar[str] = "onednn"
    seconds: ClassVar[float] = 0.003


class InFloat(AsWritten):
    name: ClassVar[str] = "in float"
    family: ClassVar[str] = "float32"
    computes_in_float: ClassVar[bool] = True


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A target with three kernels for one op, the slowest offered first, and a cache of its own."""
    monkeypatch.setenv("QUANTC_CACHE", str(tmp_path))
    monkeypatch.setitem(kernel_table.KERNELS, "toy", {"linear": [Slow, AsWritten, InFloat]})
    torch.set_num_threads(1)
    return "toy"


def program(dynamic: bool = False) -> qc.Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).eval()
    x = torch.randn(5, 8)
    shapes = ({0: torch.export.Dim("rows")},) if dynamic else None
    return qc.quantize(model, (x,), [(x,)], dynamic_shapes=shapes).program


def chosen(lowered: qc.Lowered) -> list[tuple[str, str]]:
    return [(row.kernel, row.chosen) for row in lowered.placed if row.op == "linear"]


def given_table(monkeypatch: pytest.MonkeyPatch, *rows: tuple[str, int, tuple[int, int], dict[str, float]]) -> None:
    measured: dict[tuple[str, int], tuple[costs.Measured, ...]] = {}
    for kind, size, channels, times in rows:
        key = (kind, len(channels))
        measured[key] = (*measured.get(key, ()), costs.Measured(Work(kind, size, channels), times))
    monkeypatch.setattr(costs, "measured", lambda target: measured)


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


def test_the_whole_has_the_last_word(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are the fastest each by itself need not be so together."""
    seen: list[dict[str, Any]] = []

    def raced(forms: dict[str, Any], inputs: Any) -> dict[str, float]:
        seen.append({name: [float(part.sum()) for part in run(*inputs)] for name, run in forms.items()})
        return {name: 1.0 if name == "table" else 2.0 for name in forms}

    monkeypatch.setattr(placement, "race", raced)
    lowered = qc.lower(program(), target, tune=True)
    assert list(seen[0]) == ["measured", "table"]
    assert seen[0]["measured"] == pytest.approx(seen[0]["table"])
    assert chosen(lowered) == [("slow", "whole"), ("slow", "whole")]
    assert set(lowered.choices.values()) == {"slow"}
    assert chosen(qc.lower(program(), target, tune=True)) == [("slow", "whole"), ("slow", "whole")]
    assert len(seen) == 1  # remembered


def test_chance_does_not_decide() -> None:
    assert fastest({"first": 100.0, "second": 99.0}) == "first"
    assert fastest({"first": 100.0, "second": 97.0, "third": 96.0}) == "second"


def test_other_sizes_are_measured_anew(target: str, tmp_path: Path) -> None:
    qc.lower(program(dynamic=True), target, tune=True)
    lowered = qc.lower(program(dynamic=True), target, tune=(torch.randn(3, 8),))
    assert {row.chosen for row in lowered.placed if row.op == "linear"} == {"measured"}
    assert lowered.to_data()["ops"][1]["work"].startswith("linear, 3 × ")


def test_float_is_taken_only_where_it_is_allowed(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsWritten, "seconds", 0.001)
    monkeypatch.setattr(InFloat, "seconds", 0.0, raising=False)
    assert chosen(qc.lower(program(), target, tune=True))[0][0] == "quick"
    assert chosen(qc.lower(program(), target, tune=True, allow_float=True))[0][0] == "in float"


def test_the_choice_changes_no_numbers(target: str) -> None:
    made = program()
    x = torch.randn(5, 8)
    one, other = qc.lower(made, target), qc.lower(made, target, tune=True)
    assert chosen(one) != chosen(other)
    assert torch.equal(one(x), other(x))


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


def test_the_tables_that_are_shipped_are_sound() -> None:
    for name in kernel_table.KERNELS:
        for rows in costs.measured(name).values():
            for row in rows:
                assert row.work.size > 0
                assert row.microseconds
                assert all(time > 0 for time in row.microseconds.values())
                assert costs.nearest(name, row.work) is not None
