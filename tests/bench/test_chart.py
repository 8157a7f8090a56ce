"""The bar chart of the benchmark, as SVG and as a page."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from quantc.bench.chart import MAX_LETTERS, chart, check_plot, write_plot
from quantc.bench.race import EAGER, Row
from quantc.errors import SaveError

ROWS = [
    Row("a <model>", EAGER, 2.0, 1.0, None, 1.0, 0.0),
    Row("a <model>", "quantc", 1.0, 2.0, 31.5, 0.25, 1.0),
    Row("a <model>", "openvino", reason="nncf & openvino are not installed"),
    Row("b", EAGER, 2.0, 1.0, None, 1.0, 0.0),
]


def test_the_chart_is_svg_with_bars_by_speed() -> None:
    root = ElementTree.fromstring(chart(ROWS))
    name = "{http://www.w3.org/2000/svg}"
    bars = [each for each in root.iter(f"{name}rect") if each.find(f"{name}title") is not None]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert len(widths) == 3
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    text = " ".join(each.text or "" for each in root.iter(f"{name}text"))
    for part in ("a <model>", "31.5 dB", "nncf & openvino are not installed"):
        assert part in text


def test_a_page_has_the_chart_and_the_table(tmp_path: Path) -> None:
    write_plot(tmp_path / "new" / "bench.html", ROWS, ("model", "note"), [("a <model>", "x & y")])
    page = (tmp_path / "new" / "bench.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "<td>a &lt;model&gt;</td><td>x &amp; y</td>" in page
    with pytest.raises(SaveError, match=r"\.svg"):
        write_plot(tmp_path / "bench.png", ROWS, (), ())


def test_colours_tell_quantc_the_float_model_and_others_apart() -> None:
    rows = [Row("m", name, 1.0, 1.0, 20.0) for name in (EAGER, "compile", "quantc", "quantc-tuned", "fx-x86")]
    root = ElementTree.fromstring(chart(rows))
    name = "{http://www.w3.org/2000/svg}"
    fills = [each.attrib["fill"] for each in root.iter(f"{name}rect") if each.find(f"{name}title") is not None]
    assert fills[0] == fills[1]
    assert fills[2] == fills[3]
    assert len(set(fills)) == 3


def test_long_reasons_are_cut() -> None:
    text = chart([Row("m", "other", reason="x" * 200)])
    assert "x" * (MAX_LETTERS - 1) + "…" in text
    assert "x" * MAX_LETTERS not in text


@pytest.mark.parametrize("name", ["bench.png", "bench", "bench.SVG"])
def test_files_in_other_forms_are_refused_before_hours_are_spent(name: str) -> None:
    with pytest.raises(SaveError, match=r"\.svg or a \.html"):
        check_plot(Path(name))
    for good in ("bench.svg", "bench.html"):
        check_plot(Path(good))


def test_a_chart_alone_has_no_table(tmp_path: Path) -> None:
    write_plot(tmp_path / "bench.svg", ROWS, ("model",), [("a",)])
    assert (tmp_path / "bench.svg").read_text(encoding="utf-8") == chart(ROWS)
