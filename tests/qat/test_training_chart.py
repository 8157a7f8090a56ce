"""The chart of a training: curves and lines where their values are, and text that cannot break the SVG."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quantc.errors import SaveError
from quantc.qat.training_chart import HEIGHT, LEFT, RIGHT, WIDTH, Curve, chart, write_plot


def test_the_plot_is_an_svg(tmp_path: Path) -> None:
    path = tmp_path / "plots" / "training.svg"
    write_plot(path, "a <training>", [Curve("accuracy", [90.0, 95.0, 99.0], each=10)], {"float": 99.5})
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    lines = [part for part in root.iter() if part.tag.endswith("polyline")]
    assert len(lines[0].attrib["points"].split()) == 3
    with pytest.raises(SaveError, match="png"):
        write_plot(tmp_path / "training.png", "", [Curve("", [1.0])], {})


def points_of(text: str) -> list[list[tuple[float, float]]]:
    """The points of each curve."""
    lines = [part for part in ElementTree.fromstring(text).iter() if part.tag.endswith("polyline")]
    pairs = [[point.split(",") for point in line.attrib["points"].split()] for line in lines]
    return [[(float(x), float(y)) for x, y in line] for line in pairs]


def test_higher_values_lie_higher_and_steps_go_to_the_right() -> None:
    (points,) = points_of(chart("t", [Curve("loss", [1.0, 3.0, 2.0])], {}))
    heights = [y for _, y in points]
    assert heights[1] < heights[2] < heights[0]  # y counts down from the top
    assert heights[2] == pytest.approx((heights[0] + heights[1]) / 2, abs=0.1)
    assert all(left < right for (left, _), (right, _) in pairwise(points))
    assert points[-1][0] == WIDTH - RIGHT


def test_a_curve_of_fewer_values_spans_the_same_steps() -> None:
    each, every_third = points_of(chart("t", [Curve("a", [1.0] * 6), Curve("b", [2.0, 2.0], each=3)], {}))
    assert every_third == [(x, every_third[0][1]) for x, _ in (each[2], each[5])]


def test_lines_are_drawn_at_their_height_across_the_chart() -> None:
    text = chart("t", [Curve("a", [0.0, 10.0])], {"float": 5.0})
    (points,) = points_of(text)
    dashed = [part for part in ElementTree.fromstring(text).iter() if "stroke-dasharray" in part.attrib]
    assert [(float(line.attrib["x1"]), float(line.attrib["x2"])) for line in dashed] == [(LEFT, WIDTH - RIGHT)]
    assert float(dashed[0].attrib["y1"]) == pytest.approx((points[0][1] + points[1][1]) / 2, abs=0.1)


def test_values_that_are_all_the_same_stay_on_the_paper() -> None:
    (points,) = points_of(chart("t", [Curve("a", [7.0, 7.0])], {}))
    assert all(0 < y < HEIGHT for _, y in points)


def test_names_with_markup_are_text() -> None:
    root = ElementTree.fromstring(chart("a <b> & c", [Curve("<x>", [1.0, 2.0])], {'"y" & <z>': 1.5}))
    texts = [part.text for part in root.iter() if part.text]
    assert {"a <b> & c", "<x>", '"y" & <z>'} <= set(texts)
