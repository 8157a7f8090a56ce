"""Laws over random eager programs: captures and passes keep the numbers, tell the truth, and are done after one run.

The judge is eager PyTorch, on inputs that neither capture nor pass has seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quantc.hooks import Guard, Truth, Verify
from quantc.ir.dialect import is_op
from quantc.ir.program import Program, Stage
from quantc.passes.fuse import Fuse
from quantc.patterns.fusions import FUSIONS
from quantc.pipeline.pipeline import Pipeline
from quantc.pipeline.registry import PASSES
from quantc.text.digests import constants
from quantc.text.parser import parse
from quantc.text.printer import numbered
from tests.support.agree import assert_same
from tests.support.laws import captured, law
from tests.support.random_programs import GENTLE, Net, Step, inputs, nets, plan
from tests.support.small_backend import SMALL
from tests.zoo import detached


class Judge:
    """An eager copy of a net. `agree` runs a program beside it, so that what either keeps between calls is seen."""

    def __init__(self, net: Net, dtype: torch.dtype = torch.float32, tolerance: float = 0.0) -> None:
        self.net = copy.deepcopy(net)
        self.dtype = dtype
        self.tolerance = tolerance
        self.seed = 100

    def agree(self, program: Program) -> None:
        """Outputs, inputs and buffers agree, in a second call too, after the caller has written to the outputs."""
        model, program = copy.deepcopy(self.net), program.clone()
        for _ in range(2):
            self.seed += 1
            theirs, ours = inputs(self.seed, self.dtype), inputs(self.seed, self.dtype)
            with torch.no_grad():
                expected, actual = model(*theirs), program(*ours)
                assert_same(actual, expected, self.tolerance)
                assert_same(ours, theirs, self.tolerance)
                # a buffer that is not written to may be missing from the program
                state = getattr(program.module, "state", self.net.state)
                assert_same(detached(state), detached(model.state), self.tolerance)
                for left, right in zip(actual, expected, strict=True):
                    if _may_scribble(model, right):
                        left.add_(1)
                        right.add_(1)
                # whatever shares memory with an output has changed on both sides, and nothing else has
                assert_same(actual, expected, self.tolerance)
                assert_same(ours, theirs, self.tolerance)


def _may_scribble(model: Net, output: Tensor) -> bool:
    """Not on an expanded tensor, which has several elements in one place, and not on what is the model's own: that
    was folded once and for all."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (model.scale, model.shift, model.state)}
    return 0 not in output.stride() and output.untyped_storage().data_ptr() not in own


TEXTS = {"annotate": f"annotate{{backend={SMALL.name} allow-empty=true}}"}
"""Passes that have to be told something."""


def check_passes(net: Net, dtype: torch.dtype = torch.float32, tolerance: float = 0.0) -> None:
    """Every registered pass, each on the captured program: it keeps the numbers, says truly whether it changed
    anything, finds nothing to do the second time, and what it leaves can be written down and read back."""
    judge = Judge(net, dtype, tolerance)
    base = captured(net, dtype=dtype)
    for name in PASSES.names():
        if PASSES[name].needs > Stage.CANONICAL:
            continue  # those come after annotating, and are looked at in `check_quantizing`
        program, pipeline = base.clone(), Pipeline.parse(TEXTS.get(name, name))
        pipeline.run(program, [Truth(), Verify(), Guard()])
        text = program.dump("text")
        pipeline.run(program, [Truth()])
        assert not program.log[-1].changed, f"{name} runs twice: {program.log[-1]}"
        assert program.dump("text") == text
        twin = parse(text, constants(program))
        assert twin.dump("text") == text
        judge.agree(program)
        judge.agree(twin)


def check_together(net: Net) -> None:
    """The passes one after another, as a user runs them."""
    program = captured(net, dtype=torch.float64)
    Pipeline.parse("inference").run(program, [Truth(), Verify(), Guard()])
    Judge(net, torch.float64, 1e-9).agree(program)


def check_captures(net: Net) -> None:
    """Both captures compute what the net computes, and give the same canonical program."""
    traced, exported = captured(net, "fx"), captured(net, "export")
    assert numbered(traced).splitlines() == numbered(exported).splitlines()
    judge = Judge(net)
    judge.agree(traced)
    judge.agree(exported)


def check_fusing(net: Net) -> None:
    """What fuse takes in had one user: a producer that was read twice, or returned, is there as it was."""
    program = captured(net, dtype=torch.float64)
    shared = {
        node.name: node.args[1:]
        for node in program.graph.nodes
        if is_op(node, *PRODUCERS) and (len(node.users) > 1 or any(user.op == "output" for user in node.users))
    }
    calls, matches = count_calls(program), len(FUSIONS.match(program))
    Pipeline((Fuse(),)).run(program, [Truth(), Verify(), Guard()])
    assert calls - count_calls(program) >= matches
    for name, args in shared.items():
        assert program.node(name).args[1:] == args, f"{name} has two users, and was changed"


