"""Rules that claim kernels run on them, those that could claim them do, and the others say why not."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.backends.support_claims import WITHOUT_KERNEL
from quantc.backends.x86 import X86
from quantc.errors import PatternError
from quantc.patterns.table import RuleTable
from quantc.pipeline.registry import BACKENDS
from quantc.qdq.registration import decomposed_ops
from quantc.spec.formats import Timing
from quantc.targets.kernels.int8_elementwise import QuantizeKernel
from quantc.testing import Check, check_backend
from quantc.testing.kernel_checks import KernelReport, check_kernels, one_for_each_op, specs_taken
from quantc.testing.loose_pairs import Kind, loose_pairs
from tests.support.faulty_backends import GOOD

TARGETS = ("x86", "qnnpack")
AT_MOST: dict[str, frozenset[str]] = {
    "x86": frozenset(WITHOUT_KERNEL["x86"]),
    "qnnpack": frozenset(WITHOUT_KERNEL["qnnpack"]),
}
"""The rules that may be without kernels. A name may be taken out of here, and none may be added."""


@cache
def report(target: str) -> KernelReport:
    return check_kernels(target, models=one_for_each_op)


# -- the matrix ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_rules_claim_kernels_if_and_only_if_they_run_on_them(target: str) -> None:
    check_claims(report(target))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_rules_run_on_kernels_in_every_model_of_the_kit(target: str) -> None:
    check_claims(check_kernels(target))


def check_claims(found: KernelReport) -> None:
    assert not found.false_claims, "\n".join(f"{row.rule}, {row.timing}: {row.why_not}" for row in found.false_claims)
    assert found.missing_claims == ()
    assert found.carried == found.claimed


@pytest.mark.parametrize("target", TARGETS)
def test_rules_without_kernels_are_listed_with_a_reason_and_get_no_more(target: str) -> None:
    silent = {rule.name for rule in BACKENDS[target].table if "kernel" not in rule.supports}
    assert silent == set(WITHOUT_KERNEL[target])
    assert silent <= AT_MOST[target]
    assert all(len(reason) > 10 for reason in WITHOUT_KERNEL[target].values())


def test_backends_without_kernels_claim_none() -> None:
    for name in BACKENDS:
        claims = {rule.name for rule in BACKENDS[name].table if "kernel" in rule.supports}
        assert not claims or name in TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_every_technique_of_the_modes_was_tried(target: str) -> None:
    found = report(target)
    for rule in ("linear", "matmul-constant", "lstm"):
        assert all(found.row(rule, timing) is not None for timing in Timing)
    assert found.row("conv", Timing.DYNAMIC) is None  # only where a config names it
    assert found.row("add", Timing.WEIGHT_ONLY) is None


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_of_every_format_are_what_their_ops_are(target: str) -> None:
    """Formats for which there is no kernel are no fault: the modes do not ask for them."""
    found = check_kernels(target, specs=specs_taken)
    wrong = [fault for row in found.rows for fault in row.faults if "not what its op is" in fault.what]
    wrong += [fault for row in found.rows for fault in row.faults if "lowering fails" in fault.what]
    assert not wrong, "\n".join(f"{fault.where}: {fault.what}" for fault in wrong)


# -- the report ----------------------------------------------------------------------------------------------------


def only(backend: Backend, *rules: str, **changes: Any) -> Backend:
    """A backend with some of its rules, changed."""
    kept = tuple(replace(backend.table[name], **changes) for name in rules)
    return replace(backend, table=RuleTable(backend.table.name, kept))


def test_the_report_says_what_keeps_a_rule_from_kernels() -> None:
    found = check_kernels("x86", rules=["lstm", "reshape"])
    assert found.carried == {"reshape"}
    row = found.row("lstm")
    assert row is not None
    assert "lstm is computed in float: it has no integer form" in row.why_not
    assert row.why_not in str(found)
    assert "1 of 2 rules" in str(found)
    assert json.loads(found.to_json())["carried"] == ["reshape"]


def test_claims_that_are_false_or_missing_are_told_apart() -> None:
    silent = check_kernels(only(X86, "reshape", "lstm", supports={"qdq"}))
    assert silent.missing_claims == ("reshape",)
    assert silent.false_claims == ()
    loud = check_kernels(only(X86, "reshape", "lstm", supports={"qdq", "kernel"}))
    assert loud.missing_claims == ()
    assert {row.rule for row in loud.false_claims} == {"lstm"}


def test_a_backend_of_another_name_can_be_held_to_the_kernels_of_a_target() -> None:
    own = replace(only(X86, "add"), name="mine")
    assert check_kernels(own, "x86").carried == {"add"}


def test_rules_that_do_not_exist_are_an_error() -> None:
    with pytest.raises(PatternError, match="no rule 'ad'"):
        check_kernels("x86", rules=["ad"])


# -- the kit -------------------------------------------------------------------------------------------------------


def test_the_kit_holds_claims_to_the_kernels() -> None:
    found = check_backend(only(X86, "reshape", "lstm", supports={"qdq", "kernel"}))
    right, wrong = (found.row(rule, Check.KERNELS) for rule in ("reshape", "lstm"))
    assert right is not None
    assert right.passed
    assert wrong is not None
    assert "computed in float" in wrong.what
    assert "supports" in wrong.advice


def test_the_kit_asks_nothing_of_rules_that_do_not_claim_kernels() -> None:
    assert check_backend(only(X86, "reshape", supports={"qdq"})).row("reshape", Check.KERNELS) is None


def test_a_backend_without_kernels_may_not_claim_them() -> None:
    row = check_backend(only(GOOD, "sigmoid", supports={"qdq", "kernel"})).row("sigmoid", Check.KERNELS)
    assert row is not None
    assert not row.passed
    assert f"quantc has none for {GOOD.name}" in row.what


def test_a_kernel_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = QuantizeKernel.run
    monkeypatch.setattr(QuantizeKernel, "run", lambda self, packed, *inputs: right(self, packed, *inputs) ^ 2)
    found = check_kernels("x86", rules=["copy"])
    row = found.row("copy")
    assert row is not None
    assert "the kernel is not what its op is" in row.why_not
    assert "2 steps" in row.why_not


def test_a_kernel_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: QuantizeKernel, packed: Any, *inputs: Tensor) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(QuantizeKernel, "run", fail)
    row = check_kernels("x86", rules=["copy"]).row("copy")
    assert row is not None
    assert "lowering fails: RuntimeError: broken" in row.why_not


# -- floats between two quantized ops ------------------------------------------------------------------------------


class Chain(nn.Module):
    """A convolution, what moves its result, and a layer that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 5)

    def forward(self, x: Tensor) -> Any:
        return self.head(F.relu(self.conv(x)).flatten(1))


