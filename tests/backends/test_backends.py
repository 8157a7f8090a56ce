"""The tables of the backends: every rule takes a model of its family, places its q/dq ops right, and stays accurate."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, fx, nn

import quantc as qc
from quantc.annotate.annotator import Annotator
from quantc.annotate.match_operands import Slot, slots_of
from quantc.annotate.quantizer import Backend, quantizer_of
from quantc.annotate.table_annotation import TableAnnotation
from quantc.ir.dialect import op_name
from quantc.ir.plan import Plan
from quantc.ir.program import Program
from quantc.ir.site_index import operand_nodes, outputs_of
from quantc.pipeline.registry import BACKENDS
from quantc.qdq.ops import is_dequantize, is_quantize
from quantc.spec.formats import Offer, Role
from tests.support.backend_cases import CASES, NAMES, Case, sqnr
from tests.support.named_ops import naming

TAKEN = [(case, name) for case in CASES for name in NAMES if case.rule(name) is not None]
LEFT = [(case, name) for case in CASES for name in NAMES if case.rule(name) is None]


def ids(pairs: list[tuple[Case, str]]) -> list[str]:
    return [f"{name}-{case.family}" for case, name in pairs]


@cache
def captured(case: Case) -> tuple[nn.Module, Tensor, Program]:
    model, x = case.make()
    model(x)  # lazy layers find their sizes
    return model, x, qc.capture(model, (x,), method="fx")


def batches(x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    if not x.is_floating_point():
        return [torch.randint_like(x, 0, 20) for _ in range(4)]
    return [x, *(torch.randn_like(x) for _ in range(3))]


@pytest.mark.parametrize(("case", "name"), TAKEN, ids=ids(TAKEN))
def test_each_family_is_taken_by_its_rule(case: Case, name: str) -> None:
    model, x, program = captured(case)
    prepared = qc.prepare(program, name, config=naming(program, name))
    nodes = [node for node in prepared.graph.nodes if op_name(node) == case.op]
    rules = {claim.rule for node in nodes if (claim := prepared.plan.claims.get(node)) is not None}
    assert case.rule(name) in rules, [str(prepared.plan)]
    if any(group.source.value == "data" for group in prepared.plan.groups):
        qc.calibrate(prepared, batches(x))
    converted = qc.convert(prepared)
    converted.verify()
    check_placement(BACKENDS[name], prepared, converted)
    with torch.no_grad():
        assert sqnr(model(x), converted(x)) > 20


@pytest.mark.parametrize(("case", "name"), LEFT, ids=ids(LEFT))
def test_what_a_backend_has_no_kernel_for_stays_float_with_a_reason(case: Case, name: str) -> None:
    _, _, program = captured(case)
    prepared = qc.prepare(program, name, allow_empty=True)
    nodes = [node for node in prepared.graph.nodes if op_name(node) == case.op]
    assert nodes
    assert any(prepared.plan.claims.get(node) is None for node in nodes)
    for node in nodes:
        explanation = quantizer_of(name).explain(prepared, node.name)
        assert all(row.reason for row in explanation.tried)


def check_placement(backend: Backend, prepared: Program, converted: Program) -> None:
    """What the roles of each rule say is what stands in the graph."""
    after = {node.name: node for node in converted.nodes()}
    config = None if prepared.plan.config is None else prepared.plan.config.resolve(prepared)
    admission = TableAnnotation(backend, Annotator(prepared, config, Plan())).admission
    checked = 0
    for match in backend.table.match(prepared, admission):
        if prepared.plan.claims.get(match.root) is None:
            continue
        slots = [slot for slot in slots_of(match) if not (slot.role.startswith("weight") and is_vector(slot.value))]
        for slot in slots:
            operand = operand_nodes(after[slot.node.name])[slot.operand]
            assert is_dequantize(operand), f"{slot.node.name} reads {slot.name} in float"
            check_form(backend, slot, operand)
            checked += 1
        role = match.rule.roles.get("out", "?")
        for output in outputs_of(match.root):
            if not role.endswith("?"):
                check_output(after[output.name], slots, role, after)
    assert checked


def is_vector(node: fx.Node) -> bool:
    return len(node.meta["val"].shape) == 1


def check_form(backend: Backend, slot: Slot, operand: fx.Node) -> None:
    """The dtype and range are the role's, and a weight is a stored integer."""
    if slot.role == "pass" or slot.role.startswith("like"):
        return
    spec = backend.outcome(slot.role).spec
    ends = list(operand.args)[-3:]
    assert ends == [spec.qmin, spec.qmax, spec.dtype.storage]
    if spec.role is Role.WEIGHT:
        assert isinstance(operand.args[0], fx.Node)
        assert operand.args[0].op == "get_attr"


def check_output(output: fx.Node, slots: list[Slot], role: str, after: dict[str, fx.Node]) -> None:
    assert [is_quantize(user) for user in output.users] == [True] * len(output.users)
    if role.startswith("like "):
        like = next(slot for slot in slots if slot.name == role.removeprefix("like "))
        source = operand_nodes(after[like.node.name])[like.operand]
        assert all(user.args[1:] == source.args[1:] for user in output.users), "another scale than its input"


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_has_a_case(name: str) -> None:
    rules = {case.rule(name) for case in CASES}
    only_dynamic = {rule.name for rule in BACKENDS[name].table if rule.static is Offer.NO}
    assert set(BACKENDS[name].table.names) - rules - only_dynamic <= {"softmax-of-float", "copy"}
    assert all("qdq" in rule.supports for rule in BACKENDS[name].table)


def test_the_union_covers_every_family() -> None:
    assert all(any(case.rule(name) for name in NAMES) for case in CASES)
    assert len({case.family for case in CASES}) == len(CASES)
