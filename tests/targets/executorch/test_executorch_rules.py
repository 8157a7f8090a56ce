"""Every rule of ExecuTorch's table that claims the delegate is taken by it, and computes what the Q/DQ form does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.backends.executorch import EXECUTORCH
from quantc.backends.support_claims import WITHOUT_DELEGATE
from quantc.patterns.table import RuleTable
from quantc.spec.formats import Timing
from quantc.testing.delegate_checks import DelegateReport, check_delegate
from quantc.testing.kernel_checks import one_for_each_op
from quantc.testing.rule_trial import Trial
from tests.support.executorch_models import relative, without_data

pytest.importorskip("executorch")
AT_MOST = frozenset({"embedding", "lstm", "gru", "rnn"})
"""The rules that may be without the delegate. A name may be taken out of here, and none may be added."""
MAINLY = frozenset({"linear", "add"})
"""Rules that are looked at each time; the slow tests look at all of them."""
NEAR = 1e-5


def first(trials: Sequence[Trial]) -> Sequence[Trial]:
    return trials[:1]


@cache
def report() -> DelegateReport:
    return check_delegate("executorch", models=first)


def check_claims(found: DelegateReport) -> None:
    assert not found.false_claims, "\n".join(f"{row.rule}, {row.timing}: {row.why_not}" for row in found.false_claims)
    assert found.missing_claims == ()
    assert found.carried == found.claimed


def test_the_rules_that_most_networks_are_made_of_are_taken_by_the_delegate() -> None:
    rules = tuple(rule for rule in EXECUTORCH.table if rule.name in MAINLY)
    assert {rule.name for rule in rules} == MAINLY
    check_claims(check_delegate(replace(EXECUTORCH, table=RuleTable("executorch", rules)), models=first))


@pytest.mark.slow  # a minute: every rule is lowered in every technique
def test_rules_claim_the_delegate_if_and_only_if_it_takes_them() -> None:
    check_claims(report())


@pytest.mark.slow
@pytest.mark.parametrize("models", [one_for_each_op, list], ids=["each op", "every model"])
def test_the_delegate_takes_every_model_of_the_kit(models: Callable[[Sequence[Trial]], list[Trial]]) -> None:
    check_claims(check_delegate("executorch", models=models))


def test_rules_without_the_delegate_are_listed_with_a_reason_and_get_no_more() -> None:
    silent = {rule.name for rule in EXECUTORCH.table if "delegate" not in rule.supports}
    assert silent == set(WITHOUT_DELEGATE)
    assert silent <= AT_MOST
    assert all(len(reason) > 10 for reason in WITHOUT_DELEGATE.values())


def test_other_backends_claim_no_delegate() -> None:
    from quantc.pipeline.registry import BACKENDS

    for name in BACKENDS:
        assert name == "executorch" or not any("delegate" in rule.supports for rule in BACKENDS[name].table)


@pytest.mark.slow
def test_every_technique_was_tried() -> None:
    found = report()
    assert all(found.row("linear", timing) is not None for timing in Timing)
    assert {row.rule for row in found.rows if row.timing is Timing.STATIC} == set(EXECUTORCH.table.names) - {
        "lstm",
        "gru",
        "rnn",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 8, 3), (1, 3, 8, 8)),
        (nn.ConvTranspose2d(3, 8, 3), (1, 3, 8, 8)),
    ],
    ids=["conv", "conv-transpose"],
)
def test_convolutions_that_a_config_names_are_dynamic(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """One scale for an image, which is what the delegate finds; with several images it finds one for each."""
    x = torch.randn(shape)
    config = qc.QuantConfig().set_op("conv2d" if isinstance(layer, nn.Conv2d) else "conv_transpose2d", qc.INT8_DYNAMIC)
    program = without_data(layer, x, mode="dynamic", config=config)
    lowered = qc.lower(program, "executorch")
    assert lowered.delegation().fraction == 1
    assert relative(program(x), lowered(x)) < NEAR
