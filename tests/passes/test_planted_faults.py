"""A fault planted in each pass that legalizes a program is found by Verify or by the numeric guard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from quantc.errors import GuardError, PassError, VerifyError
from quantc.hooks import Guard, Verify
from quantc.ir.program import Program
from quantc.passes import (
    duplicate_dq,
    fix_sizes,
    legalize_bmm,
    legalize_slices,
    legalize_weights,
    legalize_xnnpack,
    space_to_depth,
    unroll_recurrent,
)
from quantc.pipeline.pipeline import Pipeline
from quantc.targets.block_windows import blocks_of
from tests.support.paths import TESTS
from tests.support.text_programs import program_of

NUMBERS = "changed the numbers"
"""What the guard says."""


def larger(kind: Any) -> int:
    return 3


def first_place(node: fx.Node) -> Any:
    yield 0, 1


def other_number(program: Program, node: fx.Node) -> None:
    number = program.constant("number", torch.tensor([0.25]), before=node)
    node.args = (node.args[0], number)
    program.touch()


def plus_one(program: Program, node: Any) -> torch.Tensor | None:
    found = CONSTANT(program, node)
    return None if found is None else found + 1


def as_it_is(unrolled: Any, x: fx.Node) -> fx.Node:
    return x


def nowhere(*args: Any) -> Any:
    found = BLOCKS(*args)
    return None if found is None else replace(found, begin=found.end, end=found.begin)


def the_reader(program: Program, node: fx.Node, operands: Any) -> None:
    """Let the op that is copied read its copy."""
    for copy in operands.values():
        copy.args[0].replace_all_uses_with(copy)
        program.touch()


CONSTANT: Callable[..., Any] = legalize_weights._constant
BLOCKS: Callable[..., Any] = blocks_of
WITHOUT_STATE = {**unroll_recurrent.CELLS, "rnn_tanh": replace(unroll_recurrent.CELLS["rnn_tanh"], states=2)}
FAULTS: dict[str, tuple[str, Any, str, Any, str]] = {
    "a size that is not that of the example": ("fix-sizes/opened", fix_sizes, "_number", larger, "does not run"),
    "the first place for any": ("legalize-slices/levels", legalize_slices, "_ends", first_place, NUMBERS),
    "another number": ("legalize-bmm/attention", legalize_bmm, "with_tensor", other_number, NUMBERS),
    "a weight that is off by one": ("legalize-weights/conv", legalize_weights, "_constant", plus_one, NUMBERS),
    "levels shifted too little": ("legalize-xnnpack/levels", legalize_xnnpack, "UNSIGNED", 127, "does not run"),
    "steps that are not turned": ("unroll-recurrent/gru", unroll_recurrent.Unrolled, "flipped", as_it_is, NUMBERS),
    "a body of another form": ("unroll-recurrent/branch", unroll_recurrent, "CELLS", WITHOUT_STATE, "rule"),
    "padding on the other side": ("space-to-depth/image", space_to_depth, "blocks_of", nowhere, NUMBERS),
    "a copy that reads itself": ("duplicate-dq/own-results", duplicate_dq, "rewire", the_reader, "rule"),
}


def before(case: str) -> Program:
    text = (TESTS / "golden" / f"{case}.txt").read_text(encoding="utf-8")
    return program_of(text.partition("=====\n")[0])


def pipeline(case: str) -> Pipeline:
    own = {"duplicate-dq/own-results": "duplicate-dq{results=own}"}
    return Pipeline.parse(own.get(case, case.partition("/")[0]))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, place, name, wrong, said = FAULTS[fault]
    pipeline(case).run(before(case), [Verify(), Guard()])
    monkeypatch.setattr(place, name, wrong)
    with pytest.raises(PassError, match=said) as caught:
        pipeline(case).run(before(case), [Verify(), Guard()])
    assert isinstance(caught.value, GuardError) or isinstance(caught.value.__cause__, VerifyError)
