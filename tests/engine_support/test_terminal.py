"""Output: tables and colours on a terminal, plain lines in a pipe."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from quantc.support.terminal import Screen, plain_rows


def shown(*, terminal: bool, **environment: str) -> str:
    console = Console(file=StringIO(), force_terminal=terminal, width=60, _environ=environment, highlight=False)
    screen = Screen(console)
    screen.fields("a [bold]title", {"size": "3", "name": "[red]x[/red]"})
    screen.table("things", ("thing", "count"), [("one", "1"), ("[two]", "22")])
    screen.diff("= same\n- old\n+ new")
    screen.text("as it is [green]" + "x" * 80)
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def test_a_terminal_gets_tables_and_colours_and_a_pipe_plain_lines() -> None:
    plain, colourful = shown(terminal=False), shown(terminal=True, TERM="xterm-256color")
    bare = shown(terminal=True, TERM="xterm-256color", NO_COLOR="1")
    assert "\x1b[" not in plain
    assert "│" not in plain
    assert "\x1b[32m" in colourful
    assert "│" in colourful
    assert "\x1b[32m" not in bare, "NO_COLOR is honoured"
    for text in (plain, colourful, bare):
        assert "[red]x[/red]" in text, "markup in names is text"
        assert "as it is [green]" + "x" * 80 in text, "text is not wrapped"


def test_plain_rows_line_up() -> None:
    assert plain_rows(("a", "n"), [("long name", "1"), ("b", "100")]) == [
        "  a            n",
        "  long name    1",
        "  b          100",
    ]
    assert plain_rows(("a", "b"), []) == ["  a  b"]
