"""`quantc run`: the log, guards and reproducers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from quantc.ir.program import Program
from quantc.pipeline.pipeline import Pass, Preserves
from quantc.pipeline.registry import PASSES, register_pass
from quantc.text.files import Snapshot, read_text
from quantc.text.parser import parse
from tests.support.by_hand import aten, two_layers
from tests.support.cli_runs import enter_folder, example, quantc, refuse, succeed


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield enter_folder(tmp_path, monkeypatch)
    PASSES.session.clear()


class Drop(Pass):
    """Replaces relu by what goes into it."""

    name: ClassVar[str] = "test-drop"
    preserves: ClassVar[Preserves] = Preserves.NOTHING

    def run(self, program: Program) -> bool:
        node = program.node("relu")
        program.replace(node, node.all_input_nodes[0])
        return True


class DropSilently(Drop):
    name: ClassVar[str] = "test-drop-silently"
    preserves: ClassVar[Preserves] = Preserves.EXACTLY


class Fail(Pass):
    """Raises at the second linear."""

    name: ClassVar[str] = "test-fail"

    at: str = "linear_1"

    def run(self, program: Program) -> bool:
        for node in program.graph.nodes:
            if node.name == self.at:
                raise ZeroDivisionError(f"nothing to divide {node.name} by")
        return False


def test_run_shows_the_log_and_writes_the_result(folder: Path) -> None:
    register_pass(Drop)
    out = succeed("run", "eliminate-dead,test-drop", "two.txt", "--out", "after.txt", "--timing", "--diff")
    assert [line.split()[:2] for line in out.splitlines()[2:4]] == [["eliminate-dead", "no"], ["test-drop", "yes"]]
    assert "== test-drop" in out
    assert "- %relu" in out
    assert out.splitlines()[-1].startswith("total")
    after = read_text(folder / "after.txt")
    assert "relu" not in after.dump("text")
    weights = {name: tensor.detach() for name, tensor in after.root.named_parameters()}
    x = example(after)
    expected = torch.tanh((x @ weights["w1"].T + weights["b1"]) @ weights["w2"].T + weights["b2"])
    torch.testing.assert_close(after(x).detach(), expected)


def test_run_json_is_one_document(folder: Path) -> None:
    register_pass(Drop)
    data: dict[str, Any] = json.loads(succeed("run", "eliminate-dead , test-drop", "two.txt", "--json", "--diff"))
    assert data["pipeline"] == "eliminate-dead,test-drop"
    assert [(entry["name"], entry["changed"]) for entry in data["log"]] == [
        ("eliminate-dead", False),
        ("test-drop", True),
    ]
    assert data["guarded"] == ["eliminate-dead"]
    assert [row["pass"] for row in data["diff"]] == ["test-drop"]
    assert not (folder / "quantc-reproducer").exists()


def test_run_dumps_after_each_pass(folder: Path) -> None:
    register_pass(Drop)
    succeed("run", "eliminate-dead,test-drop", "two.txt", "--dump-to", "dumps")
    assert sorted(file.name for file in (folder / "dumps").iterdir()) == ["00-canonical.txt", "02-test-drop.txt"]
    assert "relu" not in parse((folder / "dumps" / "02-test-drop.txt").read_text()).dump("table")


def test_run_guards_the_numbers_unless_told_not_to(folder: Path) -> None:
    register_pass(DropSilently)
    message = refuse("run", "test-drop-silently", "two.txt")
    assert "pass test-drop-silently changed the numbers" in message
    assert "quantc run test-drop-silently quantc-reproducer/program.txt" in message
    succeed("run", "test-drop-silently", "two.txt", "--guard", "never")
    (folder / "alone.txt").write_text(two_layers().dump("text"))
    result = quantc("run", "test-drop-silently", "alone.txt")
    assert result.exit_code == 0
    assert "numbers not compared: test-drop-silently: the program has no example inputs" in result.stderr


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        ("eliminate-ded", "did you mean eliminate-dead"),
        ("eliminate-dead{x=1}", "takes no options"),
        ("eliminate-dead,", "expected the name of a pass"),
    ],
)
def test_bad_pipelines_are_refused_before_the_model_is_loaded(pipeline: str, says: str) -> None:
    assert says in refuse("run", pipeline, "cli_models:raises")


def test_a_reproducer_fails_the_same_way_again(folder: Path) -> None:
    register_pass(Fail)
    register_pass(Drop)
    first = refuse("run", "eliminate-dead,test-drop,test-fail{at=tanh}", "two.txt", "--reproducer", "again")
    assert sorted(file.name for file in (folder / "again").iterdir()) == [
        "error.txt",
        "pipeline.txt",
        "program.inputs.safetensors",
        "program.safetensors",
        "program.txt",
        "versions.json",
    ]
    text = (folder / "again" / "pipeline.txt").read_text().strip()
    assert text == "test-fail{at=tanh}"
    assert "relu" not in (folder / "again" / "program.txt").read_text(), "the program as it was before the failing pass"
    assert "ZeroDivisionError" in (folder / "again" / "error.txt").read_text()
    assert json.loads((folder / "again" / "versions.json").read_text())["torch"] == torch.__version__
    second = refuse("run", text, "again/program.txt", "--reproducer", "twice")
    assert first.splitlines()[0] == second.splitlines()[0]
    assert "at node tanh" in first
    assert "at node tanh" in second
    assert (folder / "twice" / "program.txt").read_text() == (folder / "again" / "program.txt").read_text()


def test_a_reproducer_of_wrong_numbers_shows_the_same_difference() -> None:
    register_pass(DropSilently)
    first = refuse("run", "eliminate-dead,test-drop-silently", "two.txt")
    second = refuse("run", "test-drop-silently", "quantc-reproducer/program.txt", "--reproducer", "twice")
    assert first.splitlines()[0] == second.splitlines()[0]
    assert "differs by" in first


def test_a_reproducer_keeps_tied_weights(folder: Path) -> None:
    register_pass(Fail)
    tied = two_layers()
    tied.root.register_parameter("extra", tied.root.get_parameter("w2"))
    node = tied.node("linear_1")
    other = tied.graph.create_node("get_attr", "extra")
    node.prepend(other)
    tied.emit(aten.linear.default, (tied.node("relu"), other), before=tied.node("tanh"), like=node)
    Snapshot.of(tied).write(folder / "tied.txt")
    refuse("run", "test-fail", "tied.txt", "--guard", "never")
    again = read_text(folder / "quantc-reproducer" / "program.txt")
    assert again.root.get_parameter("extra") is again.root.get_parameter("w2")


PLUGIN = """
from typing import ClassVar
from quantc.pipeline.pipeline import Pass

class Explode(Pass):
    "Always fails."
    name: ClassVar[str] = "test-explode"

    def run(self, program):
        raise RuntimeError("boom")
"""


def test_a_plugins_failure_is_reproduced_in_a_fresh_process(folder: Path) -> None:
    (folder / "explode_plugin.py").write_text(PLUGIN)
    info = folder / "explode_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: explode-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quantc.passes]\ntest-explode = explode_plugin:Explode\n")
    first = refuse("run", "eliminate-dead,test-explode", "two.txt")
    again = subprocess.run(
        [
            sys.executable,
            "-c",
            "from quantc.cli.app import main; main()",
            "run",
            "test-explode",
            "program.txt",
            "--json",
        ],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        cwd=folder / "quantc-reproducer",
    )
    assert again.returncode == 1
    assert json.loads(again.stdout)["error"]["what"] == "pass test-explode failed: RuntimeError: boom"
    assert "Traceback" not in again.stderr
    assert first.splitlines()[0] == again.stderr.splitlines()[0]
    assert first.splitlines()[0] == "error: pass test-explode failed: RuntimeError: boom"
