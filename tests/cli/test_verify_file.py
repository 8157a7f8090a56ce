"""The checks of `quantc verify`, one after the other."""

from __future__ import annotations

import pytest
import torch

import quantc as qc
from quantc.cli.verify_file import Finding, check_up
from quantc.errors import VerifyError
from quantc.ir.program import Program
from tests.support import cli_sources as sources
from tests.support.programs import small_net


def found(program: Program) -> dict[str, str]:
    return {finding.checked: finding.found for finding in check_up(program)}


def test_a_sound_program_is_checked_and_run() -> None:
    told = found(sources.fixed())
    nodes = len(sources.fixed().graph.nodes)
    assert told == {
        "rules of the IR": f"no fault in {nodes} nodes, 1 graph",
        "run": "1 output from the example inputs",
    }


def test_without_examples_it_is_not_run() -> None:
    assert "not run" in found(small_net())["run"]


def test_a_plan_is_told_with_what_was_seen() -> None:
    prepared = qc.prepare(sources.any_size(), "x86")
    assert "not calibrated" in found(prepared)["plan"]
    qc.calibrate(prepared, sources.batches())
    told = found(prepared)["plan"]
    assert told.startswith(f"{len(prepared.plan.claims)} nodes claimed, {len(prepared.plan.groups)} groups")
    assert "3 batches" in told


def test_results_that_are_not_finite_are_counted() -> None:
    program = sources.fixed().clone()
    program.example_inputs = (torch.tensor([[1.0, 1.0, 1.0, torch.inf], [1.0] * 4]),)
    with torch.no_grad():
        next(program.root.parameters()).fill_(1.0)
    assert "3 values" in found(program)["run"]


def test_a_program_that_does_not_run_is_a_fault_and_what_was_found_before_is_told() -> None:
    program = sources.fixed().clone()
    program.example_inputs = (torch.ones(2, 5),)
    checks = check_up(program)
    assert isinstance(next(checks), Finding)
    with pytest.raises(VerifyError, match="example inputs") as caught:
        list(checks)
    assert len(caught.value.faults) == 1


def test_a_broken_graph_is_refused_first() -> None:
    program = small_net()
    relu = program.node("relu")
    relu.args = (*relu.args, 3)
    with pytest.raises(VerifyError, match="relu"):
        next(check_up(program))
