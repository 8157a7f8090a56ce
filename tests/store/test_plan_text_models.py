"""Models of the zoo, written as text and read back at every stage: what was decided is carried out as before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.errors import QuantcError
from quantc.ir.program import Program, Stage
from quantc.passes.insert_observers import InsertObservers
from quantc.pipeline.pipeline import Pipeline
from quantc.text.digests import constants
from tests.support.staged_models import FEW, METHODS, Method, stages
from tests.zoo import BY_NAME, CASES, Case, detached

EXPLAINED = 12
"""So many nodes of each program; each explanation tries every rule."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def again(program: Program) -> Program:
    twin = qc.parse(str(program), constants(program))
    twin.example_inputs = program.example_inputs
    return twin


def assert_same_bits(mine: Any, theirs: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    actual = pytree.tree_leaves(mine(*detached(args), **detached(keywords)))
    expected = pytree.tree_leaves(theirs(*detached(args), **detached(keywords)))
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(left, right) if isinstance(left, Tensor) else left == right


def assert_told_alike(twin: Program, program: Program) -> None:
    """Coverage and explanations are the same."""
    assert twin.coverage() == program.coverage()
    names = [f"{path}/{node.name}" if path else node.name for path, g in program.graphs() for node in g.nodes]
    for name in names[:EXPLAINED]:
        try:
            told = str(program.explain(name))
        except QuantcError as error:
            with pytest.raises(type(error)):
                twin.explain(name)
        else:
            assert str(twin.explain(name)) == told


def check(case: Case, method: Method) -> None:
    args, keywords = case.example()
    for program in stages(case, method):
        twin = again(program)
        assert str(twin) == str(program)
        assert str(qc.parse(str(program))) == str(program), "without its constants too"
        assert_same_bits(again(program), program.clone(), args, keywords)
        if program.stage < Stage.ANNOTATED:
            continue
        assert_told_alike(twin, program)
        if program.stage == Stage.SHARED:
            observed = Pipeline((InsertObservers(),)).run_on_copy(program)
            assert str(again(observed)) == str(observed)
        if program.stage == Stage.CALIBRATED:
            check_converted(program, args, keywords)


def check_converted(calibrated: Program, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """The integer form is the same op for op, and its kernels are placed alike."""
    mine, theirs = qc.convert(again(calibrated), to="integer"), qc.convert(calibrated, to="integer")
    assert str(mine) == str(theirs)
    assert_same_bits(mine, theirs, args, keywords)
    twin = again(theirs)
    assert_told_alike(twin, theirs)
    try:
        lowered = qc.lower(theirs, "x86")
    except QuantcError as refusal:
        with pytest.raises(type(refusal)):
            qc.lower(twin, "x86")
        return
    read = qc.lower(twin, "x86")
    assert [str(row) for row in read.placed] == [str(row) for row in lowered.placed]
    assert_same_bits(read, lowered, args, keywords)


@pytest.mark.parametrize("name", FEW)
def test_a_model_is_read_back_at_every_stage(name: str) -> None:
    check(BY_NAME[name], "export")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_model_is_read_back_at_every_stage(case: Case, method: Method) -> None:
    check(case, method)
