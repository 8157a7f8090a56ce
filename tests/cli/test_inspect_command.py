"""`quantc inspect`: summaries, and sources that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.by_hand import two_layers
from tests.support.cli_runs import enter_folder, refuse, succeed


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter_folder(tmp_path, monkeypatch)


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


def test_a_pt2_file_is_read(folder: Path) -> None:
    model = torch.nn.Linear(4, 2).eval()
    torch.export.save(torch.export.export(model, (torch.ones(1, 4),)), folder / "linear.pt2")
    data = json.loads(succeed("inspect", "linear.pt2", "--json"))
    assert {row["op"] for row in data["ops"]} == {"linear"}


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
