"""Labels of channels behind ops that move elements: the op itself is run on the labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantc.recover.channel_classes import Labels


def reshaped(labels: Labels, before: Sequence[int], after: Sequence[int]) -> Labels:
    """Labels of a tensor of one shape when it has another, elements in the same order. Axes along which all labels are the
    same stay so, block by block."""
    found: list[int] = []
    for old, new in _blocks(before, after):
        kept = all(labels.shape[axis] == 1 for axis in old)
        found += [1] * len(new) if kept else [after[axis] for axis in new]
    full = labels
    for old, _ in _blocks(before, after):
        if any(labels.shape[axis] > 1 for axis in old):
            shape = list(full.shape)
            for axis in old:
                shape[axis] = before[axis]
            full = np.broadcast_to(full, shape)
    return compact(torch.from_numpy(np.array(full)).reshape(found))


def _blocks(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of axes of both shapes that hold the same elements, the shortest there are."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        old: list[int] = []
        new: list[int] = []
        left = right = 1
        while (not old and not new) or left != right:
            if i < len(before) and (left <= right or j == len(after)):
                old.append(i)
                left *= before[i]
                i += 1
            else:
                new.append(j)
                right *= after[j]
                j += 1
        found.append((old, new))
    return found


def compact(labels: Tensor) -> Labels:
    """Labels with size 1 along axes where they are the same."""
    for axis, size in enumerate(labels.shape):
        if size <= 1:
            continue
        first = labels.narrow(axis, 0, 1)
        if labels.stride(axis) == 0 or bool((labels == first).all()):
            labels = first
    return labels.contiguous().numpy()


def expanded(labels: Labels, shape: Sequence[int]) -> Tensor:
    """Labels of every element, as a view."""
    return torch.from_numpy(labels).expand(*shape)


def moved(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Labels | list[Labels]:
    """What an op makes of labels. Several results give a list."""
    found = target(*args, **kwargs)
    if isinstance(found, Tensor):
        return compact(found)
    return [compact(each) for each in found]


def joined(parts: Sequence[Labels], shapes: Sequence[Sequence[int]], axis: int) -> Labels:
    """Labels of tensors side by side along an axis."""
    axis %= len(shapes[0])
    kept = [max(part.shape[other] for part in parts) for other in range(len(shapes[0]))]
    wide = []
    for part, shape in zip(parts, shapes, strict=True):
        kept[axis] = shape[axis]
        wide.append(np.broadcast_to(part, tuple(kept)))
    found = np.concatenate(wide, axis=axis)
    return found if math.prod(found.shape) == 0 else compact(torch.from_numpy(found))
