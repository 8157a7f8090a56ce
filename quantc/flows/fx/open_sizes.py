"""Dynamic batches behind modules that no tracer looks into.

The shape of such a module's result for an unknown batch cannot be queried. So the model runs on the example inputs and on
twice as many: a size of a result is then the same in both, or grows with that of an input. A later result of another shape
is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from quantc.errors import InputError

Size = int | tuple[int, int]
"""A number, or which dimension of which input it is."""


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Shapes:
    """The shapes of a module's results as functions of its inputs' shapes."""

    results: tuple[tuple[Size, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    arrangement: pytree.TreeSpec

    def __deepcopy__(self, memo: dict[int, Any]) -> Shapes:
        return self  # nothing in it changes

    def of(self, given: list[Tensor]) -> list[list[int]]:
        return [
            [size if isinstance(size, int) else given[size[0]].shape[size[1]] for size in row] for row in self.results
        ]

    def stand_in(self, given: list[Tensor]) -> Any:
        """Results without numbers."""
        rows = zip(self.of(given), self.dtypes, strict=True)
        made = [given[0].new_empty(shape, dtype=dtype) for shape, dtype in rows]
        return pytree.tree_unflatten(made, self.arrangement)

    def check(self, name: str, given: list[Tensor], result: Any) -> None:
        """Refuse a result of another shape."""
        found, expected = [list(x.shape) for x in tensors_in(result)], self.of(given)
        if found != expected:
            raise InputError(
                f"{name} is kept whole and gave {found}, where {expected} was expected",
                where=f"it was given {[list(x.shape) for x in given]}",
                advice="its results must grow with the batch as they did on the example inputs; else prepare it on its own",
            )


@dataclass(frozen=True)
class _Call:
    given: tuple[torch.Size, ...]
    made: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    arrangement: pytree.TreeSpec


def _double_batch(examples: Any) -> Any:
    """The example inputs, repeated along the first dimension."""
    tensors = [x for x in tensors_in(examples) if x.dim()]
    batch = tensors[0].shape[0] if tensors else 0
    return pytree.tree_map_only(
        Tensor, lambda x: torch.cat([x, x]) if x.dim() and x.shape[0] == batch else x, copy.deepcopy(examples)
    )


def batch_dimensions(examples: Any, mark: Any) -> Any:
    """`dynamic_shapes` that leave the size of the batch open."""
    tensors = [x for x in tensors_in(examples) if x.dim()]
    batch = tensors[0].shape[0] if tensors else 0
    return pytree.tree_map(
        lambda x: {0: mark} if isinstance(x, Tensor) and x.dim() and x.shape[0] == batch else None, examples
    )


def shapes_of(model: nn.Module, examples: tuple[Any, ...], names: set[str]) -> dict[str, Shapes] | None:
    """Result shapes of some modules as functions of the batch size; None if they cannot be told from two runs."""
    runs = [_calls(model, given, names) for given in (copy.deepcopy(examples), _double_batch(examples))]
    if None in runs:
        return None
    found: dict[str, Shapes] = {}
    for name in names:
        first, second = ((run or {}).get(name, []) for run in runs)
        shapes = {_relate(*pair) for pair in zip(first, second, strict=False)}
        one = shapes.pop() if len(shapes) == 1 and len(first) == len(second) else None
        if one is None:
            return None
        found[name] = one
    return found


def _calls(model: nn.Module, examples: tuple[Any, ...], names: set[str]) -> dict[str, list[_Call]] | None:
    twin = copy.deepcopy(model)
    calls: dict[str, list[_Call]] = {}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        leaves, arrangement = pytree.tree_flatten(result)
        if all(isinstance(leaf, Tensor) for leaf in leaves):
            given = tuple(x.shape for x in tensors_in((args, kwargs)))
            made, dtypes = tuple(x.shape for x in leaves), tuple(x.dtype for x in leaves)
            calls.setdefault(name, []).append(_Call(given, made, dtypes, arrangement))

    for name in names:
        twin.get_submodule(name).register_forward_hook(partial(note, name), with_kwargs=True)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            twin(*examples)
    except Exception:  # noqa: BLE001 - a model may refuse another batch in any way; then its size stays fixed
        return None
    return calls


def _relate(first: _Call, second: _Call) -> Shapes | None:
    pairs = {
        (small, large): (index, dim)
        for index, shapes in reversed(list(enumerate(zip(first.given, second.given, strict=False))))
        for dim, (small, large) in enumerate(zip(*shapes, strict=False))
    }
    results: list[tuple[Size, ...]] = []
    for before, after in zip(first.made, second.made, strict=False):
        sizes = [
            small if small == large else pairs.get((small, large)) for small, large in zip(before, after, strict=False)
        ]
        if None in sizes or len(before) != len(after):
            return None
        results.append(tuple(size for size in sizes if size is not None))
    same = (first.arrangement, first.dtypes) == (second.arrangement, second.dtypes)
    return Shapes(tuple(results), first.dtypes, first.arrangement) if same else None


def with_stand_ins(model: nn.Module, shapes: dict[str, Shapes]) -> nn.Module:
    """A copy of a model in which some modules give results without numbers if that is what they are given."""
    twin = copy.deepcopy(model)
    for name, found in shapes.items():
        module = twin.get_submodule(name)
        module.__dict__["forward"] = partial(_answer, module.forward, found)
    return twin


def _answer(forward: Callable[..., Any], shapes: Shapes, *args: Any, **kwargs: Any) -> Any:
    given = tensors_in((args, kwargs))
    return shapes.stand_in(given) if any(isinstance(x, FakeTensor) for x in given) else forward(*args, **kwargs)
