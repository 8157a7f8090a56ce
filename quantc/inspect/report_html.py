"""HTML report of a quantized model: one self-contained file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from quantc.files.output_paths import GENERATOR

STYLE = """
body{font:15px system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#22262d}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.3rem 1.2rem}dt{color:#6b7280}dd{margin:0;white-space:pre-line}
table{border-collapse:collapse;font-size:14px}th,td{padding:.2rem .7rem;text-align:left;border-bottom:1px solid #e5e7eb}
td.number{text-align:right;font-variant-numeric:tabular-nums}.bar{background:#2f6fde;height:.7rem;border-radius:2px}
summary{cursor:pointer;font-size:1.25rem;font-weight:600;margin:1.2rem 0 .5rem}.warning{color:#b45309;font-weight:600}
"""
FULL_BAR = 60.0
"""The dB of a full bar: about the best that 8 bits reach."""
BAR_PIXELS = 180


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the report."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    all_of_them: str
    """Python expression for all rows."""
    decibels: int | None = None
    """The column that a page shows as bars."""


def page(
    title: str, fields: Mapping[str, str], sections: Iterable[Section], warnings: Iterable[str], notes: Iterable[str]
) -> str:
    """The whole page; `fields` are the lines at the top."""
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in fields.items())
    warned = "".join(f'<p class="warning">{escape(text)}</p>' for text in warnings)
    noted = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}<title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n{warned}\n<dl>{lines}</dl>\n"
        f"{''.join(_section(section) for section in sections)}"
        f"{f'<h2>notes</h2><ul>{noted}</ul>' if noted else ''}\n</body></html>\n"
    )


def _section(section: Section) -> str:
    heads = [*section.columns, *([""] if section.decibels is not None else [])]
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "\n".join(_row(row, section.decibels) for row in section.rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
    return f"<details open><summary>{escape(section.title)}</summary>{table}</details>\n"


def _row(row: Sequence[str], decibels: int | None) -> str:
    cells = "".join(f"<td{' class=number' if _is_number(cell) else ''}>{escape(cell)}</td>" for cell in row)
    return f"<tr>{cells}{'' if decibels is None else f'<td>{_bar(row[decibels])}</td>'}</tr>"


def _is_number(cell: str) -> bool:
    return cell.replace(".", "", 1).removeprefix("-").isdigit()


def _bar(cell: str) -> str:
    """As long as the SQNR is high. What is equal has the longest; what has no number has none."""
    value = float(cell) if _is_number(cell) else FULL_BAR if cell == "equal" else 0.0
    width = round(BAR_PIXELS * min(max(value, 0.0), FULL_BAR) / FULL_BAR)
    return f'<div class="bar" style="width:{width}px"></div>'
