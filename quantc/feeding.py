"""How a calibration batch becomes the inputs of a program.

A batch is what the model takes: a tuple or list of its arguments, a mapping from parameter names to arguments, or the
one argument itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from quantc.errors import CalibrationError, InputError
from quantc.program import Program
from quantc.signature import Signature

KINDS = "a batch is a tuple of the model's arguments, a dict of them by name, or its one argument"

Call = tuple[tuple[Any, ...], dict[str, Any]]


def check_batches(batches: Any) -> None:
    """Refuse what can be gone through but does not hold batches: a tensor gives its rows, a dict its keys."""
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


def leaves_of(program: Program, batch: Any, index: int) -> list[Any]:
    """The flat inputs of one batch. InputError, naming the batch, if the program does not take it."""
    signature = program.signature
    calls = list(_calls(signature, batch))
    flat = [pytree.tree_flatten(call) for call in calls]
    leaves, spec = next((pair for pair in flat if pair[1] == signature.in_spec), flat[0])
    if spec != signature.in_spec and isinstance(batch, Mapping):
        raise InputError(
            f"batch {index} does not fit: it has {_listed(batch)}, and the model takes {_listed(signature.parameters)}",
            where=f"batch {index}",
            advice="give each argument by the name of its parameter, and nothing else",
        )
    try:
        signature.check(leaves, spec)
    except InputError as error:
        raise InputError(
            f"batch {index} does not fit: {error.what}",
            where=f"batch {index}" if error.where is None else f"batch {index}, {error.where}",
            advice=f"{KINDS}; {error.advice}",
        ) from error
    return leaves


def batch_of(program: Program, leaves: Iterable[Any]) -> Any:
    """Flat inputs as a batch is given: arguments one after the other, or by name where some have one."""
    signature = program.signature
    arguments, keywords = pytree.tree_unflatten(list(leaves), signature.in_spec)
    return dict(zip(signature.parameters, arguments, strict=False)) | keywords if keywords else arguments


def _calls(signature: Signature, batch: Any) -> Iterator[Call]:
    """The ways in which a batch can be meant."""
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
    """Arguments by the names of the parameters, in any order."""
    names = signature.parameters
    if set(batch) != set(names):
        return (), dict(batch)
    positional = signature.in_spec.children()[0].num_children
    return tuple(batch[name] for name in names[:positional]), {name: batch[name] for name in names[positional:]}


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "nothing"


def samples_in(leaves: Iterable[Any]) -> int | None:
    """How many samples a batch holds: the first size of its tensors, if they agree on one."""
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    return sizes.pop() if len(sizes) == 1 else None
