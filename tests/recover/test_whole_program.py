"""Passes that make a program worse as a whole are undone, whatever layers say one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.ir.judgment import Judgment
from quantc.ir.program import Program
from quantc.passes.round import Round
from quantc.recover.fitting import Proposal
from quantc.recover.judging_batches import judging_on
from quantc.recover.layers import Layer
from quantc.recover.whole_program import WholeProgram
from tests.support.loud_channels import Gate, batches, loud
from tests.support.streams import HIDDEN


class Difference(nn.Module):
    """Two layers whose rounding errors cancel, but for those of one column."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)
        with torch.no_grad():
            self.other.weight.copy_(self.one.weight)
            self.other.weight[:, 0] = -self.one.weight[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        difference: Tensor = self.one(x) - self.other(x)
        return difference


class RoundFirst(Round):
    """Fits one layer of two."""

    def propose(self, layer: Layer) -> Proposal | str:
        return "it is the other one" if "other" in layer.name else super().propose(layer)


def difference() -> tuple[Program, list[tuple[Tensor]]]:
    """A program whose layers have four-bit weights."""
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(64, 32, generator=generator) @ torch.randn(32, 32, generator=generator),) for _ in range(4)]
    captured = qc.capture(Difference().eval(), data[0], method="fx", dynamic_shapes=None)
    config = qc.QuantConfig().set_all(qc.INT4_GROUP)
    prepared = qc.prepare(captured, "x86", config=config)
    qc.calibrate(prepared, data, collect="recover")
    return prepared, data


def judgments(program: Program) -> list[Judgment]:
    return [each for entry in program.log for each in entry.judgments]


def test_errors_that_cancel_are_left_alone() -> None:
    prepared, data = difference()
    layerwise = qc.recover(prepared, qc.Pipeline((RoundFirst(),)))
    assert [each.fate for each in judgments(layerwise)] == ["kept", "refused"]
    whole = qc.recover(prepared, qc.Pipeline((RoundFirst(),)), batches=data)
    first, _ = judgments(whole)
    assert first.fate == "undone"
    assert "the whole program has" in first.reason
    assert not whole.log[-1].changed
    assert not whole.plan.fitted
    errors = {}
    for name, program in {"plain": prepared, "layerwise": layerwise, "whole": whole}.items():
        errors[name] = qc.compare(prepared, qc.convert(program), data[1::2]).sqnr
    assert errors["layerwise"] < errors["plain"] - 0.2
    assert errors["whole"] == errors["plain"]


def test_both_layers_fitted_are_kept() -> None:
    prepared, data = difference()
    both = qc.recover(prepared, "round", batches=data)
    found = [qc.compare(prepared, qc.convert(program), data[1::2]).sqnr for program in (prepared, both)]
    assert found[1] >= found[0] - 0.2


def test_without_batches_or_with_one_there_is_nothing_to_judge_on() -> None:
    prepared, _ = difference()
    assert WholeProgram.of(prepared) is None


def test_a_transform_that_is_undone_leaves_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batches()
    prepared = qc.prepare(
        qc.capture(loud(Gate(nn.LayerNorm(HIDDEN))), data[0], method="fx", dynamic_shapes=None), "x86"
    )
    qc.calibrate(prepared, data, collect="gram,extremes,moments")
    assert any(each.fate == "kept" for each in judgments(qc.recover(prepared, "smooth", batches=data)))
    monkeypatch.setattr(WholeProgram, "fault", lambda self: "it is worse")
    better = qc.recover(prepared, "smooth", batches=data)
    assert {each.fate for each in judgments(better)} <= {"undone", "refused"}
    for name, tensor in prepared.state_dict().items():
        assert torch.equal(tensor, better.state_dict()[name]), name
    assert prepared.plan.collected.keys() == better.plan.collected.keys()
    converted = [qc.convert(program)(*data[1]) for program in (prepared, better)]
    assert torch.equal(*converted)


def test_the_error_is_that_of_the_converted_program_with_its_fitted_biases() -> None:
    data = batches()
    prepared = qc.prepare(
        qc.capture(loud(Gate(nn.LayerNorm(HIDDEN))), data[0], method="fx", dynamic_shapes=None), "x86"
    )
    qc.calibrate(prepared, data, collect="recover")
    errors = []
    for program in (prepared, qc.recover(prepared, "correct-bias"), qc.recover(prepared, "round,correct-bias")):
        with judging_on(data):
            whole = WholeProgram.of(program)
        assert whole is not None
        found = qc.compare(prepared, qc.convert(program), data[1:4:2]).sqnr
        assert -10 * math.log10(whole.error) == pytest.approx(found, abs=1e-3)
        errors.append(whole.error)
    assert len(set(errors)) == 3
