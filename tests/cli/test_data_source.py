"""The --data argument: arrays of files cut into batches, and batches of Python by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quantc.cli.data_source import BATCH_SIZE, Data, batches_of
from quantc.errors import CalibrationError, DataError, LoadError
from tests.support import cli_sources as sources

HERE = sources.HERE


def data(tmp_path: Path, *unnamed: Any, inputs: tuple[int | str, ...] = (), **arrays: Any) -> Data:
    path = tmp_path / "data.npz"
    np.savez(path, *unnamed, **arrays)
    return Data.read(str(path), inputs)


def rows(count: int, width: int = 4) -> np.ndarray[Any, Any]:
    return np.arange(count * width, dtype=np.float32).reshape(count, width)


def taken(found: Data, program: Any) -> list[list[list[list[float]]]]:
    """Batches as lists: of arguments, of rows, of numbers."""
    return [[argument.tolist() for argument in batch] for batch in found.batches(program).values]


def test_samples_are_cut_into_batches_and_the_rest_is_told(tmp_path: Path) -> None:
    found = data(tmp_path, input=rows(5))
    batches = found.batches(sources.fixed())
    assert [[argument.tolist() for argument in batch] for batch in batches.values] == [
        [rows(5)[:2].tolist()],
        [rows(5)[2:4].tolist()],
    ]
    (note,) = batches.notes
    assert note.startswith("1 of 5 samples")


def test_a_batch_of_any_size_takes_all_samples(tmp_path: Path) -> None:
    batches = data(tmp_path, input=rows(BATCH_SIZE + 3)).batches(sources.any_size())
    assert [len(batch[0]) for batch in batches.values] == [BATCH_SIZE, 3]
    assert batches.notes == ()


def test_one_more_dimension_means_whole_batches(tmp_path: Path) -> None:
    whole = np.stack([rows(2), rows(2) + 1, rows(2) + 2])
    assert taken(data(tmp_path, input=whole), sources.fixed()) == [[batch.tolist()] for batch in whole]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_arrays_are_inputs_by_name_in_whatever_order(tmp_path: Path, suffix: str) -> None:
    arrays = {"b": rows(2) + 100, "a": rows(2)}
    path = tmp_path / f"data{suffix}"
    if suffix == ".npz":
        np.savez(path, **arrays)  # type: ignore[arg-type]
    else:
        save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    assert taken(Data.read(str(path)), sources.two()) == [[rows(2).tolist(), (rows(2) + 100).tolist()]]


def test_arrays_without_names_are_inputs_in_order(tmp_path: Path) -> None:
    assert taken(data(tmp_path, rows(2), rows(2) + 1), sources.two()) == [[rows(2).tolist(), (rows(2) + 1).tolist()]]
    assert taken(data(tmp_path, whatever=rows(2)), sources.fixed()) == [[rows(2).tolist()]]


def test_arrays_are_picked_by_name_or_place(tmp_path: Path) -> None:
    for inputs in (("b", "a"), (1, 0)):
        found = data(tmp_path, a=rows(2), b=rows(2) + 1, label=np.zeros(2), inputs=inputs)
        assert list(found.arrays or ()) == ["b", "a"]
    with pytest.raises(LoadError, match="labelx") as caught:
        data(tmp_path, a=rows(2), label=np.zeros(2), inputs=("labelx",))
    assert "label" in str(caught.value.advice)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"a": rows(2), "c": rows(2)}, ["a, c", "a, b"]),
        ({"a": rows(2), "b": rows(2), "label": np.zeros(2)}, ["label", "--inputs a,b"]),
    ],
)
def test_arrays_that_are_not_the_inputs_are_refused(tmp_path: Path, arrays: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(LoadError) as caught:
        data(tmp_path, **arrays).batches(sources.two())
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("program", "arrays", "word"),
    [
        ("fixed", {"input": rows(1)}, "1 samples"),
        ("fixed", {"input": np.zeros(())}, "0 dimensions"),
        ("fixed", {"input": np.zeros((1, 1, 2, 4), dtype=np.float32)}, "4 dimensions"),
        ("two", {"a": rows(2), "b": rows(3)}, "a 2, b 3"),
        ("two", {"a": rows(BATCH_SIZE), "b": rows(BATCH_SIZE + 1)}, "a 1, b 2"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_before_any_batch(
    tmp_path: Path, program: str, arrays: dict[str, Any], word: str
) -> None:
    with pytest.raises(DataError, match=word):
        data(tmp_path, **arrays).batches(getattr(sources, program)())


def positional(found: Data) -> tuple[Tensor, ...]:
    """The example inputs of a model that takes them by position."""
    examples = found.examples(sources.alone)
    assert isinstance(examples, tuple)
    return examples


def test_the_first_batch_is_an_example_for_models_that_have_none(tmp_path: Path) -> None:
    (example,) = positional(data(tmp_path, rows(BATCH_SIZE + 5)))
    assert example.shape == (BATCH_SIZE, 4)
    named = data(tmp_path, scale=np.ones((2, 1), dtype=np.float32), x=rows(2)).examples(sources.named_alone)
    assert isinstance(named, dict)
    assert sorted(named) == ["scale", "x"]
    both = data(tmp_path, b=rows(2) + 1, a=rows(2)).examples(sources.Two())
    assert isinstance(both, tuple)
    assert [float(array[0, 0]) for array in both] == [0.0, 1.0]
    with pytest.raises(LoadError, match="label"):
        data(tmp_path, a=rows(2), label=rows(2)).examples(sources.Two())


@pytest.mark.parametrize("name", ["listed", "batches", "stream"])
def test_batches_of_python_lose_none_to_the_example(name: str) -> None:
    found = Data.read(f"{HERE}:{name}")
    (example,) = positional(found)
    assert torch.equal(example, sources.listed[0])
    assert [torch.equal(x, y) for x, y in zip(found.batches(sources.fixed()).values, sources.listed, strict=True)] == [
        True
    ] * 3


def test_inputs_are_picked_from_the_example_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[tuple[Tensor, int]] = [(x, 7) for x in sources.listed]
    monkeypatch.setattr(sources, "listed", pairs)
    (example,) = positional(Data.read(f"{HERE}:listed", (0,)))
    assert torch.equal(example, pairs[0][0])


def test_files_that_are_no_arrays_are_refused_and_nothing_of_them_is_run(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", x=np.array([object()], dtype=object))
    (tmp_path / "text.npz").write_text("nothing of the kind")
    (tmp_path / "text.safetensors").write_text("nothing of the kind")
    for name in ("objects.npz", "text.npz", "text.safetensors", "missing.npz"):
        with pytest.raises(LoadError, match=name):
            Data.read(str(tmp_path / name))


def test_places_that_hold_no_batches_are_refused() -> None:
    with pytest.raises(LoadError, match="somewhere"):
        Data.read("somewhere")
    with pytest.raises(LoadError, match="ZeroDivisionError"):
        Data.read(f"{HERE}:broken")
    with pytest.raises(CalibrationError, match="Tensor"):
        batches_of("here", torch.ones(2, 4))  # one batch, not several
