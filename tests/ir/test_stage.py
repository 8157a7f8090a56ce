"""The progress of a program."""

from __future__ import annotations

from quantc.ir import program
from quantc.ir.stage import LogEntry, Stage


def test_stages_follow_one_another_and_have_labels() -> None:
    assert [stage.label for stage in sorted(Stage)][:3] == ["captured", "canonical", "fused"]
    assert Stage.QUANTIZED < Stage.LOWERED < Stage.PLACED


def test_stages_and_entries_are_found_beside_the_program_too() -> None:
    assert (program.Stage, program.LogEntry) == (Stage, LogEntry)


def test_log_entries_read_with_their_notes() -> None:
    assert str(LogEntry("fold", 0.0015, True, ("two norms",))) == "fold: changed, 1.5 ms\n  two norms"
    assert str(LogEntry("fold", 0.0, False)) == "fold: no change, 0.0 ms"
