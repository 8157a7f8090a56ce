"""Calls that move elements, which can be done on bytes as on floats."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from quantc.flows.tracing.functions import COPIES, IN_MEMORY, MOVES
from quantc.flows.tracing.queries import name_of
from quantc.flows.tracing.traced_tensor import Grid, Traced, arrived, call_on_floats, current, is_view, on_grid

if TYPE_CHECKING:
    from quantc.flows.tracing.trace import Trace

PLAIN = (int, bool, str, type(None), EllipsisType, torch.memory_format, torch.dtype)
"""What can be written down of the arguments of a move, so that it is known when it comes again."""


class Move:
    """What is done to bytes, or to floats that were put off: a function, and its arguments but for the tensors."""

    rounds_first = False

    def __init__(
        self,
        func: Callable[..., Any],
        is_listed: bool,
        rest: tuple[Any, ...],
        kwargs: dict[str, Any],
        grid: Grid | None,
    ) -> None:
        self.func, self.is_listed, self.rest, self.kwargs, self.out_grid = func, is_listed, rest, kwargs, grid
        self.is_in_memory = getattr(func, "__name__", "") in IN_MEMORY
        self.makes: dict[Hashable, Tensor | None] = {}

    def forward(self, *levels: Tensor) -> Any:
        given = [piece.contiguous() for piece in levels] if self.is_in_memory else list(levels)
        with torch._C.DisableTorchFunctionSubclass():
            return self.func(given if self.is_listed else given[0], *self.rest, **self.kwargs)

    def draw(self, graph: fx.Graph, root: nn.Module, operands: Sequence[fx.Node], prefix: str) -> fx.Node:
        """Write it into a graph."""
        return graph.call_function(self.forward, tuple(operands))

    def action(self, trace: Trace, forms: tuple[Grid | None, ...]) -> Move:
        """The same move as it was first met: that one knows what shapes it makes."""
        known: Move = trace.paths.moves.setdefault(self.key, self)
        return known

    def gives(self, x: Any, made: Any) -> Any:
        """What it has made of a tensor: a view, unless it copies, and then what is written to one is written to both."""
        if not self.is_listed and not self.is_copy and type(x) is Traced:
            if type(made) is Traced:
                is_view(x, made, self._view)
            elif not isinstance(made, Tensor):
                for index, part in enumerate(made):
                    is_view(x, part, partial(self._part, index))
        return made

    @property
    def is_copy(self) -> bool:
        """Whether what it makes of floats never shares their memory. Places in a tensor are other ones later, perhaps."""
        return name_of(self.func) in COPIES or any(
            isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((self.rest, self.kwargs))
        )

    def _view(self, floats: Tensor) -> Any:
        return self.func(floats, *self.rest, **self.kwargs)

    def _part(self, index: int, floats: Tensor) -> Any:
        return self._view(floats)[index]

    @property
    def key(self) -> Hashable:
        """What tells it from other moves; None if that cannot be said."""
        if not all(map(is_plain, (*self.rest, *self.kwargs.values()))):
            return None
        return self.func, self.is_listed, repr((self.rest, self.kwargs)), self.out_grid


def is_plain(value: Any) -> bool:
    """Whether an argument can be written down."""
    if type(value) in (tuple, list, torch.Size):
        return all(map(is_plain, value))
    if type(value) is slice:
        return all(map(is_plain, (value.start, value.stop, value.step)))
    return type(value) in PLAIN or type(value) is Grid


def put_off(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call on floats, which is put off if those were."""
    first = args[0] if args else None
    pending = first.pending if type(first) is Traced and first.grid is None else None
    if pending is not None and pending.queue is not None:
        move = Move(func, False, args[1:], kwargs, None)
        if (key := move.key) is not None and (made := pending.queue.put_off(key, move, (first,), (None,))) is not None:
            return move.gives(first, made)
    return call_on_floats(func, args, kwargs)


def moved(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move elements: bytes if all are on one grid, else floats."""
    first = args[0] if args else None
    pieces: Any = first if isinstance(first, list | tuple) else (first,)
    for piece in pieces:
        if isinstance(piece, Traced):
            current(piece)
    grid = pieces[0].grid if pieces and type(pieces[0]) is Traced else None
    is_alike = all(type(piece) is Traced and piece.grid == grid for piece in pieces)
    if first is not pieces and grid is None:
        return put_off(func, args, kwargs)
    if grid is None or not is_alike or any(type(leaf) is Traced for leaf in pytree.tree_leaves((args[1:], kwargs))):
        return call_on_floats(func, args, kwargs)
    move = Move(func, first is pieces, args[1:], kwargs, grid)
    queue = next((piece.pending.queue for piece in pieces if piece.pending is not None), None)
    if queue is not None and (key := move.key) is not None:
        made = queue.put_off(key, move, pieces, [grid] * len(pieces))
        if made is not None:
            return move.gives(first, made)
    levels: list[Any] = [arrived(piece).levels for piece in pieces]
    made = move.forward(*levels)
    if isinstance(made, Tensor):
        return move.gives(first, on_grid(made, grid))
    return move.gives(first, type(made)(on_grid(part, grid) for part in made))


def untouched(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that nothing was put in the place of. What moves elements here may be part of a fused op elsewhere."""
    return moved(func, args, kwargs) if name_of(func) in MOVES else call_on_floats(func, args, kwargs)
