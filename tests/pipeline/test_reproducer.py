"""Reproducers: what is written to a folder when a pass fails is enough to see it fail again."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import PassError
from quantc.ir.program import Program
from quantc.pipeline.pipeline import Hook, Pass, Pipeline
from quantc.pipeline.registry import PASSES, register_pass
from quantc.pipeline.reproducer import PACKAGES, Reproducer
from quantc.text.files import read_text
from tests.support.by_hand import aten, two_layers
from tests.support.paths import ROOT
from tests.support.planted import planted
from tests.support.small_backend import SMALL


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


# -- passes after annotate -----------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(144, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1)).sigmoid()  # type: ignore[no-any-return]


X = torch.linspace(-1, 2, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
CONFIG = qc.QuantConfig().set("head", qc.INT8_NARROW_WEIGHT, role="weight").set_op("sigmoid", qc.FLOAT)


def test_a_failure_in_any_pass_fails_again_in_another_process(tmp_path: Path) -> None:
    """In each pass of prepare, convert and the integer form: the pass runs on what was written, and makes the same."""
    torch.manual_seed(0)
    captured = qc.capture(Net().eval(), (X,))
    prepared = qc.prepare(captured, "x86", config=CONFIG)
    qc.calibrate(prepared, [X], progress="silent")
    converted = qc.convert(prepared)
    runs = [
        (captured, qc.pipelines.prepare("x86", CONFIG)),
        (prepared, qc.pipelines.convert("x86")),
        (converted, qc.pipelines.integer(style="decomposed")),
    ]
    told: dict[Path, str] = {}
    for number, (program, pipeline) in enumerate(runs):
        for index, pass_ in enumerate(pipeline):
            folder = tmp_path / f"{number}-{index}-{pass_.name}"
            before = Pipeline(pipeline.passes[:index]).run_on_copy(program)
            with planted(pass_.name), pytest.raises(PassError, match=f"planted in {pass_.name}") as caught:
                # on a copy: a program counts the constants that its passes made, and names new ones after that
                Pipeline((pass_,)).run_on_copy(before, [Reproducer(folder)])
            told[folder] = str(caught.value.__cause__)
            (note,) = caught.value.__notes__
            assert note.startswith("to see it again: quantc run")
    assert len(told) > 12
    command = [sys.executable, "-m", "tests.support.planted", *map(str, told)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    again = dict(line.split("\t", 1) for line in output.splitlines())
    for folder, error in told.items():
        assert error in again[str(folder)], folder.name


def test_a_quantizer_that_text_cannot_name_is_told(tmp_path: Path) -> None:
    mine = replace(SMALL, name="nowhere-installed")
    pipeline = qc.pipelines.prepare(mine)
    captured = qc.capture(Net().eval(), (X,))
    with planted("annotate"), pytest.raises(PassError) as caught:
        pipeline.run_on_copy(captured, [Reproducer(tmp_path)])
    assert "names a quantizer that is no installed backend" in caught.value.__notes__[1]
    with planted("share"), pytest.raises(PassError) as caught:
        pipeline.run_on_copy(captured, [Reproducer(tmp_path / "share")])
    assert len(caught.value.__notes__) == 1
    with planted("share"), pytest.raises(PassError, match="planted in share") as later:
        Pipeline.parse("share").run(read_text(tmp_path / "share" / "program.txt"))
    assert "planted in share" in str(later.value)
