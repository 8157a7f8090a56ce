"""`qc.agreement`: the integer form beside the Q/DQ form, op by op."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import DataError, QuantcError
from quantc.ir.program import Program


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, groups=8)
        self.head = nn.Linear(8 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        logits: Tensor = self.head(x.flatten(1))
        return logits


@pytest.fixture(scope="module")
def batches() -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 3, 8, 8, generator=generator),) for _ in range(3)]


@pytest.fixture(scope="module")
def prepared(batches: list[tuple[Tensor]]) -> Program:
    torch.manual_seed(0)
    made = qc.prepare(qc.capture(Net().eval(), batches[0]), "qnnpack")
    qc.calibrate(made, batches)
    return made


def test_each_op_has_a_row_and_agrees(prepared: Program, batches: list[tuple[Tensor]]) -> None:
    found = qc.agreement(qc.convert(prepared), qc.convert(prepared, to="integer"), batches)
    assert [(row.op, row.rule) for row in found.rows] == [
        ("relu", "conv"), ("relu", "conv"), ("flatten", "reshape"), ("linear", "linear"),
    ]  # fmt: skip
    assert [row.elements for row in found.rows] == [3 * 8 * 8 * 64, 3 * 8 * 8 * 36, 3 * 8 * 288, 3 * 8 * 10]
    assert found.worst <= 1
    assert found.clear_equal == 1.0
    assert json.loads(found.to_json())["rows"][0]["module"] == found.rows[0].module
    assert "4 results of integer ops over 3 batches; 4 on integers, at most" in str(found)
    assert found.float_error is None


@pytest.mark.parametrize("factor", [1.02, 2.0])
def test_a_wrong_multiplier_shows_in_its_op_alone(
    prepared: Program, batches: list[tuple[Tensor]], factor: float
) -> None:
    qdq, integer = qc.convert(prepared), qc.convert(prepared, to="integer")
    second = next(node for node in integer.graph.nodes if "conv2d_1_multiplier" in str(node.target))
    multiplier = integer.tensor(second)
    assert multiplier is not None
    multiplier.mul_(factor)
    rows = qc.agreement(qdq, integer, batches).rows
    assert rows[1].worst > 1
    assert rows[1].clear_equal < 0.999
    assert all(row.worst <= 1 and row.clear_equal == 1.0 for row in (rows[0], *rows[2:]))


def test_a_result_in_float_is_measured_by_its_largest_value(prepared: Program, batches: list[tuple[Tensor]]) -> None:
    torch.manual_seed(0)
    x86 = qc.prepare(qc.capture(Net().eval(), batches[0]), "x86")
    qc.calibrate(x86, batches)
    found = qc.agreement(qc.convert(x86), qc.convert(x86, to="integer"), batches)
    error = found.rows[-1].float_error
    assert error is not None
    assert 0 < error < 1e-5
    assert found.float_error == error
    assert "1 in float, at most" in str(found)


def test_the_programs_are_left_as_they_were(prepared: Program, batches: list[tuple[Tensor]]) -> None:
    qdq, integer = qc.convert(prepared), qc.convert(prepared, to="integer")
    before = qdq.dump(), integer.dump()
    qc.agreement(qdq, integer, batches)
    assert (qdq.dump(), integer.dump()) == before


def test_what_it_refuses(prepared: Program, batches: list[tuple[Tensor]]) -> None:
    qdq, integer = qc.convert(prepared), qc.convert(prepared, to="integer")
    with pytest.raises(QuantcError, match="Q/DQ form with its integer form") as caught:
        qc.agreement(integer, qdq, batches)
    assert caught.value.advice is not None
    assert 'to="integer"' in caught.value.advice
    with pytest.raises(QuantcError, match="Q/DQ form with its integer form"):
        qc.agreement(qdq, qdq, batches)
    with pytest.raises(QuantcError, match="Q/DQ form with its integer form"):
        qc.agreement(prepared, integer, batches)
    other = prepared.clone()
    qc.calibrate(other, [(5 * batches[0][0],)])
    with pytest.raises(QuantcError, match="have other scales"):
        qc.agreement(qdq, qc.convert(other, to="integer"), batches)
    with pytest.raises(DataError, match="zero batches"):
        qc.agreement(qdq, integer, [])


def test_choices_of_the_integer_form_are_refused_without_it(prepared: Program) -> None:
    with pytest.raises(QuantcError, match="choices of the integer form"):
        qc.convert(prepared, multiplier="fixed")
    with pytest.raises(QuantcError, match="choices of the integer form"):
        qc.convert(prepared, style="decomposed")
