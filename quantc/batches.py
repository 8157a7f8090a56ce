"""What the command line takes as --data: batches to calibrate with.

- a `.npz` or `.safetensors` file with one array for each input of the program, by the input's name. It holds samples
  along its first dimension, which are cut into batches of the size the program was captured for; or, with one more
  dimension than the input has, whole batches;
- `package.module:name`: an iterable of batches, or a function that gives one.

Reading a file executes nothing.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils import _pytree as pytree

from quantc.errors import DataError, LoadError, suggest
from quantc.feeding import check_batches
from quantc.program import Program
from quantc.signature import Input
from quantc.source import called, imported

FILES = (".npz", ".safetensors")
KINDS = "give a .npz or .safetensors file with one array for each input, or package.module:name"
BATCH_SIZE = 32
"""For programs that take batches of any size."""


@dataclass(frozen=True)
class Batches:
    """Batches, and what there is to say about them."""

    values: Iterable[Any]
    notes: tuple[str, ...] = ()


def read_batches(data: str, program: Program) -> Batches:
    """The batches that --data stands for, for a program."""
    path = Path(data)
    if path.suffix in FILES:
        return _cut(_arrays(path), program, data)
    if ":" not in data:
        raise LoadError(f"{data!r} is not a source of batches", where=f"--data {data}", advice=KINDS)
    return Batches(batches_of(data, imported(data)))


def batches_of(place: str, value: Any) -> Iterable[Any]:
    """Batches, or what a function gives for them."""
    value = called(place, value, "an iterable of batches") if callable(value) else value
    check_batches(value)
    batches: Iterable[Any] = value
    return batches


def _arrays(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise LoadError(f"there is no file {path}", where=f"--data {path}", advice=KINDS)
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        with np.load(path, allow_pickle=False) as stored:
            return {name: torch.from_numpy(stored[name]) for name in stored.files}
    except (OSError, ValueError, TypeError, zipfile.BadZipFile, SafetensorError) as error:
        raise LoadError(
            f"{path} cannot be read: {error}",
            where=f"--data {path}",
            advice="write it with numpy.savez or safetensors.torch.save_file, arrays of numbers only",
        ) from error


def _cut(arrays: Mapping[str, Tensor], program: Program, data: str) -> Batches:
    """Batches of arguments. The arrays are checked now, and not when the first batch is asked for."""
    inputs = [item for item in program.signature.inputs if not item.is_constant]
    chosen = _by_input(arrays, inputs, data)
    parts = {item.name: _split(item, chosen[item.name], data) for item in inputs}
    counts = {name: len(batches) for name, batches in parts.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise DataError(
            f"the inputs come to different numbers of batches: {shown}",
            where=f"--data {data}",
            advice="give as many samples for each input",
        )
    notes = [note for item in inputs if (note := _left_out(item, chosen[item.name], parts[item.name]))]
    return Batches(list(_arguments(program, parts)), tuple(notes))


def _arguments(program: Program, parts: Mapping[str, tuple[Tensor, ...]]) -> Iterator[tuple[Any, ...]]:
    signature = program.signature
    for tensors in zip(*parts.values(), strict=True):
        batch = dict(zip(parts, tensors, strict=True))
        leaves = [item.constant if item.is_constant else batch[item.name] for item in signature.inputs]
        args, kwargs = pytree.tree_unflatten(leaves, signature.in_spec)
        yield (*args, *kwargs.values())


def _by_input(arrays: Mapping[str, Tensor], inputs: list[Input], data: str) -> dict[str, Tensor]:
    names = [item.name for item in inputs]
    if set(arrays) == set(names):
        return dict(arrays)
    if len(arrays) == len(names) == 1:
        return dict(zip(names, arrays.values(), strict=True))
    unnamed = [f"arr_{index}" for index in range(len(names))]  # what numpy.savez(file, a, b) calls them
    if set(arrays) == set(unnamed):
        return {name: arrays[given] for name, given in zip(names, unnamed, strict=True)}
    missing = [name for name in names if name not in arrays] or [name for name in arrays if name not in names]
    raise LoadError(
        f"the arrays are {', '.join(sorted(arrays)) or 'none'}, and the program's inputs are {', '.join(names)}",
        where=f"--data {data}",
        advice=f"name the arrays like the inputs; {missing[0]}: {suggest(missing[0], arrays, noun='arrays')}",
    )


def _split(item: Input, array: Tensor, data: str) -> tuple[Tensor, ...]:
    """An array cut into batches for one input; only full ones where the size of a batch is fixed."""
    if not array.dim() or (item.type is not None and array.dim() not in (item.type.rank, item.type.rank + 1)):
        raise DataError(
            f"the array for input {item.name!r} has {array.dim()} dimensions, and the input is {item.type}",
            where=f"--data {data}",
            advice="give samples along the first dimension, or whole batches along one more",
        )
    if item.type is None or array.dim() > item.type.rank:
        return array.unbind(0)
    size = item.type.shape[0]
    if not isinstance(size, int):
        return torch.split(array, BATCH_SIZE)
    if array.shape[0] < size:
        raise DataError(
            f"the array for input {item.name!r} holds {array.shape[0]} samples, and a batch is {size}",
            where=f"--data {data}",
            advice=f"give at least {size}, or capture with dynamic_shapes= for the first dimension",
        )
    return torch.split(array[: array.shape[0] // size * size], size)


def _left_out(item: Input, array: Tensor, batches: tuple[Tensor, ...]) -> str | None:
    is_cut = item.type is not None and array.dim() == item.type.rank
    rest = array.shape[0] - sum(len(batch) for batch in batches) if is_cut else 0
    return f"{rest} of {array.shape[0]} samples of {item.name} do not fill a batch and are left out" if rest else None
