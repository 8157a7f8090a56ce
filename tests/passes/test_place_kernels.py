"""The pass `place-kernels`: ops of the integer form run on kernels, and rows say which."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import PipelineError
from quantc.ir.program import Program
from quantc.passes.place_kernels import PlaceKernels
from quantc.pipeline.pipeline import Pipeline
from quantc.targets.target_table import KERNEL_FORM
from tests.support.toy_kernels import offer_toys, program


def integer() -> Program:
    return Pipeline.parse(KERNEL_FORM).run_on_copy(program())


def test_options_are_text_that_reads_back() -> None:
    step = PlaceKernels(target="x86", allow_float=True, choices={"branch/linear": "onednn qlinear"})
    assert Pipeline.parse(str(step)).passes == (step,)


def test_it_is_run_once() -> None:
    with pytest.raises(PipelineError, match="must run before a program is placed"):
        Pipeline.parse("place-kernels{target=x86},place-kernels{target=x86}")
    placed = Pipeline.parse("place-kernels{target=x86}").run_on_copy(integer())
    with pytest.raises(PipelineError, match="before a program is placed"):
        Pipeline.parse("place-kernels{target=x86}").run(placed)


def test_it_times_kernels_on_the_example_inputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = offer_toys(monkeypatch, tmp_path)
    made = Pipeline((PlaceKernels(target=target, tune=True, progress="silent"),)).run_on_copy(integer())
    rows = [row for row in made.placements.placed if row.op == "linear"]
    assert [(row.kernel, row.chosen) for row in rows] == [("quick", "measured")] * 2
    assert [choice.families[0] for choice in made.placements.choices.values()] == [("slow", "onednn")] * 2


def test_facts_are_in_tables_and_not_in_meta() -> None:
    made = Pipeline.parse("place-kernels{target=x86}").run_on_copy(integer())
    nodes = made.graph.find_nodes(op="call_module")
    assert all(set(node.meta) <= {"val"} for node in nodes)
    assert all(made.placements.keys(node) == (made.placements.stands_for(node),) for node in nodes)
    assert all(node in made.placements.highest for node in nodes)


def test_a_layer_with_a_mode_loses_it_on_a_kernel() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8)
    quantized = qc.quantize(nn.LSTM(8, 8, batch_first=True).eval(), (x,), mode="dynamic").program
    made = Pipeline.parse(f"{KERNEL_FORM},place-kernels{{target=x86}}").run_on_copy(quantized)
    made.verify()
    assert made.graph.find_nodes(op="call_module")
