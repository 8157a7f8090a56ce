"""The --data argument: calibration batches.

- a `.npz` or `.safetensors` file with one array for each input of the program, by the input's name. It holds samples
  along its first dimension, which are split into batches of the size the program was captured for; or, with one more
  dimension than the input has, whole batches;
- `package.module:name`: an iterable of batches, or a function that returns one.

Reading a file executes nothing.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantc.cli.model_source import call_factory, import_object
from quantc.errors import DataError, LoadError, suggest
from quantc.files.regular_file import check_regular
from quantc.ir.batch_inputs import check_batches, taken_of
from quantc.ir.program import Program
from quantc.ir.signature import Input

FILES = (".npz", ".safetensors")
KINDS = "give a .npz or .safetensors file with one array for each input, or package.module:name"
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
BATCH_SIZE = 32
"""For programs that take batches of any size."""


@dataclass(frozen=True)
class Batches:
    """Batches, and notes on them."""

    values: Iterable[Any]
    notes: tuple[str, ...] = ()


@dataclass
class Data:
    """The --data argument, read once: arrays by name, or an iterable of batches."""

    place: str
    arrays: dict[str, Tensor] | None = None
    values: Iterable[Any] | None = None
    inputs: tuple[int | str, ...] = ()
    """The parts of each batch that the model takes; empty for all."""

    @staticmethod
    def read(data: str, inputs: tuple[int | str, ...] = ()) -> Data:
        path = Path(data)
        if path.suffix in FILES:
            arrays = _arrays(path)
            return Data(data, arrays=_select_arrays(arrays, inputs, data) if inputs else arrays)
        if ":" not in data:
            raise LoadError(f"{data!r} is not a source of batches", where=f"--data {data}", advice=KINDS)
        return Data(data, values=batches_of(data, import_object(data)), inputs=inputs)

    def batches(self, program: Program) -> Batches:
        """Batches for a program."""
        if self.arrays is not None:
            return _cut(self.arrays, program, self.place)
        return Batches(self.values if self.values is not None else ())

    def examples(self, model: nn.Module) -> tuple[Any, ...] | dict[str, Any] | None:
        """The first batch, as example inputs of a model without any; None if there is none."""
        if self.arrays is not None:
            chosen = _by_parameter(self.arrays, model, self.place)
            if isinstance(chosen, dict):
                return {name: array[:BATCH_SIZE] for name, array in chosen.items()}
            return tuple(array[:BATCH_SIZE] for array in chosen)
        batches = iter(self.values if self.values is not None else ())
        first = next(batches, None)
        if first is None:
            return None
        if batches is self.values:  # it gives each batch once: the first is to come again
            self.values = chain([first], batches)
        if self.inputs:
            first = taken_of(first, self.inputs, 0)
        if isinstance(first, Mapping) and set(first) <= set(signature(model.forward).parameters):
            return dict(first)
        return first if isinstance(first, tuple) else tuple(first) if isinstance(first, list) else (first,)


def _select_arrays(arrays: dict[str, Tensor], inputs: tuple[int | str, ...], data: str) -> dict[str, Tensor]:
    """The arrays that --inputs names, or whose place it gives."""
    found: dict[str, Tensor] = {}
    for key in inputs:
        name = list(arrays)[key] if isinstance(key, int) and -len(arrays) <= key < len(arrays) else str(key)
        if name not in arrays:
            advice = suggest(name, arrays, noun="arrays")
            raise LoadError(f"unknown array {name}", where=f"--data {data}, --inputs", advice=advice)
        found[name] = arrays[name]
    return found


def _by_parameter(arrays: dict[str, Tensor], model: nn.Module, data: str) -> list[Tensor] | dict[str, Tensor]:
    """Arrays in the order of the parameters of a model's `forward`; by name where some are taken by name alone."""
    parameters = signature(model.forward).parameters
    names = [name for name, parameter in parameters.items() if parameter.kind in POSITIONAL]
    named = {name for name, parameter in parameters.items() if parameter.kind is Parameter.KEYWORD_ONLY}
    if named & set(arrays) and set(arrays) <= {*names, *named}:
        return arrays
    must_be_named = any(parameters[name].default is Parameter.empty for name in named)
    if len(arrays) == 1 and not must_be_named:
        return list(arrays.values())
    unnamed = [f"arr_{index}" for index in range(len(arrays))]  # what numpy.savez(file, a, b) calls them
    given = unnamed if set(arrays) == set(unnamed) and not must_be_named else [name for name in names if name in arrays]
    if set(given) != set(arrays) or (given is not unnamed and given != names[: len(given)]):
        raise LoadError(
            f"the arrays are {', '.join(sorted(arrays)) or 'none'}, and the model takes "
            f"{', '.join([*names, *sorted(named)]) or 'no names'}",
            where=f"--data {data}",
            advice=f"{_more_than([*names, *named], arrays)}name the arrays like the parameters of forward, from the first on; "
            "or let the factory return (model, example_inputs)",
        )
    return [arrays[name] for name in given]


def batches_of(place: str, value: Any) -> Iterable[Any]:
    """Batches, or the result of a function that returns them."""
    value = call_factory(place, value, "an iterable of batches") if callable(value) else value
    check_batches(value)
    batches: Iterable[Any] = value
    return batches


def _arrays(path: Path) -> dict[str, Tensor]:
    check_regular(path, KINDS)
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
    """Batches of arguments. The arrays are checked at once, not at the first batch."""
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
    _check_together(inputs, parts, data)
    notes = [note for item in inputs if (note := _leftover_note(item, chosen[item.name], parts[item.name]))]
    return Batches(list(_arguments(program, parts)), tuple(notes))


def _check_together(inputs: list[Input], parts: Mapping[str, tuple[Tensor, ...]], data: str) -> None:
    """Inputs whose batch is open, and one and the same, have as many samples each."""
    counts: dict[Any, dict[str, int]] = {}
    for item in inputs:
        if (
            item.type is not None
            and isinstance(item.type.shape[0], str)
            and parts[item.name][0].dim() == item.type.rank
        ):
            counts.setdefault(item.type.shape[0], {})[item.name] = sum(len(batch) for batch in parts[item.name])
    for together in counts.values():
        if len(set(together.values())) > 1:
            shown = ", ".join(f"{name} {count}" for name, count in together.items())
            raise DataError(
                f"the inputs come to different numbers of samples: {shown}",
                where=f"--data {data}",
                advice="give as many samples for each input",
            )


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
    missing = [name for name in names if name not in arrays]
    advice = _more_than(names, arrays).removesuffix("; or ")
    if missing:
        advice = f"name the arrays like the inputs; {missing[0]}: {suggest(missing[0], arrays, noun='arrays')}"
    raise LoadError(
        f"the arrays are {', '.join(sorted(arrays)) or 'none'}, and the program's inputs are {', '.join(names)}",
        where=f"--data {data}",
        advice=advice,
    )


def _more_than(names: list[str], arrays: Mapping[str, Tensor]) -> str:
    """Advice on arrays that are not inputs, such as labels, beside some that are."""
    known, more = [name for name in names if name in arrays], [name for name in arrays if name not in names]
    if not known or not more:
        return ""
    return f"leave {', '.join(more)} out of the file, or say which to take: --inputs {','.join(known)}; or "


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


def _leftover_note(item: Input, array: Tensor, batches: tuple[Tensor, ...]) -> str | None:
    is_cut = item.type is not None and array.dim() == item.type.rank
    rest = array.shape[0] - sum(len(batch) for batch in batches) if is_cut else 0
    return f"{rest} of {array.shape[0]} samples of {item.name} do not fill a batch and are left out" if rest else None
