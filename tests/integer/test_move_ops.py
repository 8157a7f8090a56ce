"""The ops that only move values: on integers each yields integers it was given, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from quantc.integer.move_ops import MOVES
from quantc.ir.dialect import BY_NAME, op_name

aten = torch.ops.aten
X = torch.randperm(96, generator=torch.Generator().manual_seed(0)).reshape(2, 4, 3, 4).to(torch.int8)
LAST = torch.tensor([3, 0, 3])

CALLS: dict[str, tuple[Any, ...]] = {
    "reshape": ([4, 24],),
    "flatten": (1, 2),
    "unflatten": (1, [2, 2]),
    "squeeze": (0,),
    "unsqueeze": (1,),
    "aten.squeeze.default": (),
    "aten.squeeze.dims": ([0, 1],),
    "transpose": (1, 3),
    "permute": ([3, 1, 0, 2],),
    "expand": ([3, 2, 4, 3, 4],),
    "repeat": ([1, 2, 1, 1],),
    "aten.repeat_interleave.self_int": (2, 1),
    "slice": (3, 1, 4, 2),
    "select": (1, 2),
    "narrow": (2, 1, 2),
    "index": ([None, LAST],),
    "index_select": (3, LAST),
    "gather": (3, LAST.expand(2, 4, 3, 3)),
    "flip": ([1, 2],),
    "roll": ([1, 2], [0, 3]),
    "pixel_shuffle": (2,),
    "pixel_unshuffle": (1,),
    "channel_shuffle": (2,),
    "contiguous": (),
    "clone": (),
    "detach": (),
    "split": (2, 1),
    "split_sizes": ([1, 3], 1),
    "chunk": (2, 3),
    "unbind": (1,),
    "amax": ([2, 3],),
    "amin": ([0],),
}


def target_of(name: str) -> Callable[..., Any]:
    if name in BY_NAME:
        found: Callable[..., Any] = BY_NAME[name].target
        return found
    _, op, overload = name.split(".")
    other: Callable[..., Any] = getattr(getattr(aten, op), overload)
    return other


def test_every_move_is_tried_here() -> None:
    assert sorted(CALLS) == sorted(MOVES)


@pytest.mark.parametrize("name", MOVES)
def test_what_comes_out_went_in(name: str) -> None:
    target = target_of(name)
    found = target(X, *CALLS[name])
    parts: list[Tensor] = [found] if isinstance(found, Tensor) else list(found)
    assert {part.dtype for part in parts} == {torch.int8}
    given = set(X.flatten().tolist())
    assert all(set(part.flatten().tolist()) <= given for part in parts)
    assert sum(part.numel() for part in parts) > 0


@pytest.mark.parametrize("name", MOVES)
def test_the_name_is_that_of_the_op(name: str) -> None:
    graph = fx.Graph()
    assert op_name(graph.call_function(target_of(name), (graph.placeholder("x"),))) == name
