"""Terminal output: panels, tables and colours on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


class Screen:
    """The output of a command. `console` is rich's, which detects terminals and honours NO_COLOR."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = Console(file=sys.stdout, highlight=False) if console is None else console

    @property
    def is_terminal(self) -> bool:
        return self.console.is_terminal

    def text(self, text: str) -> None:
        """Print text verbatim, neither wrapped nor coloured."""
        self.console.out(text.removesuffix("\n"), highlight=False)

    def fields(self, title: str, rows: Mapping[str, str]) -> None:
        """Print name-value pairs."""
        if not self.is_terminal:
            self.text("\n".join([title, *(f"  {name}: {value}" for name, value in rows.items())]))
            return
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", justify="right", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in rows.items():
            grid.add_row(Text(name), Text(value))
        self.console.print(Panel(grid, title=Text(title, style="bold"), title_align="left", expand=False))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows under column heads; columns of numbers are right-aligned."""
        if not self.is_terminal:
            self.text("\n".join([title, *plain_rows(columns, rows)]))
            return
        table = Table(title=Text(title, style="bold"), title_justify="left", header_style="bold cyan")
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if _is_numeric(rows, index) else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self.console.print(table)

    def diff(self, text: str) -> None:
        """Print a diff; lines that start with + or - are highlighted on a terminal."""
        if not self.is_terminal:
            self.text(text)
            return
        styles = {"+": "green", "-": "red", "=": "bold", "@": "cyan", "~": "yellow"}
        for line in text.splitlines():
            self.console.print(Text(line, style=styles.get(line[:1], "")), soft_wrap=True)


def plain_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned text, columns two spaces apart."""
    cells = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    right = [_is_numeric(rows, index) for index in range(len(columns))]
    lines = []
    for row in cells:
        padded = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        )
        lines.append(f"  {'  '.join(padded)}".rstrip())
    return lines


def _is_numeric(rows: Sequence[Sequence[str]], index: int) -> bool:
    return bool(rows) and all(row[index].replace(".", "", 1).replace(",", "").isdigit() for row in rows)


def readable(count: float) -> str:
    """A byte count for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
