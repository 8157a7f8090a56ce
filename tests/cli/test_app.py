"""The command line: what it prints where, and the exit codes."""

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
from typer.testing import CliRunner, Result

from quantc.cli.app import app
from quantc.ir.program import Program
from quantc.pipeline.pipeline import Pass, Preserves
from quantc.pipeline.registry import PASSES, register_pass
from quantc.text.files import Snapshot, read_text
from quantc.text.parser import parse
from tests.support.by_hand import aten, two_layers

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.example_inputs = (torch.ones(1, 1, 6, 6),)

    def forward(self, x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.norm(self.conv(x)).relu(),))

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count

def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), (torch.ones(2, 4),)

def model():
    return Net().eval()

ready = Net().eval()

def wrong():
    return "a model"

def raises():
    raise ValueError("no weights here")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "cli_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("cli_models", None)
    two = two_layers()
    Snapshot.of(two).write(tmp_path / "two.txt")
    yield tmp_path
    PASSES.session.clear()
    sys.modules.pop("cli_models", None)


def quantc(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def succeed(*args: str) -> str:
    result = quantc(*args)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def example(program: Program) -> torch.Tensor:
    """The one example input of a program."""
    assert program.example_inputs is not None
    (value,) = program.example_inputs
    assert isinstance(value, torch.Tensor)
    return value


def refuse(*args: str) -> str:
    """The message of a command that must be refused: on stderr, without traceback, and nothing on stdout."""
    result = quantc(*args)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    return result.stderr


# -- inspect --------------------------------------------------------------------------------------------------


def test_inspect_prints_plain_lines_in_a_pipe() -> None:
    out = succeed("inspect", "cli_models:model")
    lines = [line.strip() for line in out.splitlines()]
    assert lines[0] == "Net"
    assert any(line.startswith("captured by: export (the batch (dimension 0 of x) is open") for line in lines)
    assert "nested graphs: true_graph_0" in lines
    assert any(line.split() == ["conv2d", "1", "canonical"] for line in lines)
    assert any(line.split()[:3] == ["higher_order.cond", "1", "higher-order"] for line in lines)
    assert any(line.startswith("canonicalize") for line in lines)
    assert "\x1b" not in out
    assert "─" not in out


def test_inspect_json_is_one_document() -> None:
    data = json.loads(succeed("inspect", "cli_models:plain", "--json"))
    assert data["name"] == "Sequential"
    assert data["parameters"] == 4 * 8 + 8 + 8 * 3 + 3
    assert data["bytes"] == 4 * data["parameters"]
    assert {row["op"]: row["count"] for row in data["ops"]} == {"linear": 2, "relu": 1}
    assert data["opaque"] == []
    assert [entry["name"] for entry in data["log"]] == ["capture (export)", "canonicalize"]


def test_inspect_says_why_and_what_stayed_opaque() -> None:
    data = json.loads(succeed("inspect", "cli_models:Counting", "--json"))
    assert data["method"] == "fx"
    assert data["why"] == "fx, because there are no example inputs"
    assert len(data["opaque"]) == 1
    assert "aten.add_.Tensor" in data["opaque"][0]
    out = succeed("inspect", "cli_models:Counting")
    assert f"opaque nodes: {data['opaque'][0]}" in out
    assert "captured by: fx (fx, because there are no example inputs)" in out


@pytest.mark.parametrize("source", ["cli_models:ready", "cli_models:model", "cli_models:Net"])
def test_a_model_brings_its_example_inputs(source: str) -> None:
    data = json.loads(succeed("inspect", source, "--json"))
    assert data["method"] == "export"
    assert data["graphs"]


@pytest.mark.parametrize("form", ["text", "table", "json", "dot", "graphml"])
def test_inspect_prints_and_writes_every_format(form: str, folder: Path) -> None:
    expected = read_text(folder / "two.txt").dump(form)  # type: ignore[arg-type]
    assert succeed("inspect", "two.txt", "--format", form).strip() == expected.strip()
    succeed("inspect", "two.txt", "--format", form, "--out", "deep/file")
    assert (folder / "deep" / "file").read_text() == expected


@pytest.mark.parametrize(("name", "form"), [("a.json", "json"), ("a.dot", "dot"), ("a.graphml", "graphml")])
def test_the_suffix_tells_the_format(name: str, form: str, folder: Path) -> None:
    assert json.loads(succeed("inspect", "two.txt", "--out", name, "--json"))["nodes"] == 10
    assert (folder / name).read_text() == read_text(folder / "two.txt").dump(form)  # type: ignore[arg-type]


def test_a_pt2_file_is_read(folder: Path) -> None:
    model = torch.nn.Linear(4, 2).eval()
    torch.export.save(torch.export.export(model, (torch.ones(1, 4),)), folder / "linear.pt2")
    data = json.loads(succeed("inspect", "linear.pt2", "--json"))
    assert {row["op"] for row in data["ops"]} == {"linear"}


def test_text_keeps_its_numbers_through_a_file(folder: Path) -> None:
    program = two_layers()
    again = read_text(folder / "two.txt")
    assert again.dump("text") == program.dump("text")
    x = example(program)
    assert again(x).equal(program(x))
    assert example(again).equal(x)


def test_text_alone_can_be_inspected(folder: Path) -> None:
    (folder / "alone.txt").write_text(two_layers().dump("text"))
    assert json.loads(succeed("inspect", "alone.txt", "--json"))["nodes"] == 10


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nowhere.pt2", "no such file: nowhere.pt2"),
        ("nowhere.txt", "no such file: nowhere.txt"),
        ("something", "'something' is not a source of programs"),
        ("no_such_module:x", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("cli_models:plian", "did you mean plain"),
        ("cli_models:wrong", "gives a str, not a model"),
        ("cli_models:raises", "cli_models:raises() raised ValueError: no weights here"),
        ("bad.txt", "there is no program in this text"),
        ("binary.txt", "cannot be read"),
        ("damaged.txt", "damaged.safetensors is damaged"),
        ("short.txt", "has no input 0"),
    ],
)
def test_bad_sources_are_refused(source: str, says: str, folder: Path) -> None:
    (folder / "bad.txt").write_text("")
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00")
    text = two_layers().dump("text")
    (folder / "damaged.txt").write_text(text)
    (folder / "damaged.safetensors").write_bytes(b"not tensors")
    (folder / "short.txt").write_text(text)
    (folder / "short.inputs.safetensors").write_bytes((folder / "two.safetensors").read_bytes())
    message = refuse("inspect", source)
    assert says in message
    assert "what to do: " in message


