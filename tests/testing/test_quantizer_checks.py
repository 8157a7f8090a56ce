"""The kit on quantizers written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
from torch import fx

import quantc as qc
from quantc.annotate.annotator import Annotator, Claim
from quantc.annotate.quantizer import Quantizers
from quantc.ir.dialect import is_op
from quantc.ir.program import Program
from quantc.targets.target import Invariant, Target
from quantc.testing import check_backend
from tests.support.faulty_targets import Names, registered
from tests.support.hand_quantizers import ByHand

Then = Callable[[Annotator, fx.Node], None]
SEEN = count()


class WrongRole(ByHand):
    """Quantizes weights as activations."""

    def annotate(self, annotator: Annotator) -> None:
        for node in annotator.program.graph.nodes:
            if is_op(node, "linear"):
                annotator.claim([node], Claim(self.name, "first", node.name))
                annotator.operand(node, 1, qc.Quantize(qc.INT8))


class Moody(ByHand):
    """Claims every other time."""

    def annotate(self, annotator: Annotator) -> None:
        if next(SEEN) % 2 == 0:
            super().annotate(annotator)


class Unlisted(ByHand):
    """Does not list the op that it takes."""

    def supported_operators(self) -> tuple[str, ...]:
        return ("conv2d",)


class Unexplained(ByHand):
    """Cannot explain."""

    def explain(self, program: Program, node: str) -> Any:
        raise KeyError(node)


@dataclass(frozen=True)
class Renaming(ByHand):
    """Renames the model that it looks at."""

    def annotate(self, annotator: Annotator) -> None:
        super().annotate(annotator)
        annotator.operand(annotator.program.node("no such node"), 0, qc.Quantize(self.act))


def test_a_good_quantizer_passes() -> None:
    found = check_backend(ByHand())
    assert found.failures == ()
    assert (found.noun, found.backend) == ("quantizer", "by-hand")
    checks = {str(row.check) for row in found.rows}
    assert {"taken", "repeatable", "operands", "explains", "zero", "fidelity", "runs", "unchanged"} == checks


def test_several_quantizers_are_checked_as_one() -> None:
    found = check_backend(Quantizers((ByHand(), ByHand(name="curves", takes="sigmoid"))))
    assert found.failures == ()
    assert found.backend == "by-hand+curves"


@pytest.mark.parametrize(
    ("quantizer", "check", "told"),
    [
        (WrongRole(), "operands", "is a weight, with a spec of kind act"),
        (ByHand(takes="no_such_op"), "taken", "claims nothing in any example program"),
        (Moody(), "repeatable", "gives two plans"),
        (Unlisted(), "explains", "it claims linear, and supported_operators() does not list it"),
        (Unexplained(), "runs", "KeyError"),
        (Renaming(), "runs", "no such node"),
        (ByHand(act=qc.INT8.but(eps=8.0)), "fidelity", "the SQNR is"),
        (ByHand(refuses="never"), "runs", "never"),
    ],
)
def test_a_faulty_quantizer_fails_in_its_row(quantizer: Any, check: str, told: str) -> None:
    found = check_backend(quantizer)
    row = found.row("", check)
    assert row is not None
    assert not row.passed
    assert told in row.what
    assert row.advice or check == "runs"


def test_its_programs_are_held_to_the_invariants_of_its_target() -> None:
    def quantized(program: Program) -> Iterator[tuple[fx.Node, str]]:
        yield from ((node, "it is quantized") for node in program.nodes() if "quantize" in node.name)

    target = Target("by-hand", Names, suffix=".hand", invariants=(Invariant("nothing is quantized", quantized),))
    with registered(target):
        row = check_backend(ByHand()).row("", "invariants")
    assert row is not None
    assert "nothing is quantized" in row.what
    with registered(replace(target, invariants=(Invariant("nothing", lambda program: ()),))):
        row = check_backend(ByHand()).row("", "invariants")
    assert row is not None
    assert row.passed
