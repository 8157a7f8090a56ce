"""Refusals of every command: a message for people, with `--json` a document for machines, the same exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from quantc.cli import integer_page
from quantc.cli import reference_pages as pages
from quantc.cli.app import app
from quantc.cli.error_output import error_data
from quantc.errors import ConformanceError, PluginError, QuantcError, VerifyError

MODELS = """
import torch
from torch import nn

def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU()).eval(), (torch.ones(2, 4),)

def normed():
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.ReLU()
    return nn.Sequential(*layers).eval(), (torch.ones(2, 3, 8, 8),)

def zeros():
    return [torch.full((2, 4), float("nan"))]
"""
REFUSED: dict[str, tuple[str, ...]] = {
    "inspect": ("missing.qc",),
    "quantize": ("refused_models:plain", "--data", "refused_models:zeros"),
    "run": ("canonicalise", "refused_models:plain"),
    "explain": ("refused_models:plain", "no_such_node"),
    "verify": ("missing.pt2",),
    "check-backend": ("toaster",),
    "compare": ("refused_models:plain", "missing.qc"),
    "bench": ("--model", "no-such-model"),
}
"""By command: what it refuses."""
LISTS = {
    "passes": (pages, "pass_rows"),
    "backends": (pages, "backend_rows"),
    "ops": (integer_page, "semantics_rows"),
}
"""Commands that take no model, and what they print: it is made to fail."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "refused_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("refused_models", None)
    yield tmp_path
    sys.modules.pop("refused_models", None)


def quantc(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def asking(command: str) -> tuple[str, ...]:
    return ("--json", "-") if command == "bench" else ("--json",)


def told(result: Result) -> dict[str, Any]:
    """The one document on standard output."""
    found: dict[str, Any] = json.loads(result.stdout)
    assert set(found) == {"error"}
    error: dict[str, Any] = found["error"]
    return error


def test_every_command_is_looked_at() -> None:
    names = {each.name or each.callback.__name__ for each in app.registered_commands if each.callback is not None}
    assert names == {*REFUSED, *LISTS}


@pytest.mark.parametrize("command", REFUSED)
def test_a_refusal_is_a_document_for_machines(command: str) -> None:
    plain = quantc(command, *REFUSED[command])
    assert plain.exit_code == 1
    assert plain.stdout == ""
    result = quantc(command, *REFUSED[command], *asking(command))
    assert result.exit_code == 1
    error = told(result)
    assert set(error) == {"type", "what", "where", "advice", "details", "notes"}
    assert error["type"].endswith("Error")
    # the parts are those that people are shown
    for part in ("what", "where", "advice"):
        assert error[part] in plain.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", LISTS)
def test_so_is_that_of_a_list(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise PluginError("it is offered twice", where="an entry point", advice="uninstall one")

    monkeypatch.setattr(*LISTS[command], fail)
    result = quantc(command, "--json")
    assert result.exit_code == 1
    error = told(result)
    assert (error["type"], error["what"]) == ("PluginError", "it is offered twice")
    assert (error["where"], error["advice"]) == ("an entry point", "uninstall one")


def test_a_file_that_cannot_be_written_is_told_likewise(folder: Path) -> None:
    (folder / "file").write_text("in the way")
    result = quantc("inspect", "refused_models:plain", "--out", "file/model.qc", "--json")
    assert result.exit_code == 1
    error = told(result)
    assert error["type"] == "SaveError"
    assert "file" in error["where"]


def test_wrong_usage_that_a_command_finds_is_told_likewise() -> None:
    result = quantc("quantize", "refused_models:plain", "--json")
    assert result.exit_code == 2
    error = told(result)
    assert (error["type"], error["where"]) == ("BadParameter", "--data")
    assert "no batches were given" in error["what"]
    assert "Usage: " in result.stderr


def test_a_bench_that_writes_to_a_file_prints_no_document(folder: Path) -> None:
    result = quantc("bench", "--model", "no-such-model", "--json", "bench.json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert not (folder / "bench.json").exists()


@pytest.mark.parametrize(
    "error",
    [VerifyError("two faults", ["one", "other"]), ConformanceError("two checks", ["one", "other"])],
    ids=lambda error: type(error).__name__,
)
def test_all_that_goes_with_an_error_is_in_its_document(error: QuantcError) -> None:
    error.add_note("to see it again: run it")
    data = error_data(error)
    assert data["details"] == ["one", "other"]
    assert data["notes"] == ["to see it again: run it"]
    assert data["advice"] is None


# -- what a new user met -------------------------------------------------------------------------------------------


def test_a_norm_that_was_folded_says_into_what() -> None:
    told = quantc("explain", "refused_models:normed", "1", "--backend", "x86")
    assert told.exit_code == 1
    assert "1 is batch_norm, and was folded into the weights of conv2d" in told.stderr
    assert "ask for conv2d" in told.stderr
    dropped = quantc("explain", "refused_models:normed", "2", "--backend", "x86")
    assert "2 is dropout, and was left out" in dropped.stderr


@pytest.mark.parametrize("options", [(), ("--backend", "x86")])
def test_an_empty_name_is_refused(options: tuple[str, ...]) -> None:
    told = quantc("explain", "refused_models:plain", "", *options)
    assert told.exit_code == 1
    assert "the name of the node is empty" in told.stderr


@pytest.mark.parametrize("command", ["verify", "inspect"])
@pytest.mark.parametrize("name", ["model.pte", "model.onnx"])
def test_files_for_other_runtimes_name_who_reads_them(command: str, name: str) -> None:
    told = quantc(command, name)
    assert told.exit_code == 1
    assert "model.qc beside it" in told.stderr
    assert f"quantc compare A {name}" in told.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("inspect", "--bogus", "--json"),
        ("inspect", "a.qc", "b.qc", "--json"),
        ("quantize", "--held-out", "many", "--json"),
        ("quantize", "--mode", "statik", "--json"),
        ("explain", "--json"),
        ("quantise", "--json"),
        ("--bogus", "inspect", "--json"),
        ("bench", "--bogus", "--json", "-"),
    ],
    ids=" ".join,
)
def test_wrong_usage_that_the_parser_finds_is_told_in_json(args: tuple[str, ...]) -> None:
    result = quantc(*args)
    assert result.exit_code == 2
    error = told(result)
    assert error["type"]
    assert error["what"]
    assert "Usage: " in result.stderr


def test_wrong_usage_prints_no_document_unasked() -> None:
    for args in (("inspect", "--bogus"), ("bench", "--bogus", "--json", "bench.json")):
        result = quantc(*args)
        assert (result.exit_code, result.stdout) == (2, "")
