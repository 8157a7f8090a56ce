"""Dropout among the rules of training: tables propagate quantized tensors through it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import quantc as qc
from quantc.annotate.quantizer import Quantizers, TableQuantizer
from quantc.ir.dialect import is_op
from quantc.qat.dropout import RULE, through_dropout
from quantc.qat.fake import FollowedRange
from tests.support.small_backend import SMALL
from tests.support.training import assert_converts_exactly


def test_dropout_is_rounded_around_not_after() -> None:
    """What dropout leaves is larger: its range is none that inference has."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    program = qc.prepare(qc.capture(model.eval(), (x,)), "x86", qat=True)
    program(x)
    ranges = [fake for fake in program.root.modules() if isinstance(fake, FollowedRange)]
    assert len(ranges) == 2
    assert float(ranges[1].high) == pytest.approx(float(model[1](model[0](x)).max()), rel=0.05)
    converted = assert_converts_exactly(program, x)
    assert not any(is_op(node, "dropout") for node in converted.nodes())


def test_dropout_that_is_always_on_stays_where_it_is() -> None:
    class Sampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Any:
            return self.two(functional.dropout(self.one(x), 0.5, True))

    x = torch.randn(8, 6)
    program = qc.prepare(qc.capture(Sampled().eval(), (x,)), "x86", qat=True)
    program(x)
    program.eval()
    converted = qc.convert(program)
    with torch.no_grad():
        torch.manual_seed(1)
        ours = program(x)
        torch.manual_seed(1)
        assert torch.equal(ours, converted(x))


def test_dropout_that_follows_the_mode_is_claimed_by_the_rule() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)).eval()
    program = qc.prepare(qc.capture(model, (torch.randn(2, 6),)), "x86", qat=True)
    (dropout,) = [node for node in program.nodes() if is_op(node, "dropout")]
    assert program.plan.claims[dropout].rule == RULE


def test_a_table_gains_one_rule_and_keeps_its_own() -> None:
    found = through_dropout(TableQuantizer(SMALL))
    assert isinstance(found, TableQuantizer)
    names = [rule.name for rule in found.backend.table]
    assert names == [*(rule.name for rule in SMALL.table), RULE]
    assert (found.name, found.backend.roles) == (SMALL.name, SMALL.roles)
    assert RULE not in [rule.name for rule in SMALL.table]  # the backend that was given is as it was


def test_every_member_of_a_composition_gains_it() -> None:
    both = Quantizers((TableQuantizer(SMALL), TableQuantizer(replace(SMALL, name="other"))))
    found = through_dropout(both)
    assert isinstance(found, Quantizers)
    assert found.name == both.name
    tables = [member.backend.table for member in found.members if isinstance(member, TableQuantizer)]
    assert [RULE in [rule.name for rule in table] for table in tables] == [True, True]
