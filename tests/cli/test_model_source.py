"""The SOURCE argument: files by their endings, and objects of Python by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quantc.cli.model_source import call_factory, import_object, load, load_all
from quantc.errors import LoadError
from tests.support import cli_sources as sources

HERE = sources.HERE


@pytest.mark.parametrize("name", ["plain", "with_attribute", "complete"])
def test_a_factory_gives_a_model_with_its_example_inputs(name: str) -> None:
    loaded = load_all(f"{HERE}:{name}")
    x = sources.listed[0]
    assert torch.equal(loaded.program(x), sources.alone(x))
    assert loaded.model is not None
    assert (loaded.batches is not None) == (name == "complete")
    assert [tensor.tolist() for tensor in loaded.program.example_inputs or ()] == [torch.ones(2, 4).tolist()]


def test_keyword_inputs_are_a_dict() -> None:
    program = load(f"{HERE}:named")
    assert torch.equal(program(x=torch.ones(2, 4), scale=torch.full((2, 1), 3.0)), torch.full((2, 4), 3.0))


def test_a_program_is_taken_as_it_is() -> None:
    assert load(f"{HERE}:fixed") is sources.fixed()


def test_a_model_alone_is_given_the_examples_of_the_data() -> None:
    asked: list[nn.Module] = []

    def examples(model: nn.Module) -> tuple[Any, ...]:
        asked.append(model)
        return (torch.zeros(5, 4),)

    loaded = load_all(f"{HERE}:alone", examples=examples)
    assert asked == [sources.alone]
    assert [tuple(tensor.shape) for tensor in loaded.program.example_inputs or ()] == [(5, 4)]
    assert load(f"{HERE}:alone").method == "fx"  # without any


def test_files_are_read_by_their_endings(tmp_path: Path) -> None:
    sources.fixed().save(tmp_path / "net.qc")
    model, inputs = sources.plain()
    torch.export.save(torch.export.export(model, inputs), tmp_path / "net.pt2")
    x = sources.listed[0]
    for name in ("net.qc", "net.pt2"):
        assert torch.equal(load(str(tmp_path / name))(x), model(x))


def test_nothing_is_the_built_in_example() -> None:
    assert load(None, "fx").name == "DigitsCNN"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("missing.qc", ["missing.qc"]),
        ("net.pte", ["net.pte", "ExecuTorch", "net.qc"]),
        ("net.onnx", ["ONNX", "quantc compare"]),
        ("somewhere", ["somewhere", "package.module:name"]),
        ("no.such.module:model", ["no.such.module", "ModuleNotFoundError"]),
        (f"{HERE}:plian", ["plian", "plain"]),
        (f"{HERE}:number", ["int", "(model, example_inputs)"]),
        (f"{HERE}:broken", ["ZeroDivisionError", "there it is"]),
    ],
)
def test_what_is_no_source_is_refused_with_what_is(source: str, words: list[str]) -> None:
    with pytest.raises(LoadError) as caught:
        load(source)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("name", ["fixed", "quantized"])
def test_programs_are_not_cast(name: str, tmp_path: Path) -> None:
    getattr(sources, name)().save(tmp_path / "net.qc")
    for source in (f"{HERE}:{name}", str(tmp_path / "net.qc")):
        with pytest.raises(LoadError, match="cast") as caught:
            load_all(source, dtype="float32")
        assert "--dtype float32" in str(caught.value.where)


def test_parts_of_objects_are_found_by_their_path() -> None:
    assert import_object(f"{HERE}:nn.Linear") is nn.Linear
    with pytest.raises(LoadError, match="Liner"):
        import_object(f"{HERE}:nn.Liner")


def test_modules_of_the_current_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_model_of_this_folder.py").write_text("value = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["elsewhere"])
    assert import_object("a_model_of_this_folder:value") == 7


def test_a_function_that_raises_is_told_what_it_should_give() -> None:
    assert call_factory("place", lambda: 5) == 5
    with pytest.raises(LoadError, match="ZeroDivisionError") as caught:
        call_factory("place", lambda: 1 / 0, "batches")
    assert "batches" in str(caught.value.advice)
