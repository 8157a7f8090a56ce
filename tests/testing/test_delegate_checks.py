"""Which rules of a backend ExecuTorch's delegate takes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

import quantc as qc
from quantc.annotate.quantizer import TableQuantizer
from quantc.backends.executorch import EXECUTORCH
from quantc.errors import PatternError, QuantcError
from quantc.ir.program import Program
from quantc.patterns.dsl import op
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.formats import Timing
from quantc.testing import delegate_checks
from quantc.testing.conformance import Fault
from quantc.testing.delegate_checks import DelegateReport, check_delegate, specs_of_delegate
from quantc.testing.kernel_checks import KernelRow
from tests.support.faulty_backends import GOOD
from tests.support.trials import trials


def test_what_the_delegate_does_not_take_is_found() -> None:
    pytest.importorskip("executorch")
    elu = Rule("elu", op("elu", args="x"), {"x": "act", "out": "act"}, supports={"qdq", "delegate"})
    found = check_delegate(replace(EXECUTORCH, table=RuleTable("executorch", (elu,))))
    assert [row.rule for row in found.false_claims] == ["elu"]
    assert "elu runs in portable" in str(found)


def test_specs_without_data_are_those_of_the_modes_and_of_linear_layers_alone() -> None:
    linear, conv = (trials(EXECUTORCH, rule)[0] for rule in ("linear", "conv"))
    assert specs_of_delegate(linear, Timing.WEIGHT_ONLY) == [EXECUTORCH.modes["weight-only"]]
    assert specs_of_delegate(conv, Timing.WEIGHT_ONLY) == []
    assert specs_of_delegate(linear, Timing.DYNAMIC) == [EXECUTORCH.modes["dynamic"]]


def test_the_report_is_headed_by_what_the_delegate_takes() -> None:
    rows = (KernelRow("conv", Timing.STATIC, 2), KernelRow("lstm", Timing.STATIC, 1, (Fault("no", "so", "lstm"),)))
    report = DelegateReport("executorch", "delegate", rows, frozenset({"conv"}))
    head, *table = str(report).splitlines()
    assert head == "executorch: the delegate takes 1 of 2 rules"
    assert any("lstm: no" in line for line in table)


def test_what_has_no_table_is_refused() -> None:
    several: Any = qc.Quantizers((TableQuantizer(GOOD), TableQuantizer(replace(GOOD, name="other"))))
    with pytest.raises(PatternError, match="table"):
        check_delegate(several)


class Stand:
    """What a program was lowered to: who computes `add`, and how far its numbers are off."""

    def __init__(self, program: Program, is_delegated: bool, off: float) -> None:
        self.program, self.off = program, off
        place = SimpleNamespace(value="portable")
        row = SimpleNamespace(rule="add", node="add", is_delegated=is_delegated, place=place, why="nobody wants it")
        self.rows = [row]

    def delegation(self) -> Stand:
        return self

    def run(self, *inputs: Tensor) -> list[Tensor]:
        return [made + self.off for made in self.program.run_flat(inputs) if isinstance(made, Tensor)]


@pytest.mark.parametrize(
    ("is_delegated", "off", "word"),
    [(True, 0.0, ""), (True, 1e-3, ""), (True, 1.0, "steps from the Q/DQ form"), (False, 0.0, "nobody wants it")],
)
def test_ops_and_numbers_of_the_delegate_are_held_to_the_program(
    is_delegated: bool, off: float, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delegate_checks, "lower", lambda program: Stand(program, is_delegated, off))
    add = replace(GOOD.table["add"], supports=frozenset({"qdq", "delegate"}))
    backend = replace(GOOD, modes={}, table=replace(GOOD.table, rules=(add,)))
    found = check_delegate(backend, models=lambda trials: trials[:1])
    assert found.claimed == {"add"}
    assert [word in row.why_not for row in found.false_claims] == ([True] if word else [])


def test_a_lowering_that_fails_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(program: Program) -> Any:
        raise QuantcError("it is too large", advice="make it smaller")

    monkeypatch.setattr(delegate_checks, "lower", refuse)
    backend = replace(GOOD, modes={}, table=GOOD.table.only("tanh"))
    row = check_delegate(backend).row("tanh")
    assert row is not None
    assert "lowering fails: it is too large" in row.why_not
    assert row.faults[0].advice == "make it smaller"
