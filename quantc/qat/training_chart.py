"""Line chart of a training, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from quantc.errors import SaveError
from quantc.files.atomic_file import write_text

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 60, 24, 56, 46
COLOURS = ("#2f6fde", "#c98a3b", "#3a8f5d")
DASHED = "#6b7280"
STYLE = "text{font:13px system-ui,sans-serif;fill:#22262d}.title{font-weight:600}.dim{fill:#6b7280}"
TICKS = 5


@dataclass(frozen=True)
class Curve:
    """Equidistant values: one every `each` steps."""

    name: str
    values: Sequence[float]
    each: int = 1


def write_plot(path: Path, title: str, curves: Sequence[Curve], lines: Mapping[str, float]) -> None:
    """Write a chart of curves over steps, with horizontal reference lines."""
    if path.suffix != ".svg":
        raise SaveError(
            f"unknown chart format {path.suffix or path.name!r}", where=str(path), advice="name a .svg file"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, chart(title, curves, lines))


def chart(title: str, curves: Sequence[Curve], lines: Mapping[str, float]) -> str:
    """The chart as SVG text."""
    heights = [*lines.values(), *(value for curve in curves for value in curve.values)]
    low, high = min(heights), max(heights)
    margin = (high - low or 1.0) * 0.08
    scale = _Scale(max(len(curve.values) * curve.each for curve in curves), low - margin, high + margin)
    parts = [f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>', *_axes(scale)]
    for name, value in lines.items():
        y = scale.y(value)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="{DASHED}" stroke-dasharray="5 4"/>'
        )
        parts.append(f'<text class="dim" x="{WIDTH - RIGHT}" y="{y - 5:.1f}" text-anchor="end">{escape(name)}</text>')
    for place, curve in enumerate(curves):
        colour = COLOURS[place % len(COLOURS)]
        points = [(scale.x((index + 1) * curve.each), scale.y(value)) for index, value in enumerate(curve.values)]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points] if len(points) < 50 else []
        parts.append(f'<text x="{LEFT}" y="{44 + 16 * place}" style="fill:{colour}">{escape(curve.name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img"><title>{escape(title)}</title><style>{STYLE}</style>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


@dataclass(frozen=True)
class _Scale:
    """From steps and values to places on the paper."""

    steps: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / self.steps, 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.low) / (self.high - self.low), 1)


def _axes(scale: _Scale) -> list[str]:
    floor = HEIGHT - BOTTOM
    parts = [f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}" stroke="#22262d"/>']
    for tick in range(TICKS):
        value = scale.low + (scale.high - scale.low) * tick / (TICKS - 1)
        parts.append(f'<text class="dim" x="{LEFT - 8}" y="{scale.y(value) + 4}" text-anchor="end">{value:.4g}</text>')
        step = round(scale.steps * tick / (TICKS - 1))
        parts.append(f'<text class="dim" x="{scale.x(step)}" y="{floor + 18}" text-anchor="middle">{step}</text>')
    parts.append(
        f'<text class="dim" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>'
    )
    return parts
