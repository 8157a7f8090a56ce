"""A model of the user as a task to benchmark: its batches, and those that are held out."""

from __future__ import annotations

import pytest
import torch

from quantc.bench.models import COUNT
from quantc.cli.bench_task import MAX_BATCHES, own_task
from quantc.errors import DataError, LoadError, ModeError
from tests.support import cli_sources as sources

HERE = sources.HERE


def given(monkeypatch: pytest.MonkeyPatch, count: int) -> str:
    monkeypatch.setattr(sources, "listed", [torch.full((2, 4), float(number)) for number in range(count)])
    return f"{HERE}:listed"


def numbers(batches: object) -> list[float]:
    return [float(batch[0][0, 0]) for batch in batches]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("count", "held"), [(2, 1), (7, 1), (8, 2), (MAX_BATCHES, 4)])
def test_the_last_quarter_is_held_out(monkeypatch: pytest.MonkeyPatch, count: int, held: int) -> None:
    task, notes = own_task(f"{HERE}:plain", given(monkeypatch, count), "auto")
    assert numbers(task.calibration) == [float(number) for number in range(count - held)]
    assert numbers(task.unseen) == [float(number) for number in range(count - held, count)]
    assert notes == ()


def test_of_many_batches_the_first_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    task, _ = own_task(f"{HERE}:plain", given(monkeypatch, MAX_BATCHES + 9), "auto")
    assert len(task.calibration) + len(task.unseen) == MAX_BATCHES


def test_one_batch_serves_for_both_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    task, (note,) = own_task(f"{HERE}:plain", given(monkeypatch, 1), "auto")
    assert numbers(task.calibration) == numbers(task.unseen) == [0.0]
    assert "one batch" in note


def test_without_batches_it_is_noise_and_that_is_said() -> None:
    task, (note,) = own_task(f"{HERE}:plain", None, "auto")
    assert "noise" in note
    assert len(task.calibration) == len(task.unseen) == COUNT
    assert not torch.equal(task.calibration[0][0], task.unseen[0][0])


def test_batches_that_come_with_the_model_are_used() -> None:
    task, notes = own_task(f"{HERE}:complete", None, "auto")
    assert notes == ()
    seen = [batch[0] for batch in (*task.calibration, *task.unseen)]
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(seen, sources.batches(), strict=True))


def test_a_program_is_handed_on_as_it_was_captured() -> None:
    task, _ = own_task(f"{HERE}:fixed", None, "auto")
    assert task.program is sources.fixed()
    module, _ = own_task(f"{HERE}:plain", None, "auto")
    assert module.program is None


@pytest.mark.parametrize(
    ("source", "kind", "word"),
    [("quantized", LoadError, "quantized"), ("training", ModeError, "training"), ("named", LoadError, "names")],
)
def test_what_not_all_contenders_take_is_refused(source: str, kind: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word):
        own_task(f"{HERE}:{source}", None, "auto")


def test_batches_by_name_and_no_batches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "listed", [{"input": torch.ones(2, 4)}])
    with pytest.raises(LoadError, match="names"):
        own_task(f"{HERE}:plain", f"{HERE}:listed", "auto")
    monkeypatch.setattr(sources, "listed", [])
    with pytest.raises(DataError, match="no batches"):
        own_task(f"{HERE}:plain", f"{HERE}:listed", "auto")
