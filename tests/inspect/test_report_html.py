"""The report as a page: one file, whatever names it holds, with every row and with bars for decibels."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from quantc.files.output_paths import Output, check_outputs
from quantc.inspect.report_html import Section, page

HOSTILE = "<script>alert(\"1\")</script> & 'two'"
VOID = {"meta"}


class Read(HTMLParser):
    """The elements of a page, and that each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data)


def table(*rows: tuple[str, ...], decibels: int | None = None) -> Section:
    return Section("costs", ("node", "dB"), rows, "report.rows", decibels)


def test_a_page_is_well_formed_and_says_all_of_it() -> None:
    sections = [table(("conv", "31.5"), ("relu", "equal"), decibels=1), Section("left", ("why",), (("so",),), "rows")]
    read = Read(page("Net", {"size": "1 MB", "time": "2 s"}, sections, ["too far"], ["one note", "another"]))
    assert read.open == []
    for told in ("Net", "size", "1 MB", "time", "2 s", "costs", "conv", "31.5", "left", "so", "too far", "another"):
        assert told in read.texts
    assert (read.seen.count("table"), read.seen.count("tr"), read.seen.count("li")) == (2, 5, 2)


def test_what_looks_like_elements_is_text() -> None:
    read = Read(page(HOSTILE, {HOSTILE: HOSTILE}, [table((HOSTILE, HOSTILE))], [HOSTILE], [HOSTILE]))
    assert "script" not in read.seen
    assert read.texts.count(HOSTILE) == 8


def test_nothing_is_loaded_from_elsewhere_and_quantc_knows_its_page(tmp_path: Path) -> None:
    text = page("Net", {}, [table(("conv", "1.0"))], [], [])
    assert not re.search("https?:|src=|href=|@import|<script", text)
    assert "<ul>" not in text, "without notes there is no list of them"
    path = tmp_path / "report.html"
    path.write_text(text)
    check_outputs([Output("report", path, "page")], "here")


@pytest.mark.parametrize(
    ("cell", "pixels"),
    [
        ("60.0", 180),
        ("30", 90),
        ("0.0", 0),
        ("-12.5", 0),
        ("99.9", 180),
        ("equal", 180),
        ("", 0),
        ("NaN", 0),
        ("20.0", 60),
    ],
)
def test_a_bar_is_as_long_as_its_decibels_up_to_sixty(cell: str, pixels: int) -> None:
    text = page("Net", {}, [table(("conv", cell), decibels=1)], [], [])
    assert re.findall(r'class="bar" style="width:(\d+)px"', text) == [str(pixels)]


def test_a_table_without_decibels_has_no_bars() -> None:
    text = page("Net", {}, [table(("conv", "31.5"), ("relu", "n/a"))], [], [])
    assert 'class="bar"' not in text
    assert re.findall(r"<td class=number>([^<]*)</td>", text) == ["31.5"]
