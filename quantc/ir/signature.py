"""The calling convention of a Program: flat inputs with their types, and the pytree specs of inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from quantc.errors import InputError
from quantc.ir.size_expressions import evaluate
from quantc.ir.types import TensorType, type_of_value

ADVICE = (
    "call it with inputs like the example inputs, or capture it again with dynamic_shapes= for the dimensions that vary"
)

MAX_SHOWN = 40
"""Maximum number of values for which messages write out a pytree structure."""


@dataclass(frozen=True)
class Input:
    """One flat input. A tensor has a `type` (None: any); anything else is a constant fixed at capture."""

    name: str
    type: TensorType | None = None
    is_constant: bool = False
    constant: Any = None


@dataclass(frozen=True)
class Signature:
    """The calling convention. `ranges` bounds the symbols of dynamic sizes."""

    inputs: tuple[Input, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    ranges: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    opened: frozenset[str] = frozenset()
    """Symbols that capture made dynamic on its own: a target that needs fixed sizes uses those of the example
    inputs."""

    @property
    def parameters(self) -> list[str]:
        """The parameter names, positional ones first; generated where the leaves of a pytree do not reveal one."""
        positional, keywords = self.in_spec.children()
        names: list[str] = []
        leaf = 0
        for index, child in enumerate(positional.children()):
            leaves = [item.name for item in self.inputs[leaf : leaf + child.num_leaves]]
            names.append(leaves[0] if child.is_leaf() else _name_of_tree(child, leaves) or f"tree_{index}")
            leaf += child.num_leaves
        names += [str(key) for key in keywords.context or ()]
        if len(set(names)) == len(names):
            return names
        return [name if names.count(name) == 1 else f"tree_{index}" for index, name in enumerate(names)]

    @property
    def call(self) -> str:
        """The call syntax: `(x, mask=mask)`."""
        positional = self.in_spec.children()[0].num_children
        names = self.parameters
        return f"({', '.join([*names[:positional], *(f'{name}={name}' for name in names[positional:])])})"

    def _other_arrangement(self, spec: pytree.TreeSpec) -> InputError:
        """The error for arguments of another structure."""
        (given, keywords), (taken, named) = spec.children(), self.in_spec.children()
        names = self.parameters
        if given.num_children != taken.num_children or keywords.context != named.context:
            extra = "".join(f", {key}=" for key in keywords.context or ())
            advice = f"call it with {self.call} and nothing else; from pairs of images and labels take the images"
            if given.num_children + keywords.num_children == taken.num_children + named.num_children:
                listed = ", ".join(names[: taken.num_children])
                ways = [f"{listed} by position"] if listed else []
                ways += [f"{', '.join(map(str, named.context))} by name"] if named.context else []
                advice = f"give {', and '.join(ways)}, as it was captured: call it with {self.call}"
            return InputError(
                f"the call has {given.num_children} positional arguments{extra}, and the model takes "
                f"{taken.num_children + len(named.context or ())}: {', '.join(names)}",
                where=f"the inputs are {', '.join(names)}",
                advice=advice,
            )
        pairs = zip(
            names, (*given.children(), *keywords.children()), (*taken.children(), *named.children()), strict=True
        )
        name, ours, theirs = next(row for row in pairs if row[1] != row[2])
        return InputError(
            f"{name} is arranged as {_shape_of(ours)}, but the program was captured with {_shape_of(theirs)}",
            where=f"input {name!r}",
            advice="give it in the arrangement of the example inputs, dicts with the same keys",
        )

    def flatten(self, args: Any, kwargs: Any) -> tuple[list[Any], pytree.TreeSpec]:
        """The flat inputs of a call, and their pytree spec. Keywords and dicts may be in any order."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec == self.in_spec:
            return leaves, spec
        return pytree.tree_flatten(_in_order((args, kwargs), self.in_spec))

    def check(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> None:
        """Raise InputError unless flat inputs fit: a program specialized to a size must not run on another."""
        if spec != self.in_spec:
            raise self._other_arrangement(spec)
        sizes: dict[str, int] = {}
        derived: list[tuple[Input, int, str, int]] = []
        for item, leaf in zip(self.inputs, leaves, strict=True):
            if item.is_constant:
                if leaf is not item.constant and (isinstance(leaf, torch.Tensor) or leaf != item.constant):
                    raise InputError(
                        f"input {item.name!r} is {leaf!r}, but the program was captured for {item.constant!r}",
                        where=f"input {item.name!r}",
                        advice="values other than tensors are fixed at capture; capture once for each value",
                    )
                continue
            if item.type is not None:
                derived.extend(_check_tensor(item, item.type, leaf, sizes))
        for item, dim, expression, size in derived:
            expected = evaluate(expression, sizes)
            if expected is not None and expected != size:
                _mismatch(item, dim, f"{expression} = {expected}", size)
        for symbol, size in sizes.items():
            low, high = self.ranges.get(symbol, (0, None))
            if size < low or (high is not None and size > high):
                raise InputError(
                    f"size {symbol} is {size}, outside the captured range {low}..{'' if high is None else high}",
                    advice=ADVICE,
                )


def _in_order(value: Any, spec: pytree.TreeSpec) -> Any:
    """A pytree with the key order of `spec` in its dicts; unchanged where the structure differs."""
    if spec.is_leaf() or type(value) is not spec.type or type(value) not in (dict, list, tuple):
        return value
    if isinstance(value, dict):
        if value.keys() != set(spec.context):
            return value
        return {key: _in_order(value[key], child) for key, child in zip(spec.context, spec.children(), strict=True)}
    if len(value) != spec.num_children:
        return value
    return type(value)(_in_order(item, child) for item, child in zip(value, spec.children(), strict=True))


def as_tensors(leaves: Sequence[Any]) -> list[Any] | None:
    """Flat inputs with NumPy arrays as tensors that share memory; None if there are no arrays."""
    if not any(_is_array(leaf) for leaf in leaves):
        return None
    return [_as_tensor(leaf) if _is_array(leaf) else leaf for leaf in leaves]


def tensors_in_place_of_arrays(tree: Any) -> Any:
    """The same for any pytree."""
    leaves, spec = pytree.tree_flatten(tree)
    made = as_tensors(leaves)
    return tree if made is None else pytree.tree_unflatten(made, spec)


def _is_array(leaf: Any) -> bool:
    kind = type(leaf)
    return kind.__name__ == "ndarray" and kind.__module__ == "numpy"


def _as_tensor(array: Any) -> Any:
    """Copy an array that is read-only or has negative strides; leave one of strings or objects as it is."""
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError:
        return array


def _name_of_tree(spec: pytree.TreeSpec, names: Sequence[str]) -> str | None:
    """The parameter name that leaf names imply: `batch` for `batch_x` and `batch_mask`."""
    found = set()
    for name, path in zip(names, _paths(spec), strict=False):
        if path is None or not name.lower().endswith(path.lower()):
            return None
        found.add(name.removesuffix(name[len(name) - len(path) :]))
    prefix = found.pop() if len(found) == 1 else ""
    return prefix if prefix.isidentifier() else None


def _paths(spec: pytree.TreeSpec) -> Iterator[str | None]:
    """The path to each leaf of a pytree, in the form names have: `_pair_0`."""
    if spec.is_leaf():
        yield ""
        return
    keys = spec.context if spec.type is dict else range(spec.num_children) if spec.type in (list, tuple) else None
    for index, child in enumerate(spec.children()):
        for path in _paths(child):
            text = "" if keys is None else "".join(c if c.isalnum() else "_" for c in str(keys[index]))
            yield None if keys is None or path is None else f"_{text}{path}"


def _shape_of(spec: pytree.TreeSpec) -> str:
    """The structure of a pytree in short: `*`, `(*, *)`, `{x: *, y: *}`."""
    if spec.is_leaf():
        return "*"
    if spec.num_leaves > MAX_SHOWN:
        kind = getattr(spec.type, "__name__", "tree")
        return f"a {kind} of {spec.num_leaves} values"
    parts = [_shape_of(child) for child in spec.children()]
    if spec.type is dict:
        return f"{{{', '.join(f'{key}: {part}' for key, part in zip(spec.context, parts, strict=True))}}}"
    inside = ", ".join(parts)
    return f"[{inside}]" if spec.type is list else f"({inside})"


def _check_tensor(
    item: Input, expected: TensorType, leaf: Any, sizes: dict[str, int]
) -> list[tuple[Input, int, str, int]]:
    """Check dtype, rank and fixed sizes; bind plain symbols; return the composite sizes to check later."""
    if not isinstance(leaf, torch.Tensor):
        raise InputError(
            f"input {item.name!r} is a {type(leaf).__name__}, not a tensor",
            where=f"input {item.name!r}",
            advice="give a tensor: torch.as_tensor(x)",
        )
    if leaf.layout is not torch.strided or leaf.is_nested:
        kind = "is nested" if leaf.is_nested else f"has the layout {leaf.layout}"
        raise InputError(
            f"input {item.name!r} {kind}, and the program was captured for dense tensors",
            where=f"input {item.name!r}",
            advice="give x.to_dense(), or x.to_padded_tensor(0.0) of a nested one",
        )
    if leaf.dtype != expected.dtype or leaf.dim() != expected.rank:
        raise InputError(
            f"input {item.name!r} is {type_of_value(leaf)}, but the program was captured for {expected}",
            where=f"input {item.name!r}",
            advice=ADVICE if leaf.dim() != expected.rank else f"give x.to({expected.dtype})",
        )
    later: list[tuple[Input, int, str, int]] = []
    for dim, (want, size) in enumerate(zip(expected.shape, leaf.shape, strict=True)):
        if isinstance(want, int):
            if want != size:
                _mismatch(item, dim, str(want), size)
        elif want.isidentifier():
            if sizes.setdefault(want, size) != size:
                _mismatch(item, dim, f"{want} = {sizes[want]}", size)
        else:
            later.append((item, dim, want, size))
    return later


def _mismatch(item: Input, dim: int, expected: str, size: int) -> None:
    raise InputError(
        f"input {item.name!r} has size {size} in dimension {dim}, but the program was captured for {expected}",
        where=f"input {item.name!r}, dimension {dim}",
        advice=ADVICE,
    )
