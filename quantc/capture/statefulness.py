"""Detection of models whose results depend on earlier calls through Python attributes.

A program keeps buffers, and nothing else, from call to call. A model that counts its calls in an int, or caches a
tensor in a plain attribute, may be captured as long as its results do not depend on that.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from quantc.capture.model_copies import Tensors, cloned_inputs, twin

STANDARD = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}
"""Attributes that torch keeps for itself; recurrent modules list their weights anew when these are exchanged."""
DEPTH = 4
"""Maximum depth of the search for changes in containers and objects."""
Picture = tuple[Any, ...]


@contextmanager
def keep_attributes(model: nn.Module) -> Iterator[None]:
    """Context manager that restores a model's plain attributes: a closure may reach it although a copy is captured."""
    places: list[Any] = [vars(module) for module in model.modules()]
    places += [value for place in list(places) for value in place.values() if type(value) in (list, dict)]
    before = [copy.copy(place) for place in places]
    try:
        yield
    finally:
        for place, content in zip(places, before, strict=True):
            if not _is_same(place, content):
                place.clear()
                place.extend(content) if isinstance(place, list) else place.update(content)


def _is_same(place: Any, content: Any) -> bool:
    if len(place) != len(content):
        return False
    if isinstance(place, list):
        return all(now is then for now, then in zip(place, content, strict=True))
    return all(key in place and place[key] is value for key, value in content.items())


def watch(model: nn.Module) -> list[str]:
    """List of the attributes that a call changed; filled once `model` has been called."""
    before = _pictures(model)
    changed: list[str] = []

    def note(*_: Any) -> None:
        after = _pictures(model)
        changed.extend(name for name in after if before.get(name) != after[name] and name not in changed)

    model.register_forward_hook(note)
    return changed


def _pictures(model: nn.Module) -> dict[str, Picture]:
    return {
        f"{path}.{name}" if path else name: _picture(value, DEPTH)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in STANDARD
    }


def _picture(value: Any, depth: int) -> Picture:
    """Something that is equal as long as a value is: numbers by value, tensors and strangers by identity."""
    if value is None or isinstance(value, int | float | str | bytes):
        return (type(value), value)
    if depth == 0 or isinstance(value, torch.Tensor | nn.Module | type) or callable(value):
        return (id(value),)
    if isinstance(value, dict):
        return (dict, *((str(key), _picture(item, depth - 1)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return (type(value), *(_picture(item, depth - 1) for item in value))
    return (id(value), *((name, _picture(item, depth - 1)) for name, item in getattr(value, "__dict__", {}).items()))


def depends_on_earlier_calls(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Run the model fresh, and after a call on other inputs; buffers are restored in between."""
    others = pytree.tree_map_only(torch.Tensor, _other_values, (args, kwargs))
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            expected = _run_seeded(twin(model, Tensors.COPIED), args, kwargs)
            return any(
                not _same(_second_result(model, first, (args, kwargs)), expected) for first in (others, (args, kwargs))
            )
        except Exception:  # noqa: BLE001 - what the model raises on its examples, the capture itself reports
            return False


def _second_result(model: nn.Module, first: Any, second: Any) -> list[Any]:
    seasoned = twin(model, Tensors.COPIED)
    places = _tensor_places(seasoned)
    with suppress(Exception):  # values in another order may be no valid input
        _run_seeded(seasoned, *first)
    for put_back in places:
        put_back()
    return _run_seeded(seasoned, *second)


def _run_seeded(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    torch.manual_seed(0)
    given, named = cloned_inputs((args, kwargs))
    return pytree.tree_leaves(model(*given, **named))


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in another order, so that tokens stay tokens and masks stay masks."""
    return tensor.detach().flatten().flip(0).reshape(tensor.shape)


def _tensor_places(model: nn.Module) -> list[Callable[[], None]]:
    """Functions that restore each parameter and buffer with its values."""
    found: list[Callable[[], None]] = []
    for module in model.modules():
        for place in (module._parameters, module._buffers):
            for name, tensor in place.items():
                if tensor is not None:
                    found.append(_restoring(place, name, tensor, tensor.detach().clone()))
    return found


def _restoring(place: dict[str, Any], name: str, tensor: torch.Tensor, value: torch.Tensor) -> Callable[[], None]:
    def put() -> None:
        place[name] = tensor
        tensor.detach().copy_(value)

    return put


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(_equal(a, b) for a, b in zip(left, right, strict=True))


def _equal(left: Any, right: Any) -> bool:
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return type(left) is type(right) and bool(left == right)
    if left.shape != right.shape or left.dtype != right.dtype or left.is_meta:
        return left.is_meta
    return bool(torch.equal(left.nan_to_num(), right.nan_to_num()))
