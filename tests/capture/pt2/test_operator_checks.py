"""Names of operators: arithmetic and higher-order ops by name, others if the dispatcher knows them, nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantc.capture.pt2.operator_checks import SYMBOLIC, why_not_lookup, why_not_operator
from tests.support.archives import MODEL, edited, refusal
from tests.support.hostile import HONEST

TARGETS = (
    "builtins.eval",
    "torch.load",
    "torch.hub.load",
    "torch.ops.load_library",
    "torch.ops.aten.from_file.default",
    "torch.ops.aten.save.default",
    "torch.ops.aten.no_such_op.default",
    "torch.ops.debugprims.load_tensor.default",
    "torch.ops.higher_order.flat_apply",
    "torch.ops.higher_order.call_torchbind",
    "torch.ops.higher_order.aoti_call_delegate",
    "torch.ops.aten.relu.default.__class__",
    "torch.classes.x.y",
    "_operator.methodcaller",
    "_operator.attrgetter",
    "math.__loader__.load_module",
    "#extension:op",
    "",
)


@pytest.mark.parametrize("target", TARGETS)
def test_only_known_operators(target: str, tmp_path: Path) -> None:
    def edit(document: Any) -> None:
        document["graph_module"]["graph"]["nodes"][0]["target"] = target

    text = refusal(edited(HONEST, {MODEL: edit}), tmp_path)
    assert "graph_module.graph.nodes[0].target" in text
    assert "calls" in text


def test_operator_handed_to_a_higher_order_op(tmp_path: Path) -> None:
    argument = {"name": "", "arg": {"as_operator": "torch.ops.load_library"}, "kind": 1}

    def edit(document: Any) -> None:
        document["graph_module"]["graph"]["nodes"][0]["inputs"].append(argument)

    assert "as_operator" in refusal(edited(HONEST, {MODEL: edit}), tmp_path)


def test_symbolic_operators_are_those_torch_writes() -> None:
    from torch._export.serde.serialize import _SYM_OPS

    assert {f"{op.__module__}.{op.__name__}" for op in _SYM_OPS} <= SYMBOLIC
    assert all(why_not_operator(name) is None for name in SYMBOLIC)


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten.relu.default",
        "torch.ops.aten.add.Tensor",
        "torch.ops.higher_order.cond",
        "_operator.getitem",
        "math.trunc",
        "torch.sym_max",
    ],
)
def test_operators_of_exported_programs_may_be_called(target: str) -> None:
    assert why_not_operator(target) is None


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("torch.ops.aten.relu.nonsense", "not registered"),
        ("torch.ops.aten.relu", "not an operator"),
        ("torch.ops.aten.relu.default\n", "not an operator"),
        ("torch.ops.c10d.send.default", "reaches out"),
        ("torch.ops.profiler._record_function_enter.default", "reaches out"),
        ("torch.ops.higher_order.triton_kernel_wrapper_mutation", "foreign code"),
        ("torch.sym_max.__globals__", "not an operator"),
    ],
)
def test_the_reason_names_what_is_wrong(target: str, told: str) -> None:
    assert told in (why_not_operator(target) or "")


@pytest.mark.parametrize("target", ["torch.nn.modules.linear.Linear", "_operator.add", "model.Net", "conv", ""])
def test_source_functions_of_torch_may_be_looked_up(target: str) -> None:
    assert why_not_lookup(target) is None


@pytest.mark.parametrize("target", ["torch.load.__globals__", "math.__loader__", "torch.a-b", "#ext:op()", "torch.x;y"])
def test_names_that_lead_out_of_torch_may_not(target: str) -> None:
    assert target[:60] in (why_not_lookup(target) or "")