# -- run ------------------------------------------------------------------------------------------------------


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


def test_a_file_that_cannot_be_written_is_refused() -> None:
    assert "two.txt" in refuse("inspect", "two.txt", "--out", "two.txt/below.txt")


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


# -- explain, passes, backends --------------------------------------------------------------------------------


def test_explain_prints_the_rules_that_were_tried() -> None:
    out = succeed("explain", "cli_models:model", "batch_norm")
    assert "conv-bn" in out
    data = json.loads(succeed("explain", "cli_models:model", "batch_norm", "--json"))
    assert data["matched"] == "conv-bn"
    table = ("--table", "quantc.patterns.fusions:FUSIONS")
    assert succeed("explain", "cli_models:model", "batch_norm", *table) == out


def test_explain_refuses_what_it_does_not_know() -> None:
    assert "did you mean relu" in refuse("explain", "two.txt", "rellu")
    assert "unknown backend 'toaster'" in refuse("explain", "two.txt", "relu", "--backend", "toaster")
    assert "is a type, not a rule table" in refuse("explain", "two.txt", "relu", "--table", "pathlib:Path")
    assert quantc("explain", "two.txt", "relu", "--table", "a:b", "--backend", "c").exit_code == 2


def test_passes_lists_passes_and_pipelines() -> None:
    out = succeed("passes")
    assert "eliminate-dead" in out
    assert "inference" in out
    data = json.loads(succeed("passes", "--json"))
    (row,) = [row for row in data["passes"] if row["name"] == "eliminate-dead"]
    assert row["provider"] == "quantc"
    assert row["needs"] == "captured"
    assert row["summary"] == "Remove calls whose result nobody uses, and constants nobody reads."
    assert "## eliminate-dead" in succeed("passes", "--markdown")


def test_backends_lists_backends() -> None:
    assert isinstance(json.loads(succeed("backends", "--json"))["backends"], list)
    assert quantc("backends").exit_code == 0


@pytest.mark.parametrize("args", [["frobnicate"], ["run"], ["inspect", "--format", "jpeg"], ["inspect", "--nope"]])
def test_wrong_usage_is_exit_code_2(args: list[str]) -> None:
    result = quantc(*args)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_version() -> None:
    assert succeed("--version").startswith("quantc ")


# -- as a process ---------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("module", ["quantc", "quantc.cli"])
def test_python_runs_it_as_a_module(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "bogus"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "No such command" in done.stderr
