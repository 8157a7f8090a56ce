"""What became of each site, as text, cells and JSON."""

from __future__ import annotations

import json
import math

import quantc as qc
from quantc.inspect.recovery_report import HEAD, RecoveryReport
from quantc.ir.judgment import Judgment
from quantc.ir.program import LogEntry
from tests.support.recovery import linear_case

JUDGMENTS = (
    Judgment("a", "kept", 0.01, 0.001, "2 of 3 outputs"),
    Judgment("b", "kept", 0.01, 0.0),
    Judgment("c", "undone", 0.01, 0.02, "no better"),
    Judgment("d", "refused", reason="no data"),
)
REPORT = RecoveryReport.of(
    [LogEntry("calibrate", 1.0, True), LogEntry("round", 0.5, True, tuple(map(str, JUDGMENTS)), JUDGMENTS)]
)


def test_the_headline_counts() -> None:
    assert REPORT.headline == "round: 2 kept, 1 undone, 1 refused, +10.0 dB on average"
    assert RecoveryReport.of([LogEntry("calibrate", 1.0, True)]).headline == "nothing was fitted"


def test_every_site_has_a_line_and_a_row() -> None:
    lines = str(REPORT).splitlines()
    assert lines[0] == REPORT.headline
    assert lines[2:] == ["round:", *(f"  {each}" for each in JUDGMENTS)]
    assert REPORT.rows() == [
        ("a", "round", "kept", "20.00", "30.00", "2 of 3 outputs"),
        ("b", "round", "kept", "20.00", "inf", ""),
        ("c", "round", "undone", "20.00", "16.99", "no better"),
        ("d", "round", "refused", "", "", "no data"),
    ]
    assert all(len(row) == len(HEAD) for row in REPORT.rows())


def test_json_has_all_of_it() -> None:
    (found,) = json.loads(REPORT.to_json())
    assert found["pass"] == "round"
    assert [site["fate"] for site in found["sites"]] == ["kept", "kept", "undone", "refused"]
    assert [site["gain_dB"] for site in found["sites"]][1:] == [None, -10 * math.log10(2), None]
    assert found["sites"][0]["before"] == 0.01


def test_a_program_tells() -> None:
    better = qc.recover(linear_case().prepared(), progress="silent")
    report = better.recovery()
    assert [name for name, _ in report.passes[-3:]] == ["rescale", "round", "correct-bias"]
    assert all(judgment.site == "linear (0 : Linear)" for _, judgments in report.passes[-3:] for judgment in judgments)
    assert report.headline in str(report)
