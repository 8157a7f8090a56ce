"""Bar chart of the benchmark: an SVG, or an HTML page with it and the table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from quantc.bench.race import EAGER, Row
from quantc.errors import SaveError
from quantc.files.atomic_file import write_text
from quantc.support.sqnr import format_sqnr

WIDTH, LABELS, NOTES, MARGIN = 960, 170, 190, 24
BAR, GAP, HEAD, BETWEEN = 16, 5, 30, 14
"""Heights: of a bar, between bars, of a model's name, between models."""
COLOURS = {"quantc": "#2f6fde", EAGER: "#8a8f98", "compile": "#8a8f98"}
OTHERS = "#c98a3b"
MAX_LETTERS = 95
STYLE = "text{font:13px system-ui,sans-serif;fill:#22262d}.model{font-weight:600}.dim{fill:#6b7280}"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>quantc bench</title><style>
body{{font:15px system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem;color:#22262d}}
table{{border-collapse:collapse;font-size:14px}}th,td{{padding:.2rem .7rem;text-align:left;border-bottom:1px solid #e5e7eb}}
svg{{max-width:100%;height:auto}}
</style></head><body><h1>quantc bench</h1>
{chart}
<table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table></body></html>
"""


def check_plot(path: Path) -> None:
    """Refuse a file that cannot be written, before hours are spent."""
    if path.suffix not in (".svg", ".html"):
        raise SaveError(
            f"unknown chart format {path.suffix or path.name!r}",
            where=f"--plot {path}",
            advice="name a .svg or a .html file; browsers and Inkscape make a .png of either",
        )


def write_plot(path: Path, rows: Sequence[Row], columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Write the chart; an HTML page has the table below it."""
    check_plot(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = chart(rows)
    if path.suffix == ".html":
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
        text = PAGE.format(chart=text, head=head, body=body)
    write_text(path, text)


def chart(rows: Sequence[Row]) -> str:
    """Bars of each contender's speedup over the float model, by model."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.model, []).append(row)
    widest = max([1.0, *(row.speed for row in rows if row.speed is not None)])
    scale = (WIDTH - LABELS - NOTES - MARGIN) / widest
    parts: list[str] = []
    top = MARGIN + HEAD
    for model, group in groups.items():
        parts.append(f'<text class="model" x="{MARGIN}" y="{top + 18}">{escape(model)}</text>')
        begin = top + HEAD
        for place, row in enumerate(group):
            parts.append(_bar(row, begin + place * (BAR + GAP), scale))
        top = begin + len(group) * (BAR + GAP) + BETWEEN
        once = LABELS + scale
        parts.append(
            f'<line x1="{once:.1f}" x2="{once:.1f}" y1="{begin - 4}" y2="{top - BETWEEN}" stroke="#22262d" '
            'stroke-dasharray="2 3"/>'
        )
    title = "times as fast as the float model in eager mode, one thread; SQNR against it"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}" role="img">'
        f"<title>{title}</title><style>{STYLE}</style>"
        f'<rect width="{WIDTH}" height="{top}" fill="#fff"/><text class="dim" x="{MARGIN}" y="{MARGIN + 8}">{title}</text>'
        f"{''.join(parts)}</svg>\n"
    )


def _bar(row: Row, y: float, scale: float) -> str:
    base = y + BAR - 3
    label = f'<text x="{LABELS - 8}" y="{base}" text-anchor="end">{escape(row.contender)}</text>'
    if row.speed is None:
        reason = row.reason if len(row.reason) <= MAX_LETTERS else f"{row.reason[: MAX_LETTERS - 1]}…"
        return f'{label}<text class="dim" x="{LABELS + 4}" y="{base}">{escape(reason)}</text>'
    width = row.speed * scale
    colour = COLOURS.get(row.contender.partition("-")[0], OTHERS)
    note = f"{row.speed:.2f}" + (f", {format_sqnr(row.sqnr)} dB" if row.sqnr is not None else "")
    title = f"<title>{escape(row.model)}, {escape(row.contender)}: {row.milliseconds:.2f} ms</title>"
    return (
        f'{label}<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colour}">{title}</rect>'
        f'<text class="dim" x="{LABELS + width + 6:.1f}" y="{base}">{note}</text>'
    )
