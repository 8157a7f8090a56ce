"""Progress of a long job: a bar on a terminal, plain lines in a pipe, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from quantc.errors import UnknownNameError, suggest

Told = Callable[[int, int | None], None]
"""Callback `(done, total)`; `total` is None if unknown."""
Style = Literal["auto", "bar", "lines", "silent"]
"""auto: a bar if stderr is a terminal, else silent."""
STYLES: tuple[Style, ...] = ("auto", "bar", "lines", "silent")

SECONDS_A_LINE = 5.0


@contextmanager
def show_progress(
    title: str, style: Style | Told, *, unit: str = "batches", console: Console | None = None
) -> Iterator[Told]:
    """Show the progress of the work in this context; yields the callback to report it to."""
    if callable(style):
        yield style
        return
    if style not in STYLES:
        advice = f"{suggest(style, STYLES, noun='ways')}; or give a function of (done, total)"
        raise UnknownNameError(f"unknown progress style {style!r}", where=f"progress={style!r}", advice=advice)
    console = Console(stderr=True, highlight=False) if console is None else console
    if style == "auto":
        style = "bar" if console.is_terminal else "silent"
    if style == "bar":
        with _bar(title, console) as told:
            yield told
        return
    lines = _Lines(title, console, unit)
    yield lines if style == "lines" else _ignored
    if style == "lines":
        lines.end()


def _ignored(done: int, total: int | None) -> None:
    """Callback for `silent`."""


@contextmanager
def _bar(title: str, console: Console) -> Iterator[Told]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Prints a line every few seconds, and one at the end."""

    def __init__(self, title: str, console: Console, unit: str) -> None:
        self.title, self.unit = title, unit
        self.console = console
        self.start = self.last = time.perf_counter()
        self.state: tuple[int, int | None] = (0, None)

    def __call__(self, done: int, total: int | None) -> None:
        self.state = (done, total)
        if time.perf_counter() - self.last >= SECONDS_A_LINE:
            self._write()

    def end(self) -> None:
        self._write()

    def _write(self) -> None:
        self.last = time.perf_counter()
        done, total = self.state
        of = f" of {total}" if total is not None else ""
        self.console.out(f"{self.title}: {done}{of} {self.unit}, {self.last - self.start:.1f} s", highlight=False)