def chain() -> qc.Lowered:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    prepared = qc.prepare(qc.capture(Chain().eval(), (x,)), "x86")
    qc.calibrate(prepared, [x], progress="silent")
    return qc.lower(qc.convert(prepared, reduce_range="weights"), "x86")


def node_of(module: fx.GraphModule, word: str) -> fx.Node:
    found: fx.Node = next(node for node in module.graph.nodes if word in node.name)
    return found


GRID = (0.1, 3, 0, 255, torch.uint8)


def leave_bytes(lowered: qc.Lowered, *, other: bool = False) -> None:
    """Put a dequantize and a quantize op between the convolution and the layer, by hand."""
    ops, graph = decomposed_ops(), lowered.module.graph
    move = node_of(lowered.module, "flatten")
    source: Any = move.args[0]
    kind = source.meta["val"]
    with graph.inserting_before(move):
        real = graph.call_function(ops.dequantize_per_tensor.default, (source, *GRID))
        real.meta["val"] = replace(kind, dtype=torch.float32)
        between = graph.call_function(torch.ops.aten.sin.default, (real,)) if other else real
        between.meta["val"] = real.meta["val"]
    with graph.inserting_after(move):
        move.replace_input_with(source, between)
        move.meta["val"] = replace(move.meta["val"], dtype=torch.float32)
        again = graph.call_function(ops.quantize_per_tensor.default, (move, *GRID))
        move.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def test_a_region_of_bytes_has_no_loose_pairs() -> None:
    assert loose_pairs(chain()) == ()


def test_what_is_dequantized_moved_and_quantized_again_is_found() -> None:
    lowered = chain()
    leave_bytes(lowered)
    (pair,) = loose_pairs(lowered)
    assert pair.kind is Kind.PAIR
    assert "dequantize" in pair.source
    assert "quantized again" in str(pair)


def test_what_is_computed_in_float_in_between_is_none() -> None:
    lowered = chain()
    leave_bytes(lowered, other=True)
    assert loose_pairs(lowered) == ()


def test_a_product_that_ends_in_float_though_all_its_readers_round_it_is_found() -> None:
    lowered = chain()
    ops, graph = decomposed_ops(), lowered.module.graph
    (out,) = graph.find_nodes(op="output")
    head: Any = out.args[0][0]
    with graph.inserting_before(out):
        made = graph.call_function(ops.quantize_per_tensor.default, (head, *GRID))
        out.replace_input_with(head, made)
        twice = graph.call_function(ops.quantize_per_tensor.default, (head, *GRID))
        out.args = ((made, twice),)
    kinds = [pair.kind for pair in loose_pairs(lowered)]
    assert kinds == [Kind.ENDING, Kind.ENDING, Kind.TWICE]
    out.args = ((made, head),)  # somebody reads it in float
    assert [pair.kind for pair in loose_pairs(lowered) if pair.kind is Kind.ENDING] == []
