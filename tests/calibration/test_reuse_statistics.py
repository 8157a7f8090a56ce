"""Calibrate once, decide later: other ranges and bit widths from saved statistics, without data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.errors import CalibrationError, LoadError, ObservationError
from quantc.ir.decisions import FLOAT
from quantc.observe import Statistics
from quantc.spec.spec import UINT8
from tests.support.calibration import captured, data, digest, prepared
from tests.support.small_backend import SMALL

LATER = [
    UINT8.but(observe="minmax"),
    UINT8.but(observe="percentile{percentile=99.0}"),
    UINT8.but(observe="mse"),
    UINT8.but(observe="entropy"),
    UINT8.but(observe="mse", qmax=15),
    UINT8.but(observe="l2norm"),
]


@pytest.mark.parametrize("spec", LATER, ids=str)
@pytest.mark.parametrize("collected", ["mse", "recording"])
def test_ranges_and_bit_widths_are_found_without_data(spec: qc.QuantSpec, collected: str, tmp_path: Path) -> None:
    path = tmp_path / "seen.safetensors"
    qc.calibrate(prepared(collected), data()).statistics.save(path)
    later, direct = (qc.prepare(captured(), SMALL.but(act=spec)) for _ in range(2))
    report = qc.use_statistics(later, path)
    qc.calibrate(direct, data())
    assert report.total == 9
    assert digest(later) == digest(direct)


def test_some_layers_may_be_left_float_later() -> None:
    saved = qc.calibrate(prepared(), data()).statistics
    config = qc.QuantConfig().set("head", FLOAT)
    later, direct = (qc.prepare(captured(), SMALL.but(act=UINT8.but(observe="mse")), config=config) for _ in range(2))
    qc.use_statistics(later, saved)
    qc.calibrate(direct, data())
    assert digest(later) == digest(direct)


def test_statistics_take_the_place_of_those_there_are() -> None:
    saved = qc.calibrate(prepared(), data(2)).statistics
    program, direct = prepared(), prepared()
    qc.calibrate(program, data())
    qc.use_statistics(program, saved)
    qc.calibrate(direct, data(2))
    assert program.plan.batches == 2
    assert digest(program) == digest(direct)
    qc.calibrate(program, data()[2:])  # and more data adds to them
    qc.calibrate(direct, data()[2:])
    assert digest(program) == digest(direct)


def test_minmax_statistics_cannot_give_percentiles() -> None:
    saved = qc.calibrate(prepared("minmax"), data(2)).statistics
    program = prepared("percentile")
    with pytest.raises(ObservationError, match="minmax statistics cannot give percentile ranges") as found:
        qc.use_statistics(program, saved)
    assert found.value.where
    assert "calibrate again" in str(found.value.advice)
    assert program.plan.statistics == {}
    assert program.stage is qc.Stage.SHARED


def test_averages_that_moved_otherwise_are_refused() -> None:
    saved = qc.calibrate(prepared("moving-average{rate=0.5}"), data(2)).statistics
    with pytest.raises(ObservationError, match=r"moved by 0\.5 cannot give one that moves by 0\.1"):
        qc.use_statistics(prepared("moving-average{rate=0.1}"), saved)


def test_statistics_of_another_program_are_refused() -> None:
    saved = qc.calibrate(prepared(), data(2)).statistics
    copy = captured().clone()
    next(copy.root.parameters()).data[0] += 1e-3
    with pytest.raises(CalibrationError, match="of another program"):
        qc.use_statistics(qc.prepare(copy, SMALL.but(act=UINT8.but(observe="mse"))), saved)


def test_tensors_that_were_not_observed_are_named() -> None:
    config = qc.QuantConfig().set("head", FLOAT)
    program = qc.prepare(captured(), SMALL.but(act=UINT8.but(observe="mse")), config=config)
    saved = qc.calibrate(program, data(2)).statistics
    with pytest.raises(CalibrationError, match="was not observed"):
        qc.use_statistics(prepared(), saved)


def test_statistics_without_notes_are_refused() -> None:
    saved = qc.calibrate(prepared(), data(2)).statistics
    bare = Statistics(saved.sites, {"program": saved.notes["program"], "batches": 2})
    with pytest.raises(LoadError, match="groups"):
        qc.use_statistics(prepared(), bare)


class Joined(nn.Module):
    """Two towers whose outputs are concatenated: with or without one scale for both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.out(torch.cat([self.one(x), self.two(x) * 3], 1))


def joined() -> tuple[Joined, list[Tensor], qc.Program, qc.Program]:
    """The model, its data, and the program prepared with one scale around the concatenation, and without."""
    torch.manual_seed(0)
    model, batches = Joined(), [torch.randn(2, 4) for _ in range(4)]
    program = qc.capture(model.eval(), (batches[0],))
    act = UINT8.but(observe="mse")
    apart = Backend("small", SMALL.table.without("cat"), {**SMALL.roles, "act": act})
    return model, batches, qc.prepare(program, SMALL.but(act=act)), qc.prepare(program, apart)


def test_tensors_that_were_observed_together_are_refused_apart() -> None:
    _, batches, together, apart = joined()
    saved = qc.calibrate(together, batches).statistics
    with pytest.raises(CalibrationError, match="linear:out0 was observed together with linear_1:out0"):
        qc.use_statistics(apart, saved)


def test_groups_that_join_merge() -> None:
    _, batches, together, apart = joined()
    saved = qc.calibrate(apart, batches).statistics
    direct = joined()[2]
    qc.calibrate(direct, batches)
    qc.use_statistics(together, saved)
    assert digest(together) == digest(direct)
