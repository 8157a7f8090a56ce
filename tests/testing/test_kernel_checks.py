"""Which rules of a backend run on kernels: the report, and the check of the kit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from quantc.annotate.quantizer import Backend
from quantc.backends.x86 import X86
from quantc.errors import PatternError
from quantc.patterns.table import RuleTable
from quantc.targets.kernels.int8_elementwise import QuantizeKernel
from quantc.testing import Check, check_backend
from quantc.testing.kernel_checks import check_kernels
from tests.support.faulty_backends import GOOD


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
