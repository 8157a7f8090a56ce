"""Parser of torch.export's `dynamic_shapes`: the dynamic dimensions of each input, and their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from quantc.errors import CaptureError, suggest

Kind = inspect._ParameterKind
STRUCTURE = "give dynamic_shapes the structure of the inputs, by name or in order, with None for what is static"
SMALLEST = 2
"""Sizes 0 and 1 mean something of their own to broadcasting, so a trace with them would hold for them alone."""


@dataclass(frozen=True)
class DynamicDim:
    """One dynamic dimension: `name` is None if the user gave only a hint such as Dim.AUTO."""

    name: str | None
    low: int
    high: int | None
    is_required: bool = True
    """Refuse models that specialize the dimension; False for Dim.AUTO."""
    root: str | None = None
    """For `2*n`: the name of the dimension it is computed from, …"""
    relation: Callable[[Any], Any] | None = None
    """… and how."""


def argument_tree(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by parameter name, in torch.export's flattening order."""
    names = [parameter.name for parameter in _parameters(model, Kind.POSITIONAL_ONLY, Kind.POSITIONAL_OR_KEYWORD)]
    star = next((parameter.name for parameter in _parameters(model, Kind.VAR_POSITIONAL)), "args")
    names += [f"{star}_{index}" for index in range(len(args) - len(names))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _parameters(model: nn.Module, *kinds: Any) -> list[inspect.Parameter]:
    return [row for row in inspect.signature(model.forward).parameters.values() if row.kind in kinds]


def leaf_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A readable identifier for each flat input: `x`, or `batch_mask` for `batch["mask"]`."""
    names: list[str] = []
    for parameter, value in argument_tree(model, args, kwargs).items():
        for path, _ in pytree.tree_flatten_with_path(value)[0]:
            text = "_".join([parameter, *(str(_key(part)) for part in path)])
            names.append("".join(char if char.isalnum() else "_" for char in text))
    return names


def _key(part: Any) -> Any:
    for attribute in ("idx", "key", "name"):
        if hasattr(part, attribute):
            return getattr(part, attribute)
    return part


def dynamic_dims(
    dynamic_shapes: Any, args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module
) -> dict[tuple[int, int], DynamicDim]:
    """(flat input, dimension) → name and range, for every dynamic dimension; validated."""
    if dynamic_shapes is None:
        return {}
    if isinstance(dynamic_shapes, torch.export.ShapesCollection):
        dynamic_shapes = dynamic_shapes.dynamic_shapes(model, args, kwargs)  # type: ignore[no-untyped-call]
    tree = argument_tree(model, args, kwargs)
    bound = list(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    specs = _by_parameter(dynamic_shapes, model, tree, bound)
    found: dict[tuple[int, int], DynamicDim] = {}
    tensors: list[Any] = []
    names = leaf_names(model, args, kwargs)
    for parameter, value in tree.items():
        for path, item in pytree.tree_flatten_with_path(value)[0]:
            where = f"dynamic_shapes of input {names[len(tensors)]!r}"
            for dim, mark in _marks(_at(specs.get(parameter), path, where), item, where):
                if (row := _read(mark, where)) is not None:
                    found[len(tensors), dim] = row
            tensors.append(item)
    _check_sizes(found, tensors, names)
    return found


def _by_parameter(dynamic_shapes: Any, model: nn.Module, tree: dict[str, Any], bound: Sequence[str]) -> dict[str, Any]:
    """The marks under the names of `argument_tree`, in which *args and **kwargs are spread out."""
    if not isinstance(dynamic_shapes, Mapping | list | tuple):
        raise _fault(f"dynamic_shapes is a {type(dynamic_shapes).__name__}", "dynamic_shapes", STRUCTURE)
    if not isinstance(dynamic_shapes, Mapping):
        if len(dynamic_shapes) != len(bound):
            raise _fault(
                f"dynamic_shapes has {len(dynamic_shapes)} entries for {len(bound)} inputs", "dynamic_shapes", STRUCTURE
            )
        dynamic_shapes = dict(zip(bound, dynamic_shapes, strict=True))
    specs = dict(dynamic_shapes)
    for parameter in _parameters(model, Kind.VAR_POSITIONAL):
        spread = specs.pop(parameter.name, None) or ()
        specs.update({f"{parameter.name}_{index}": mark for index, mark in enumerate(spread)})
    for parameter in _parameters(model, Kind.VAR_KEYWORD):
        specs.update(specs.pop(parameter.name, None) or {})
    for name in specs:
        if name not in tree:
            raise _fault(
                f"dynamic_shapes names {name!r}, which is no input",
                f"dynamic_shapes[{name!r}]",
                suggest(str(name), tree, noun="inputs"),
            )
    return specs


def _at(spec: Any, path: tuple[Any, ...], where: str) -> Any:
    for part in path:
        if spec is None:
            return None
        key = _key(part)
        try:
            spec = spec[key] if isinstance(spec, Mapping | list | tuple) else getattr(spec, str(key))
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            raise _fault(f"dynamic_shapes has no entry for {key!r}", where, STRUCTURE) from error
    return spec


def _marks(spec: Any, value: Any, where: str) -> list[tuple[int, Any]]:
    if spec is None:
        return []
    if not isinstance(value, torch.Tensor):
        raise _fault(
            f"dynamic_shapes marks a {type(value).__name__}, and only tensors have dimensions", where, STRUCTURE
        )
    if isinstance(spec, Mapping):
        rows = list(spec.items())
    elif isinstance(spec, list | tuple):
        rows = list(enumerate(spec))
        if len(rows) != value.dim():
            raise _fault(f"{len(rows)} marks for a tensor of {value.dim()} dimensions", where, STRUCTURE)
    else:
        raise _fault(
            f"dynamic_shapes marks a tensor with {spec!r}",
            where,
            "mark a tensor with {dimension: Dim(...)}, or with a list of one mark per dimension",
        )
    for dim, _ in rows:
        if not isinstance(dim, int) or not 0 <= dim < value.dim():
            raise _fault(
                f"dynamic_shapes marks dimension {dim!r} of a tensor of {value.dim()} dimensions",
                where,
                "dimensions count from 0",
            )
    return rows


def _read(mark: Any, where: str) -> DynamicDim | None:
    if mark is None or isinstance(mark, int):
        return None
    hint = getattr(getattr(mark, "type", None), "name", None)
    low, high = getattr(mark, "min", None), getattr(mark, "max", None)
    if isinstance(hint, str):
        is_fixed = hint == "STATIC"
        return None if is_fixed else DynamicDim(None, int(low or 0), upper_bound(high), is_required=hint == "DYNAMIC")
    name = getattr(mark, "__name__", None)
    if not isinstance(name, str):
        raise _fault(f"dynamic_shapes has an unknown mark {mark!r}", where, "use torch.export.Dim, Dim.AUTO or None")
    root = getattr(getattr(mark, "root", None), "__name__", None)
    return DynamicDim(name, int(low or 0), upper_bound(high), root=root, relation=getattr(mark, "fn", None))


def upper_bound(bound: Any) -> int | None:
    """An upper bound as a number; None for torch's encodings of "none": its own infinity, or a huge number."""
    text = str(bound)
    return int(text) if text.isdigit() and int(text) < 2**31 else None


def _check_sizes(dims: Mapping[tuple[int, int], DynamicDim], tensors: Sequence[Any], names: Sequence[str]) -> None:
    """The example inputs themselves must fit their declared dimensions."""
    sizes: dict[str, int] = {}
    for (leaf, dim), mark in dims.items():
        size = tensors[leaf].shape[dim]
        where = f"input {names[leaf]!r}, dimension {dim}"
        if size < mark.low or (mark.high is not None and size > mark.high):
            limits = f"{mark.low}..{'' if mark.high is None else mark.high}"
            raise _fault(
                f"the example's size {size} is outside the range {limits} of {mark.name or 'the dimension'}",
                where,
                "give an example inside the range, or another range: Dim(name, min=…, max=…)",
            )
        if mark.name is not None and sizes.setdefault(mark.name, size) != size:
            raise _fault(
                f"size {mark.name} is {sizes[mark.name]} in one example input and {size} in another",
                where,
                "give the two dimensions different names, or examples of the same size",
            )
    for (leaf, dim), mark in dims.items():
        if mark.relation is None or mark.root not in sizes or mark.name is None:
            continue
        if (wanted := mark.relation(sizes[mark.root])) != sizes[mark.name]:
            raise _fault(
                f"size {mark.name} should be {wanted}, because {mark.root} is {sizes[mark.root]}, not {sizes[mark.name]}",
                f"input {names[leaf]!r}, dimension {dim}",
                "give examples that fit the relation",
            )


def widen_examples(
    dims: Mapping[tuple[int, int], DynamicDim], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs with dynamic dimensions of size 0 or 1 enlarged. Captures depend on sizes alone."""
    leaves, _ = pytree.tree_flatten((args, kwargs))
    sizes = {mark.name: leaves[leaf].shape[dim] for (leaf, dim), mark in dims.items() if mark.name is not None}
    wider: dict[tuple[int, int], int] = {}
    for (leaf, dim), mark in dims.items():
        root = mark.root or mark.name
        now = leaves[leaf].shape[dim] if mark.name is None else sizes.get(root or "", SMALLEST)
        wanted = max(SMALLEST, mark.low)
        if now >= SMALLEST or not mark.is_required or (mark.high is not None and wanted > mark.high):
            continue
        wider[leaf, dim] = wanted if mark.relation is None else mark.relation(SMALLEST)
    return resize_examples(wider, args, kwargs)


def resize_examples(
    sizes: Mapping[tuple[int, int], int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs with some dimensions resized; their values do not matter."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    for (leaf, dim), size in sizes.items():
        shape = list(leaves[leaf].shape)
        shape[dim] = size
        leaves[leaf] = leaves[leaf].detach().new_zeros(shape)
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, spec)
    return found


def dim_names(dims: Mapping[tuple[int, int], DynamicDim]) -> dict[tuple[int, int], str]:
    """(flat input, dimension) → the user's name for it."""
    return {place: dim.name for place, dim in dims.items() if dim.name is not None and dim.name.isidentifier()}


def _fault(what: str, where: str, advice: str) -> CaptureError:
    return CaptureError(what, where=where, advice=advice)
