"""Support claims: which rules say that they run on kernels or in the delegate, and which say why not."""

from __future__ import annotations

import pytest

from quantc.backends.executorch import EXECUTORCH
from quantc.backends.support_claims import WITHOUT_DELEGATE, WITHOUT_KERNEL, in_delegate, on_kernels
from quantc.patterns import Rule, RuleTable
from quantc.patterns import aten as v
from quantc.pipeline.registry import BACKENDS


def table(name: str) -> RuleTable:
    rules = (
        Rule("conv", v.conv, supports=frozenset({"qdq", "integer"})),
        Rule("lstm", v.lstm, supports=frozenset({"qdq"})),
        Rule("embedding", v.embedding),
    )
    return RuleTable(name, rules)


def test_rules_claim_kernels_besides_what_they_support_unless_there_is_a_reason() -> None:
    claims = {rule.name: rule.supports for rule in on_kernels(table("x86"))}
    assert claims == {"conv": {"qdq", "integer", "kernel"}, "lstm": {"qdq"}, "embedding": {"kernel"}}


def test_rules_claim_the_delegate_unless_there_is_a_reason() -> None:
    claims = {rule.name: rule.supports for rule in in_delegate(table("executorch"))}
    assert claims == {"conv": {"qdq", "integer", "delegate"}, "lstm": {"qdq"}, "embedding": frozenset()}


def test_claiming_changes_nothing_else_and_twice_is_once() -> None:
    before = table("qnnpack")
    after = on_kernels(before)
    assert (after.name, after.names) == (before.name, before.names)
    assert [rule.pattern for rule in after] == [rule.pattern for rule in before]
    assert on_kernels(after) == after


def test_a_backend_without_kernels_has_no_reasons_to_look_up() -> None:
    with pytest.raises(KeyError, match="onnx"):
        on_kernels(table("onnx"))


def test_reasons_are_given_for_rules_that_exist() -> None:
    for name, reasons in WITHOUT_KERNEL.items():
        assert set(reasons) <= set(BACKENDS[name].table.names)
    assert set(WITHOUT_DELEGATE) <= set(EXECUTORCH.table.names)
