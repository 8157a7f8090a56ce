"""Rules that claim kernels run on them, those that could claim them do, and the others say why not."""

from __future__ import annotations

from functools import cache

import pytest

from quantc.backends.support_claims import WITHOUT_KERNEL
from quantc.pipeline.registry import BACKENDS
from quantc.spec.formats import Timing
from quantc.testing.kernel_checks import KernelReport, check_kernels, one_for_each_op, specs_taken

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
