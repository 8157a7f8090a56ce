"""Constants that take fitted values, for the readers that these are for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.ir.sites import Site
from quantc.qdq.fitted_constants import put_fitted


class Shared(nn.Module):
    """One table of three products."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return (
            nn.functional.linear(x, self.w) + nn.functional.linear(x + 1, self.w) - nn.functional.linear(x - 1, self.w)
        )


def prepared() -> tuple[Program, list[Site]]:
    x = torch.randn(5, 4)
    program = qc.prepare(qc.capture(Shared().eval(), (x,)), "x86")
    qc.calibrate(program, [x])
    places = Places(program)
    nodes = [node for node in program.nodes() if "linear" in node.name]
    return program, [places.use(node, 1) for node in nodes]


def test_nothing_fitted_nothing_done() -> None:
    program, _ = prepared()
    before = program.dump("text")
    assert put_fitted(program) == 0
    assert program.dump("text") == before


def test_all_readers_of_a_constant() -> None:
    program, sites = prepared()
    value = torch.eye(4) * 2
    program.plan.fitted = dict.fromkeys(sites, value)
    assert put_fitted(program) == 3
    assert program.plan.fitted == {}
    x = torch.randn(5, 4)
    torch.testing.assert_close(program(x), 2 * (x + 2))
    assert sum(node.op == "get_attr" for node in program.module.graph.nodes) == 1  # no copy


@pytest.mark.parametrize("count", [1, 2])
def test_some_readers_of_a_constant(count: int) -> None:
    program, sites = prepared()
    groups = len(program.plan.groups)
    program.plan.fitted = {site: torch.eye(4) * (2 + index) for index, site in enumerate(sites[:count])}
    assert put_fitted(program) == count
    x = torch.randn(5, 4)
    factors = [2.0, 3.0 if count == 2 else 1.0, 1.0]
    torch.testing.assert_close(program(x), factors[0] * x + factors[1] * (x + 1) - factors[2] * (x - 1))
    assert len(program.plan.groups) == groups
    program.verify()
    assert qc.convert(program)(x).shape == (5, 4)


def test_the_model_and_other_programs_keep_theirs() -> None:
    program, sites = prepared()
    other = program.draft()
    other.plan.fitted = dict.fromkeys(sites, torch.zeros(4, 4))
    x = torch.randn(5, 4)
    expected = program(x)
    put_fitted(other)
    assert not other(x).any()
    assert torch.equal(program(x), expected)
