"""Conversion of calibration batches to the inputs of a program.

A batch is a tuple or list of the model's arguments, a mapping from parameter names to arguments, or the single argument
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantc.errors import CalibrationError, InputError
from quantc.ir.finite_inputs import check_has_numbers
from quantc.ir.program import Program
from quantc.ir.signature import Signature, as_tensors, tensors_in_place_of_arrays

INPUTS = (
    'write inputs=0, inputs="image", inputs=("ids", "mask"), or inputs=lambda batch: batch[0]; '
    "on the command line --inputs 0, --inputs image, or --inputs ids,mask"
)
KINDS = "a batch is a tuple of the model's arguments, a dict of them by name, or its one argument"

Call = tuple[tuple[Any, ...], dict[str, Any]]
Inputs = int | str | Sequence[int | str] | Callable[[Any], Any]
"""Selects the model's inputs from a batch: index or key of an item, several of them, or a function of the batch."""


def check_batches(batches: Any) -> None:
    """Raise CalibrationError for iterables that do not hold batches: a tensor iterates over rows, a dict over keys."""
    if isinstance(batches, Tensor | Mapping | str | bytes):
        raise CalibrationError(
            f"batches is a {type(batches).__name__}, not an iterable of batches",
            where="batches",
            advice=f"put it in a list, as in [batch]; {KINDS}",
        )
    if not isinstance(batches, Iterable):
        raise CalibrationError(
            f"batches is a {type(batches).__name__}, which cannot be gone through",
            where="batches",
            advice="give a list, a generator, a DataLoader or any other iterable",
        )


@dataclass(frozen=True)
class Picked:
    """Batches reduced to the model's inputs, with floating-point tensors cast to `dtype` if given."""

    batches: Iterable[Any]
    inputs: Inputs | None
    parameters: tuple[str, ...]
    dtype: torch.dtype | None = None

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            part = batch if self.inputs is None else self._part(batch, index)
            yield part if self.dtype is None else cast_floats(part, self.dtype)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]  # TypeError where the length is not known, as len() has it

    def _part(self, batch: Any, index: int) -> Any:
        if callable(self.inputs):
            return self.inputs(batch)
        keys = [self.inputs] if isinstance(self.inputs, int | str) else list(self.inputs or ())
        values = taken_of(batch, keys, index)
        return dict(zip(keys, values, strict=True)) if set(keys) == set(self.parameters) else values


def are_lasting(batches: Iterable[Any]) -> bool:
    """True if batches can be gone through again."""
    while isinstance(batches, Picked):
        batches = batches.batches
    return not isinstance(batches, Iterator)


def taken_of(batch: Any, keys: Sequence[int | str], index: int) -> tuple[Any, ...]:
    """The items of a batch at these indices or keys. InputError, naming the batch, if it lacks one."""
    try:
        return tuple(batch[key] for key in keys)
    except (KeyError, IndexError, TypeError) as error:
        held = _join_names(batch) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        if isinstance(batch, tuple | list):
            held = f"{len(batch)} items"
        raise InputError(
            f"batch {index} has no {str(error) if isinstance(error, KeyError) else repr(list(keys))}: it holds {held}",
            where=f"batch {index}, inputs={keys[0] if len(keys) == 1 else tuple(keys)!r}",
            advice=INPUTS,
        ) from error


def select_inputs(
    batches: Iterable[Any], inputs: Any, program: Program, dtype: torch.dtype | None = None
) -> Iterable[Any]:
    """The batches, reduced to `inputs` and cast to `dtype` if these are given."""
    if inputs is None and dtype is None:
        return batches
    keys = inputs if isinstance(inputs, list | tuple) else [inputs]
    if not callable(inputs) and not all(key is None or type(key) in (int, str) for key in keys):
        raise InputError(f"inputs is a {type(inputs).__name__}", where="inputs=", advice=INPUTS)
    return Picked(batches, inputs, tuple(program.signature.parameters), dtype)


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """A pytree with its floating-point tensors cast to one dtype."""
    tree = tensors_in_place_of_arrays(tree)
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def leaves_of(program: Program, batch: Any, index: int) -> list[Any]:
    """The flat inputs of one batch. InputError, naming the batch, if it does not fit the program."""
    signature = program.signature
    calls = list(_calls(signature, batch))
    flat = [signature.flatten(*call) for call in calls]
    leaves, spec = next((pair for pair in flat if pair[1] == signature.in_spec), flat[0])
    leaves = as_tensors(leaves) or leaves
    if spec != signature.in_spec and isinstance(batch, Mapping):
        raise InputError(
            f"batch {index} does not fit: it has {_join_names(batch)}, and the model takes {_join_names(signature.parameters)}",
            where=f"batch {index}",
            advice=f"give each argument by the name of its parameter, and nothing else; {_line(signature, batch)}",
        )
    try:
        signature.check(leaves, spec)
        check_has_numbers(program.name, program.root, leaves)
    except InputError as error:
        raise InputError(
            f"batch {index} does not fit: {error.what}",
            where=f"batch {index}" if error.where is None else f"batch {index}, {error.where}",
            advice="; ".join(filter(None, [_line(signature, batch), KINDS, error.advice])),
        ) from error
    return leaves


def _line(signature: Signature, batch: Any) -> str:
    """Advice for a batch that holds more than the model's inputs, such as labels."""
    names = signature.parameters
    keys: list[Any] = []
    if isinstance(batch, Mapping):
        keys = [name for name in names if name in batch] if len(batch) > len(names) else []
        keys = keys if len(keys) == len(names) else list(batch)[:1]
    elif isinstance(batch, tuple | list) and len(batch) > len(names):
        keys = list(range(len(names)))
    if not keys:
        return ""
    said = repr(keys[0]) if len(keys) == 1 else repr(tuple(keys))
    return (
        f"say what the model takes of each batch: qc.calibrate(prepared, batches, inputs={said}), and so in qc.quantize and qc.recover; "
        f"on the command line --inputs {','.join(map(str, keys))}"
    )


def batch_of(program: Program, leaves: Iterable[Any]) -> Any:
    """The inverse: flat inputs as a batch, positional, or by name if there are keyword arguments."""
    signature = program.signature
    arguments, keywords = pytree.tree_unflatten(list(leaves), signature.in_spec)
    return dict(zip(signature.parameters, arguments, strict=False)) | keywords if keywords else arguments


def _calls(signature: Signature, batch: Any) -> Iterator[Call]:
    """The possible readings of a batch as a call."""
    if isinstance(batch, Mapping):
        yield _by_name(signature, batch)
    elif isinstance(batch, tuple | list):
        yield tuple(batch), {}
        positional = signature.in_spec.children()[0].num_children
        names = signature.parameters[positional:]
        if len(batch) == positional + len(names):
            yield tuple(batch[:positional]), dict(zip(names, batch[positional:], strict=True))
    yield (batch,), {}


def _by_name(signature: Signature, batch: Mapping[str, Any]) -> Call:
    """Arguments by parameter name, in any order."""
    names = signature.parameters
    # torch renames parameters that shadow a builtin, such as `input`
    batch = {f"{key}_1" if key not in names and f"{key}_1" in names else key: value for key, value in batch.items()}
    if set(batch) != set(names):
        return (), dict(batch)
    positional = signature.in_spec.children()[0].num_children
    return tuple(batch[name] for name in names[:positional]), {name: batch[name] for name in names[positional:]}


def _join_names(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "nothing"


def samples_in(leaves: Iterable[Any]) -> int | None:
    """The number of samples in a batch: the first size of its tensors if all agree, else None."""
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    return sizes.pop() if len(sizes) == 1 else None
