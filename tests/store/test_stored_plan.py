"""The plan as data: what was decided, observed and found comes back; what a file says of no node, site or backend does not."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import quantc as qc
from quantc.backends.x86 import X86
from quantc.errors import LoadError
from quantc.ir.decisions import Quantize
from quantc.ir.plan import Part, Plan, Source
from quantc.ir.program import Program
from quantc.ir.sites import Site
from quantc.pipeline.registry import BACKENDS
from quantc.store.stored_plan import ClaimData, GroupData, PlanData, plan_data, plan_of
from quantc.store.stored_tensors import TensorReader, TensorWriter
from tests.support.store_files import calibrated, images, small_model


def again(program: Program, tmp_path: Path) -> Program:
    program.save(tmp_path / "model.qc")
    loaded: Program = qc.load(tmp_path / "model.qc")
    return loaded


def names_of(program: Program) -> dict[fx.Node, str]:
    return {node: node.name for node in program.graph.nodes}


def data_of(program: Program) -> tuple[PlanData, TensorWriter]:
    tensors = TensorWriter()
    return plan_data(program.plan, names_of(program), tensors), tensors


def read_back(
    program: Program, data: PlanData, tensors: TensorWriter, needs_statistics: bool = True
) -> tuple[Plan, list[str]]:
    nodes = {name: node for node, name in names_of(program).items()}
    reader = TensorReader(tensors.records, tensors.stored)
    found = plan_of(data, nodes, reader, needs_statistics=needs_statistics)
    reader.finish()
    return found


@pytest.fixture(scope="module")
def program() -> Program:
    return calibrated()


def test_what_nodes_were_made_for_comes_back_and_files_without_it_stay_as_they_were(
    program: Program, tmp_path: Path
) -> None:
    converted = qc.convert(program)
    assert "made_for" not in data_of(converted)[0].model_dump_json()
    first, second, *_ = [node for node in converted.graph.nodes if node.op == "call_function"]
    converted.plan.made_for[first] = "conv2d"
    converted.plan.made_for[second] = ""
    found = again(converted, tmp_path).plan.made_for
    assert {node.name: name for node, name in found.rows.items()} == {first.name: "conv2d", second.name: ""}


def test_a_plan_comes_back_from_json_with_its_tensors(program: Program) -> None:
    converted = qc.convert(program)
    for given in (program, converted):
        data, tensors = data_of(given)
        again = PlanData.model_validate_json(data.model_dump_json())
        plan, notes = read_back(given, again, tensors)
        assert notes == []
        assert str(plan) == str(given.plan)
        assert (plan.outcomes, plan.groups, plan.batches) == (given.plan.outcomes, given.plan.groups, 2)
        assert plan.claims.rows == given.plan.claims.rows
        assert plan.instruction_sets == given.plan.instruction_sets
        assert plan.statistics.keys() == given.plan.statistics.keys()
        for name, found in given.plan.qparams.items():
            assert torch.equal(plan.qparams[name].scale, found.scale)
            assert torch.equal(plan.qparams[name].zero_point, found.zero_point)
    assert converted.plan.qparams


def test_equal_decisions_are_written_once(program: Program) -> None:
    data, _ = data_of(program)
    assert len(data.uses) == len(set(map(str, data.uses)))
    assert len(data.uses) < len(data.outcomes)
    assert {data.uses[number] for number in data.outcomes.values()} == set(program.plan.outcomes.values())


EDITS: dict[str, tuple[dict[str, Any], str]] = {
    "node of a claim": (
        {"claims": {"nowhere": ClaimData(quantizer="x86", rule="conv", root="nowhere", part=Part.QUANTIZED)}},
        "'nowhere'",
    ),
    "node left float": ({"left_float": {"nowhere": "why"}}, "'nowhere'"),
    "site": ({"outcomes": {"conv2d:middle0": 0}}, "'conv2d:middle0' is not a site"),
    "site of too large a number": ({"outcomes": {"conv2d:in1234567890": 0}}, "is not a site"),
    "use": ({"outcomes": {"conv2d:out0": 99}}, "use number 99"),
    "instruction set": ({"instruction_sets": {"x86": "abacus"}}, "'abacus'"),
    "group without places": (
        {"groups": [GroupData(name="g", use=0, values=[], places=[], source=Source.DATA)]},
        "at least one place",
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_what_belongs_to_nothing_is_refused_by_name(case: str, program: Program) -> None:
    update, told = EDITS[case]
    data, tensors = data_of(program)
    quantize = next(use for use in data.uses if isinstance(use, Quantize))
    with pytest.raises(LoadError, match=told) as caught:
        read_back(program, data.model_copy(update={"uses": [quantize, *data.uses], **update}), tensors)
    assert str(caught.value.where).startswith("plan.")


def test_sites_of_nested_graphs_come_back(program: Program) -> None:
    data, tensors = data_of(program)
    texts = ("conv2d:out0", "true_graph_0/conv2d:in1", "a/b/relu:out12")
    plan, _ = read_back(program, data.model_copy(update={"outcomes": dict.fromkeys(texts, 0)}), tensors)
    assert list(plan.outcomes) == [
        Site("", "conv2d", out=0),
        Site("true_graph_0", "conv2d", operand=1),
        Site("a/b", "relu", out=12),
    ]
    assert tuple(map(str, plan.outcomes)) == texts


@pytest.mark.parametrize(
    ("scale", "zero_point"),
    [
        (torch.tensor([0.5, 0.0]), torch.zeros(2, dtype=torch.int64)),
        (torch.tensor([0.5, math.inf]), torch.zeros(2, dtype=torch.int64)),
        (torch.tensor([0.5, 1.0], dtype=torch.float64), torch.zeros(2, dtype=torch.int64)),
        (torch.tensor([0.5, 1.0]), torch.zeros(1, dtype=torch.int64)),
        (torch.tensor([0.5, 1.0]), torch.zeros(2, dtype=torch.int32)),
    ],
    ids=["zero", "infinite", "double", "one zero point for two", "int32"],
)
def test_scales_that_are_none_are_refused(scale: Tensor, zero_point: Tensor, program: Program) -> None:
    data, tensors = data_of(program)
    tensors.add("qparams/g/scale", scale)
    tensors.add("qparams/g/zero_point", zero_point)
    with pytest.raises(LoadError, match=r"'scale'|'zero_point'") as caught:
        read_back(program, data.model_copy(update={"qparams": ["g"]}), tensors)
    assert caught.value.where == "plan.qparams.g"


def test_statistics_that_nobody_reads_any_more_are_left_out_where_they_are_not_needed(program: Program) -> None:
    data, tensors = data_of(program)
    first = next(iter(data.statistics))
    rows = {**data.statistics, first: data.statistics[first].model_copy(update={"statistics": "guess"})}
    unknown = data.model_copy(update={"statistics": rows})
    plan, notes = read_back(program, unknown, tensors, needs_statistics=False)
    assert plan.statistics.keys() == data.statistics.keys() - {first}
    assert len(notes) == 1
    assert first in notes[0]
    assert "'guess'" in notes[0]
    with pytest.raises(LoadError, match="'guess'"):
        read_back(program, unknown, tensors)


def test_a_registered_backend_is_found_by_its_name(tmp_path: Path) -> None:
    assert again(calibrated(), tmp_path).plan.quantizer == qc.TableQuantizer(X86)


def test_another_quantizer_is_left_out_and_that_is_said(tmp_path: Path) -> None:
    mine = dataclasses.replace(X86, name="mine")
    for backend in (mine, X86.but(act=qc.UINT8.but(observe="percentile{percentile=99.0}"))):
        prepared = qc.prepare(qc.capture(small_model(), (images(),)), backend)
        loaded = again(prepared, tmp_path)
        assert loaded.plan.quantizer is None
        assert "program.plan.quantizer is None" in str(loaded.log[-1])
        assert loaded.log[:-1] == prepared.log
        assert again(loaded, tmp_path).plan.quantizer is None
        assert [row.verdict for row in loaded.coverage().rows] == [row.verdict for row in prepared.coverage().rows]
        for program in (prepared, loaded):
            qc.calibrate(program, [images(1)])
        assert torch.equal(qc.convert(loaded)(images(2)), qc.convert(prepared)(images(2)))


def test_a_backend_that_is_not_installed_any_more_is_a_note(tmp_path: Path) -> None:
    mine = qc.Backend("gone-tomorrow", X86.table, X86.roles, X86.takes)
    BACKENDS.register("gone-tomorrow", mine)
    try:
        qc.prepare(qc.capture(small_model(), (images(),)), mine).save(tmp_path / "model.qc")
    finally:
        BACKENDS.forget("gone-tomorrow")
    loaded = qc.load(tmp_path / "model.qc")
    assert loaded.plan.quantizer is None
    assert "'gone-tomorrow'" in str(loaded.log[-1])
