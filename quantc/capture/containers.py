"""Checks for containers that are not registered as pytrees: their tensors would be lost, or the container type would change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from quantc.capture.refused_trace import RefusedError
from quantc.errors import CaptureError

DEPTH = 4
"""Maximum depth of the search for tensors in containers and objects."""
REGISTER = "torch.utils._pytree.register_pytree_node says how it is taken apart and put together again"
ADVICE = f"give a plain dict, list, tuple or NamedTuple of tensors; or register the class: {REGISTER}"


def refuse_hidden_tensors(name: str, leaf: Any) -> None:
    """Refuse an example input that holds tensors in an unregistered container: they would become constants of the program."""
    if not isinstance(leaf, torch.Tensor) and _holds_tensors(leaf, DEPTH):
        raise CaptureError(
            f"input {name!r} is a {type(leaf).__qualname__}, and torch does not know that it holds tensors",
            where=f"input {name!r}",
            advice=ADVICE,
        )


def refuse_unknown_containers(leaves: Iterable[Any]) -> None:
    """Refuse outputs in unregistered containers: a subclass of dict, list or tuple would lose its type, and tensors in
    any other object would be invisible.
    """
    for leaf in leaves:
        if issubclass(type(leaf), fx.Proxy):  # it says that it is what it stands for, as the state of an LSTM
            continue
        if isinstance(leaf, dict | list | tuple):
            kind = next(base.__name__ for base in (dict, list, tuple) if isinstance(leaf, base))
            raise RefusedError(
                f"the model returns a {type(leaf).__qualname__}, which torch does not know: a program would return a {kind}; "
                f"return a {kind}, or register the class ({REGISTER})"
            )
        if not isinstance(leaf, torch.Tensor) and _holds_tensors(leaf, DEPTH):
            raise RefusedError(
                f"the model returns a {type(leaf).__qualname__}, and torch does not know that it holds tensors; "
                f"return a plain dict, list, tuple or NamedTuple of them, or register the class ({REGISTER})"
            )


def _holds_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor | fx.Proxy):
        return True
    if depth == 0 or value is None or isinstance(value, int | float | complex | str | bytes | type) or callable(value):
        return False
    inside: list[Any] = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, Mapping):
        inside += list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inside += list(value)
    return any(_holds_tensors(item, depth - 1) for item in inside)
