"""Progress of a job: a bar, lines, nothing, or a function of the caller's."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from quantc.errors import UnknownNameError
from quantc.support import progress
from quantc.support.progress import Style, show_progress


def told_to(style: Style, *, terminal: bool = False) -> str:
    """What is written of three batches of ten."""
    console = Console(file=StringIO(), force_terminal=terminal, width=100)
    with show_progress("working", style, console=console) as told:
        for done in range(4):
            told(done, 10)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_a_bar() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=100)
    with show_progress("calibrating", "auto", console=console) as told:
        told(3, 10)
        told(10, 10)
    assert isinstance(console.file, StringIO)
    assert "10/10" in console.file.getvalue()


def test_auto_is_a_bar_on_a_terminal_and_silent_elsewhere() -> None:
    assert "3/10" in told_to("auto", terminal=True)
    assert told_to("auto") == ""
    assert told_to("silent", terminal=True) == ""
    assert "3/10" in told_to("bar")


def test_lines_come_every_few_seconds_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told_to("lines").startswith("working: 3 of 10 batches, ")
    assert told_to("lines").count("\n") == 1
    monkeypatch.setattr(progress, "SECONDS_A_LINE", 0.0)
    assert [line.split(",")[0] for line in told_to("lines").splitlines()] == [
        "working: 0 of 10 batches",
        "working: 1 of 10 batches",
        "working: 2 of 10 batches",
        "working: 3 of 10 batches",
        "working: 3 of 10 batches",
    ]


def test_an_unknown_total_is_left_out() -> None:
    console = Console(file=StringIO(), width=100)
    with show_progress("working", "lines", console=console) as told:
        told(7, None)
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().startswith("working: 7 batches, ")


def test_a_function_is_told_itself() -> None:
    seen: list[tuple[int, int | None]] = []
    with show_progress("working", lambda done, total: seen.append((done, total))) as told:
        told(1, 2)
        told(2, None)
    assert seen == [(1, 2), (2, None)]


def test_another_style_is_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match="'loud'") as caught, show_progress("working", "loud"):  # type: ignore[arg-type]
        pass
    assert caught.value.advice is not None
    assert "silent" in caught.value.advice