def count_calls(program: Program) -> int:
    return sum(node.op == "call_function" for node in program.graph.nodes)


PRODUCERS = (*(f"conv{n}d" for n in (1, 2, 3)), *(f"conv_transpose{n}d" for n in (1, 2, 3)), "linear")
FUSIBLE = ("conv", "conv_transpose", "linear", "norm", "norm", "number", "add", "gate", "relu", "dropout", "part")


@law(50)
@given(net=nets())
def test_programs_captured_by_fx_compute_what_the_model_computes(net: Net) -> None:
    Judge(net).agree(captured(net))


@law(20)
@given(net=nets())
def test_both_captures_agree_with_eager_and_with_each_other(net: Net) -> None:
    check_captures(net)


@law(20)
@given(net=nets(dtype=torch.float64))
def test_passes_keep_the_numbers_and_are_done_after_one_run(net: Net) -> None:
    check_passes(net, torch.float64, 1e-9)


@law(25)
@given(net=nets(dtype=torch.float64))
def test_passes_keep_the_numbers_together(net: Net) -> None:
    check_together(net)


@law(25)
@given(net=nets(FUSIBLE, dtype=torch.float64))
def test_nothing_is_fused_into_what_has_two_users(net: Net) -> None:
    check_fusing(net)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "strategy", "examples"),
    [
        (check_captures, nets(most=25), 400),
        (check_captures, nets(GENTLE, most=25), 400),
        (check_together, nets(most=25, dtype=torch.float64), 1000),
        (check_fusing, nets(FUSIBLE, most=25, dtype=torch.float64), 1000),
        (lambda net: check_passes(net, torch.float64, 1e-9), nets(most=25, dtype=torch.float64), 500),
    ],
    ids=["captures", "captures-without-writes", "together", "fusing", "passes"],
)
def test_laws_at_length(check: Callable[[Net], None], strategy: st.SearchStrategy[Net], examples: int) -> None:
    law(examples)(given(strategy)(check))()


def example(*lines: tuple[Any, ...], returns: tuple[int, ...]) -> Net:
    """A net written step by step: (kind, number, operands …)."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        net = Net().eval().requires_grad_(False)
        values: list[Any] = [*inputs(0), net.scale.clone(), net.shift.clone(), net.state.clone()]
        for kind, number, *operands in lines:
            plan(net, values, Step(kind, number, tuple(operands)))
    assert len(net.steps) == len(lines)
    net.outputs = returns
    return net


X, Y, SCALE, SHIFT, STATE, V5, V6, V7, V8 = range(9)
FOUND = {
    "a copy is read after its source is written to": example(
        ("relu", 3, X), ("copy", 0, V5), ("number_", 1, V5), returns=(V6, V5)
    ),
    "what was copied over a tensor is written to": example(
        ("relu", 3, X), ("relu", 2, X), ("copy_", 0, V5, V6), ("number_", 1, V6), returns=(V5, V6)
    ),
    "a copy of parts is written to": example(
        ("relu", 3, X), ("copied", 0, V5), ("part", 3, V6), ("number_", 1, V7), returns=(V5, V6)
    ),
    "a copy is read after its source got numbers of a wider dtype": example(
        ("relu", 3, X), ("copy", 0, V5), ("mixed_", 0, V5, Y), returns=(V6, V5)
    ),
    "a comparison is written into floats": example(
        ("relu", 3, X), ("mixed_", 3, V5, Y), ("number", 0, V5), returns=(V7,)
    ),
    "a conversion to the same type is written to": example(
        ("relu", 3, X), ("like", 2, V5, Y), ("number_", 1, V6), returns=(V5, V6)
    ),
    "a view is read by what nobody uses": example(
        ("relu", 3, X), ("part", 0, V5), ("number_", 1, V5), ("relu", 0, V6), returns=(V5,)
    ),
    "two outputs are copies of one value": example(("relu", 3, X), ("copy", 0, V5), returns=(V5, V6)),
    "a view of a copy of an input is returned": example(("copy", 0, X), ("swap", 0, V5), returns=(V6,)),
    "a folded tensor is returned": example(("counted", 1), ("number", 0, V5), returns=(V6,)),
}


@pytest.mark.parametrize("net", FOUND.values(), ids=FOUND.keys())
def test_what_the_laws_have_found(net: Net) -> None:
    check_captures(net)
    check_passes(net, tolerance=1e-5)
