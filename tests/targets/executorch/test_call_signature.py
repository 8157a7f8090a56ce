"""A `.pte` that was read from a file is called like the model: the trees of its inputs and outputs are data in it."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import InputError, LoadError
from quantc.targets.executorch import Pte
from quantc.targets.executorch.artifact import read_back
from quantc.targets.executorch.metadata import read_metadata
from tests.support.onnx_models import same_arrangement

pytest.importorskip("executorch")


class Pair(NamedTuple):
    """A class of the user's own, which pytree knows as a tuple with names."""

    left: Tensor
    right: Tensor


class Trees(nn.Module):
    """Takes a dict and a keyword, and gives trees with values in between that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch: dict[str, Any], *, factor: float = 2.0) -> Any:
        y, z = self.one(batch["x"]), self.two(batch["more"][0])
        return {"out": y * factor, "nested": (z, [y, 3, None]), "told": "of it", "pair": Pair(y, z)}


def batch() -> dict[str, Any]:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    return {"x": x, "more": (x + 1,)}


@cache
def lowered() -> Pte:
    program = qc.capture(Trees().eval(), (batch(),), example_kwargs={"factor": 2.0})
    prepared = qc.prepare(program, "executorch")
    qc.calibrate(prepared, [(batch(), 2.0)], progress="silent")
    return qc.lower(qc.convert(prepared), "executorch")


def loaded(folder: Path) -> Pte:
    lowered().save(folder / "model.pte")
    found: Pte = qc.load(folder / "model.pte")
    return found


def test_a_file_is_called_like_the_model(tmp_path: Path) -> None:
    want, got = lowered()(batch(), factor=2.0), loaded(tmp_path)(batch(), factor=2.0)
    assert same_arrangement(want, got)
    assert isinstance(got["pair"], Pair)
    assert (got["told"], got["nested"][1][1:]) == ("of it", [3, None])
    assert torch.equal(want["out"], got["out"])
    assert torch.equal(want["nested"][0], got["nested"][0])


def test_its_tensors_can_be_given_one_after_the_other(tmp_path: Path) -> None:
    given = batch()
    made = loaded(tmp_path).run(given["x"], given["more"][0])
    assert torch.equal(made[0], lowered()(given, factor=2.0)["out"])


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (lambda: (batch()["x"],), {"factor": 2.0}, "is arranged as"),
        (lambda: (batch(),), {"factor": 3.0}, "'factor' is 3.0, but the program was captured for 2.0"),
        (lambda: (batch(),), {}, "the call has 1 positional arguments, and the model takes 2"),
        (lambda: ({**batch(), "x": torch.zeros(3, 4)},), {"factor": 2.0}, "has size 3 in dimension 0"),
    ],
    ids=["a tensor for a dict", "another constant", "a keyword left out", "another size"],
)
def test_other_calls_are_refused_by_name(tmp_path: Path, args: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        loaded(tmp_path)(*args(), **kwargs)


def test_copies_are_called_like_the_model(tmp_path: Path) -> None:
    want = lowered()(batch(), factor=2.0)  # so that it is in the runtime, which cannot be copied
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copies = [copied for made in (lowered(), loaded(tmp_path)) for copied in (copy.deepcopy(made), again(made))]
    for made in copies:
        assert torch.equal(made(batch(), factor=2.0)["out"], want["out"])
    assert copies[1].delegation().fraction == lowered().delegation().fraction


def again(made: Pte) -> Pte:
    found: Pte = pickle.loads(pickle.dumps(made))  # noqa: S301 - our own bytes
    return found


# -- files that do not say it, or say what cannot be ---------------------------------------------------------------


def changed(**update: Any) -> Pte:
    """The model as a file with other metadata."""
    metadata = lowered().metadata
    assert metadata is not None
    data = json.loads(metadata.to_text())
    data["call"] = None if update.get("call", ...) is None else {**data["call"], **update}
    return read_back(lowered().content, read_metadata(json.dumps(data), "model.pte"), "model.pte")


def test_files_of_earlier_versions_take_tensors_one_after_the_other() -> None:
    given = batch()
    old = changed(call=None)
    made = old(given["x"], given["more"][0])
    assert isinstance(made, tuple)
    assert torch.equal(made[0], lowered()(given, factor=2.0)["out"])
    with pytest.raises(InputError, match="takes tensors one after the other, not factor=, a dict") as caught:
        old(given, factor=2.0)
    assert "an older quantc wrote it" in str(caught.value)


def test_files_of_earlier_versions_say_nothing_of_rows() -> None:
    metadata = lowered().metadata
    assert metadata is not None
    data = json.loads(metadata.to_text())
    for row in data["inputs"]:
        del row["masks_rows"]
    assert not any(row.masks_rows for row in read_metadata(json.dumps(data), "model.pte").inputs)


def test_a_class_that_is_not_known_here_leaves_tensors_flat() -> None:
    given = batch()
    for text in ('(({"x": *, "more": nowhere:Box(*)},), {"factor": *})',):
        made = changed(takes=text)
        assert len(made(given["x"], given["more"][0])) == 5
        with pytest.raises(InputError, match="one after the other") as caught:
            made(given)
        assert "the class nowhere:Box is not known here" in str(caught.value)
        assert "import the module that defines it" in str(caught.value)


def test_a_value_that_text_cannot_carry_leaves_tensors_flat() -> None:
    made = changed(outputs=[None, None, None, "3", 'opaque("some.Class")', '"of it"', None, None])
    assert len(made(batch()["x"], batch()["more"][0])) == 5


@pytest.mark.parametrize(
    "update",
    [
        {"takes": "((*,), {})"},
        {"takes": '[[*, *], {"factor": *}]'},
        {"takes": '((*, *), {"not a name": *})'},
        {"gives": "(*, *)"},
        {"inputs": [None, None, None]},
    ],
)
def test_files_that_contradict_themselves_are_refused(update: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match="contradicts itself"):
        changed(**update)


def test_ordered_dicts_and_constant_outputs(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, unused: Tensor) -> Any:
            return OrderedDict(same=x, made=self.layer(x), nothing=None)

    x, unused = batch()["x"], torch.zeros(3)
    program = qc.quantize(Odd().eval(), (x, unused), [(x, unused)], "executorch").program
    qc.lower(program, "executorch").save(tmp_path / "odd.pte")
    want, got = program(x, unused), qc.load(tmp_path / "odd.pte")(x, unused)
    assert same_arrangement(want, got)
    assert torch.equal(got["same"], x)
