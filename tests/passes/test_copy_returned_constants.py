"""The pass `copy-returned-constants`: a caller who writes to a result changes no later call."""

from __future__ import annotations

import pytest
import torch

from quantc.errors import VerifyError
from quantc.ir.program import Stage
from quantc.passes.copy_returned_constants import CopyReturnedConstants
from tests.support.by_hand import Builder, aten


def test_writing_to_a_result_leaves_the_constant_alone() -> None:
    build = Builder(c=torch.ones(2, 3))
    x = build.input("x", torch.zeros(2, 3))
    view = build.call(aten.transpose.int, build.const("c"), 0, 1)
    program = build.program(view, build.call(aten.sin.default, x), stage=Stage.PLACED)
    assert CopyReturnedConstants().run(program).notes == ("copied 1 constants that are results",)
    made, _ = program(torch.zeros(2, 3))
    made.zero_()
    assert torch.equal(program(torch.zeros(2, 3))[0], torch.ones(3, 2))
    assert not CopyReturnedConstants().run(program)


def test_what_is_claimed_of_results_is_verified() -> None:
    build = Builder(c=torch.ones(2))
    x = build.input("x", torch.zeros(2))
    program = build.program(build.const("c"), build.call(aten.sin.default, x), stage=Stage.PLACED)
    program.verify()
    program.placements.owns_results = True
    with pytest.raises(VerifyError, match="said to be memory of its own"):
        program.verify()
