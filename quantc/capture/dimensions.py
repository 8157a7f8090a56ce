"""Reading `dynamic_shapes` as torch.export understands it: which dimension of which input is dynamic, by what name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from quantc.errors import CaptureError


@dataclass(frozen=True)
class DynamicDim:
    """One dynamic dimension: `name` is None where the user gave only a hint such as Dim.AUTO."""

    name: str | None
    low: int
    high: int | None


def argument_tree(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by parameter name, in the order in which torch.export flattens them."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    tree: dict[str, Any] = {}
    for index, value in enumerate(args):
        if index < len(parameters) and parameters[index].kind is not inspect.Parameter.VAR_POSITIONAL:
            tree[parameters[index].name] = value
        else:
            tree[f"args_{index}"] = value
    tree.update(kwargs)
    return tree


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
    """(flat input, dimension) → its name and range, for every dimension marked dynamic."""
    if dynamic_shapes is None:
        return {}
    if isinstance(dynamic_shapes, torch.export.ShapesCollection):
        dynamic_shapes = dynamic_shapes.dynamic_shapes(model, args, kwargs)  # type: ignore[no-untyped-call]
    tree = argument_tree(model, args, kwargs)
    if isinstance(dynamic_shapes, Mapping):
        specs = dict(dynamic_shapes)
    else:
        specs = dict(zip(tree, dynamic_shapes, strict=False))
    found: dict[tuple[int, int], DynamicDim] = {}
    leaf = 0
    for parameter, value in tree.items():
        for path, item in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(item, torch.Tensor):
                for dim, mark in _marks(_at(specs.get(parameter), path)):
                    if (row := _read(mark)) is not None:
                        found[leaf, dim] = row
            leaf += 1
    return found


def _at(spec: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        if spec is None:
            return None
        key = _key(part)
        try:
            spec = spec[key] if isinstance(spec, Mapping | list | tuple) else getattr(spec, str(key))
        except (KeyError, IndexError, AttributeError) as error:
            raise CaptureError(
                f"dynamic_shapes has no entry for {key!r}",
                advice="give dynamic_shapes the same structure as the inputs, with None for what is static",
            ) from error
    return spec


def _marks(spec: Any) -> list[tuple[int, Any]]:
    if spec is None:
        return []
    if isinstance(spec, Mapping):
        return [(int(dim), mark) for dim, mark in spec.items()]
    if isinstance(spec, list | tuple):
        return list(enumerate(spec))
    raise CaptureError(
        f"dynamic_shapes marks a tensor with {spec!r}",
        advice="mark a tensor with {dimension: Dim(...)}, or with a list of one mark per dimension",
    )


def _read(mark: Any) -> DynamicDim | None:
    if mark is None or isinstance(mark, int) or mark is Dim.STATIC:
        return None
    if mark in (Dim.AUTO, Dim.DYNAMIC) or type(mark).__name__ == "_DimHint":
        return DynamicDim(None, 0, None)
    name = getattr(mark, "__name__", None)
    if not isinstance(name, str):
        raise CaptureError(
            f"dynamic_shapes has an unknown mark {mark!r}", advice="use torch.export.Dim, Dim.AUTO or None"
        )
    return DynamicDim(name, int(getattr(mark, "min", 0)), upper_bound(getattr(mark, "max", None)))


def upper_bound(bound: Any) -> int | None:
    """An upper bound as a number; torch writes "none" as an infinity of its own or as a huge number."""
    text = str(bound)
    return int(text) if text.isdigit() and int(text) < 2**31 else None


def dim_names(
    dynamic_shapes: Any, args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module
) -> dict[tuple[int, int], str]:
    """(flat input, dimension) → the user's name for it."""
    dims = dynamic_dims(dynamic_shapes, args, kwargs, model)
    return {place: dim.name for place, dim in dims.items() if dim.name is not None and dim.name.isidentifier()}
