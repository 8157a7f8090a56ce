"""Reproducers: what is written to a folder when a pass fails is enough to see it fail again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from quantc.errors import PassError
from quantc.ir.program import Program
from quantc.pipeline.pipeline import Hook, Pass, Pipeline
from quantc.pipeline.registry import PASSES, register_pass
from quantc.pipeline.reproducer import PACKAGES, Reproducer
from quantc.text.files import read_text
from tests.support.by_hand import aten, two_layers


class Halve(Pass):
    """Renames a node, and so leaves a trace of having run."""

    name: ClassVar[str] = "test-halve"

    def run(self, program: Program) -> bool:
        program.node("tanh").name = "halved"
        return True


class Fail(Pass):
    """Takes the relu away, then fails."""

    name: ClassVar[str] = "test-fail"

    message: str = "out of order"

    def run(self, program: Program) -> bool:
        relu = program.node("relu")
        program.replace(relu, program.emit(aten.neg.default, relu.args, before=relu, like=relu))
        raise ValueError(self.message)


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    register_pass(Halve)
    register_pass(Fail)
    yield
    PASSES.session.clear()


def failed(pipeline: Pipeline, folder: Path, *hooks: Hook) -> PassError:
    with pytest.raises(PassError) as caught:
        pipeline.run(two_layers(), [*hooks, Reproducer(folder)])
    return caught.value


def test_the_program_is_kept_as_it_was_just_before_the_failing_pass(tmp_path: Path) -> None:
    failed(Pipeline((Halve(), Fail())), tmp_path / "deep" / "again")
    program = read_text(tmp_path / "deep" / "again" / "program.txt")
    names = [node.name for node in program.graph.nodes]
    assert "halved" in names
    assert "relu" in names
    expected = two_layers()
    x = torch.ones(2, 4)
    assert torch.equal(program(x), expected(x))


def test_the_pass_is_written_with_its_options_and_fails_again_on_the_program(tmp_path: Path) -> None:
    failed(Pipeline((Halve(), Fail(message="no room"))), tmp_path)
    text = (tmp_path / "pipeline.txt").read_text()
    again = Pipeline.parse(text.strip())
    assert again.passes == (Fail(message="no room"),)
    with pytest.raises(PassError, match="no room"):
        again.run(read_text(tmp_path / "program.txt"))


def test_the_error_the_versions_and_the_command_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    error = failed(Pipeline((Fail(),)), folder)
    told = (folder / "error.txt").read_text()
    assert "ValueError: out of order" in told
    assert "Traceback" in told
    assert json.loads((folder / "versions.json").read_text()).keys() == {"python", *PACKAGES}
    (note,) = error.__notes__
    command = shlex.split(note.partition(": ")[2])
    assert command == ["quantc", "run", str(Fail()), str(folder / "program.txt")]


def test_a_run_that_succeeds_writes_nothing(tmp_path: Path) -> None:
    Pipeline((Halve(),)).run(two_layers(), [Reproducer(tmp_path / "again")])
    assert not (tmp_path / "again").exists()


def test_a_hook_that_fails_before_the_program_was_seen_leaves_nothing_to_write(tmp_path: Path) -> None:
    class Early(Hook):
        def before(self, program: Program, pass_: Pass) -> None:
            raise RuntimeError("too early")

    failed(Pipeline((Halve(),)), tmp_path / "again", Early())
    assert not (tmp_path / "again").exists()
