"""Programs that commands print and write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantc.cli.options import Format
from quantc.cli.program_outputs import plan_files
from quantc.errors import SaveError
from quantc.text.files import read_text
from tests.support.by_hand import two_layers
from tests.support.cli_runs import enter_folder, example, refuse, succeed


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter_folder(tmp_path, monkeypatch)


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


def test_text_keeps_its_numbers_through_a_file(folder: Path) -> None:
    program = two_layers()
    again = read_text(folder / "two.txt")
    assert again.dump("text") == program.dump("text")
    x = example(program)
    assert again(x).equal(program(x))
    assert example(again).equal(x)


def test_a_file_that_cannot_be_written_is_refused() -> None:
    assert "two.txt" in refuse("inspect", "two.txt", "--out", "two.txt/below.txt")


def test_files_are_planned_by_their_ending_or_form() -> None:
    assert [str(output.path) for output in plan_files(Path("a.qc"), None)] == ["a.qc"]
    beside = [str(output.path) for output in plan_files(Path("a.txt"), None)]
    assert beside == ["a.txt", "a.safetensors", "a.inputs.safetensors"]
    assert [output.kind for output in plan_files(Path("a.txt"), Format.json)] == ["json"]
    with pytest.raises(SaveError, match="onnx"):
        plan_files(Path("a.onnx"), None)
