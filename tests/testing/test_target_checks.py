"""The kit on targets: a good one passes, and each faulty one fails in its row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import fx
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.ir.program import Program
from quantc.pipeline.registry import BACKENDS
from quantc.spec.arithmetic import Arithmetic
from quantc.targets.target import Invariant, Target
from quantc.testing import Conformance, check_backend
from tests.support.faulty_targets import Listed, Names, Unsaved, Untold, Unwritten, erase_all, registered
from tests.support.small_backend import SMALL


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS.session, "npu", replace(SMALL, name="npu"))


class Exact(Names):
    """Runs the program that it lowers."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.program = program.clone()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.program(*args, **kwargs)


class Off(Exact):
    """Gives something else."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(lambda x: x + 1, super().__call__(*args, **kwargs))


class Cut(Exact):
    """Gives less."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(lambda x: x[:1], super().__call__(*args, **kwargs))


class Raising(Exact):
    """Raises when it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise IndexError("no slot")


def never(program: Program) -> Iterator[tuple[fx.Node, str]]:
    yield from ((node, "it is there") for node in program.nodes() if node.op == "call_function")


def rewrites(program: Program) -> Iterator[tuple[fx.Node, str]]:
    program.name = "rewritten"
    yield from ()


def fails(program: Program) -> Iterator[tuple[fx.Node, str]]:
    yield next(iter(program.nodes())), str(1 / 0)


GOOD = Target(
    "npu",
    Exact,
    suffix=".npu",
    recognizes=lambda path: path.read_text().startswith('["'),
    pipeline="lower-integer,eliminate-dead",
    invariants=(Invariant("nothing is called x", lambda program: ()),),
)


def test_a_good_target_passes() -> None:
    found = check_backend(GOOD)
    assert found.failures == ()
    assert (found.noun, found.backend) == ("target", "npu")
    checks = {str(row.check) for row in found.rows}
    assert checks == {"ready", "pipeline-text", "runs", "invariants", "unchanged", "artifact", "fidelity"}


def faulty(**fields: Any) -> Target:
    return replace(GOOD, **fields)


@pytest.mark.parametrize(
    ("target", "check", "told"),
    [
        (faulty(lower="quantc.nowhere:lower"), "ready", "No module named"),
        (faulty(requires=("npu_sdk", "npu-sdk")), "ready", "npu_sdk is not installed"),
        (faulty(arithmetic=Arithmetic(semantics="quantc.nowhere:ROWS")), "ready", "there are no semantics at"),
        (faulty(pipeline="no-such-pass"), "pipeline-text", "does not read"),
        (faulty(invariants=(Invariant("it is empty", never),)), "invariants", "(it is empty)"),
        (faulty(invariants=(Invariant("it fails", fails),)), "invariants", "ZeroDivisionError"),
        (faulty(invariants=(Invariant("it writes", rewrites),)), "unchanged", "an invariant changes the program"),
        (faulty(lower=erase_all), "unchanged", "lowering changes the program"),
        (faulty(lower=lambda program: 1 / 0), "runs", "ZeroDivisionError"),
        (faulty(lower=lambda program: program.name), "runs", "without save and to_data"),
        (faulty(lower=Unsaved), "artifact", "no slot is free"),
        (faulty(lower=Unwritten), "artifact", "there is no"),
        (faulty(lower=Untold), "artifact", "to_data()"),
        (faulty(lower=Listed), "artifact", "gives a list"),
        (faulty(recognizes=lambda path: False), "artifact", "does not recognize the file that it wrote"),
        (faulty(recognizes=Path.exists), "artifact", "takes any file for its own"),
        (faulty(lower=Off), "fidelity", "dB from the Q/DQ form"),
        (faulty(lower=Cut), "fidelity", "and the program"),
        (faulty(lower=Raising), "fidelity", "IndexError"),
    ],
)
def test_a_faulty_target_fails_in_its_row(target: Target, check: str, told: str) -> None:
    found = check_backend(target)
    row = found.row("", check)
    assert row is not None
    assert not row.passed
    assert told in row.what
    assert row.advice or check in ("ready", "runs", "fidelity")


def test_a_target_without_a_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(BACKENDS.session, "npu")
    (row,) = check_backend(GOOD).failures
    assert row.what == "there is no backend 'npu' whose programs it lowers"
    monkeypatch.setitem(BACKENDS.session, "other", replace(SMALL, name="other", target="npu"))
    assert check_backend(GOOD).passed


def rows_of_target(found: Conformance) -> set[str]:
    return {str(row.check) for row in found.rows if row.rule == "(target)"}


def test_the_target_of_a_backend_takes_part() -> None:
    backend: qc.Backend = BACKENDS["npu"]
    assert rows_of_target(check_backend(backend)) == set()
    with registered(GOOD):
        found = check_backend(backend)
    assert "artifact" in rows_of_target(found)
    assert "(target)" in str(found)
    assert found.row(backend.table.names[0], "invariants") is not None
    with registered(faulty(invariants=(Invariant("it is empty", never),))):
        found = check_backend(backend)
    row = found.row(backend.table.names[0], "invariants")
    assert row is not None
    assert "(it is empty)" in row.what
