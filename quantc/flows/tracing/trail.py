"""The calls that a converted model has made one after another, as a tree: where one is in it tells all that came before.

A call stands in it if all it did was to put off ops, on bytes or on what other such calls will give. The same call after the same ones
comes to the same again, so nothing of it needs to be worked out: `following` does so, and `trail_log` writes the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from quantc.flows.tracing.call_sites import Context, Key, place_from
from quantc.flows.tracing.traced_tensor import Grid, Light

if TYPE_CHECKING:
    from quantc.flows.tracing.run import Frame, Run

MOST_NEXT = 32
"""How many calls are remembered that may come after one."""
MOST_CALLS = 16384
"""How many calls are remembered, in all sequences of a model together."""
MOST_DEEP = 32
"""In how many modules a call may be that is remembered. Recursion goes deeper."""
PATIENCE = 8
"""How much more often following from a place may be in vain than not, before nobody follows from there for a while."""
PAUSE = 16
"""How long that is, in calls of the model."""
MOST_WORTH = 8
TIMES = 3
"""How often something must have come that is no op to be put off, before it is taken for granted: ops run at once on shapes that are new to
them."""


class Saved(NamedTuple):
    """A frame as it was, with those around it."""

    around: Saved | None
    state: Any
    context: Context
    previous: int
    last: str

    @property
    def key(self) -> Hashable:
        """What tells it from others."""
        own = (self.context.number, self.previous, self.last)
        return own if self.around is None else (*own, self.around.key)


def saved(frame: Frame) -> Saved | None:
    """A frame as it is now; None if it, or one around it, was never seen, or if they are too many."""
    frames: list[Frame] = []
    inner: Frame | None = frame
    while inner is not None:
        if inner.context is None or len(frames) == MOST_DEEP:
            return None
        frames.append(inner)
        inner = inner.parent
    found: Saved | None = None
    for row in reversed(frames):
        found = Saved(found, row.state, row.context, row.previous, row.last)  # type: ignore[arg-type]
    return found


class Outside(NamedTuple):
    """An operand that was not made by the calls before: bytes on a grid, or floats that are rounded onto it at the call."""

    place: int
    """Among the inputs of the queue."""
    grid: Grid
    shape: torch.Size
    stride: tuple[int, ...]


class Fixed:
    """An argument that is the same each time: the very tensor, or an equal value of the same type."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key: Hashable = ("tensor", id(value)) if isinstance(value, Tensor) else repr(value)

    def fits(self, x: Any) -> bool:
        """Whether an argument is that one."""
        value = self.value
        return x is value or (type(x) is type(value) and not isinstance(x, Tensor) and repr(x) == self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class Real:
    """A tensor of any kind whose numbers are there, for a call that is made in any case."""

    def fits(self, x: Any) -> bool:
        """Whether an argument is one."""
        return isinstance(x, Tensor) and type(x) is not Light


REAL = Real()
Read = int | Outside | Fixed | Real | tuple[int, ...]
"""What a call is given for an argument: a result of the calls before, by number; a list of such; or something else."""
Again = Callable[[tuple[Any, ...], dict[str, Any], "Run"], Any]
"""Works out a call that was not, for its arguments."""


class End(NamedTuple):
    """What is to be done when somebody looks."""

    wanted: tuple[int, ...]
    """The steps of the queue whose results are asked for."""
    rows: tuple[tuple[int, int, Grid | None], ...]
    """Each result that somebody holds: its number, its place in what is wanted, its grid if it is bytes."""


class Node:
    """Where one is after certain calls."""

    __slots__ = ("after", "before", "ends", "frames", "looks", "rest", "step", "then")

    def __init__(self, before: Node | None, frames: Saved, step: Any) -> None:
        self.before = before
        self.then: Any = None
        """What came next the last time."""
        self.after: dict[Hashable, Any] = {}
        """All that ever came next."""
        self.ends: dict[tuple[int, ...], End] = {}
        """By the numbers of the results that are still held."""
        self.looks = 0
        """How often somebody looked here while calls were worked out."""
        self.frames = frames
        self.step = step
        """Where the queue is."""
        self.rest: Start | None = None
        """Where one is when all that was put off is done."""

    @property
    def calls(self) -> list[Call]:
        """The calls that led here, from where nothing was put off."""
        found: list[Call] = []
        node: Node | None = self
        while node is not None:
            if isinstance(node, Call):
                found.append(node)
            node = node.before
        return found[::-1]


class Start(Node):
    """Where nothing is put off."""

    __slots__ = ("worth",)

    def __init__(self, frames: Saved, step: Any) -> None:
        super().__init__(None, frames, step)
        self.worth = 0
        """How much more often following from here was of use than in vain."""

    @property
    def is_promising(self) -> bool:
        return self.then is not None and self.worth > -PATIENCE

    def was_of_use(self) -> None:
        """It was good to follow from here."""
        self.worth = min(self.worth + 1, MOST_WORTH)

    def was_in_vain(self) -> None:
        """Calls that were followed had to be worked out all the same."""
        self.worth = self.worth - 1 if self.worth > 1 - PATIENCE else -PAUSE


class Call(Node):
    """A call of a torch function, or of a module of torch.nn."""

    __slots__ = (
        "again", "body", "code", "hooks", "instruction", "is_real", "names", "place", "pre_hooks", "read", "reads", "times", "what",
    )  # fmt: skip

    def __init__(
        self, before: Node, frames: Saved, step: Any, what: Any, at: At, reads: tuple[Read, ...] | None
    ) -> None:
        super().__init__(before, frames, step)
        self.what = what
        self.code, self.instruction, self.place = at.code, at.instruction, at.place
        self.reads = reads
        """Its arguments; None for a function that has nothing to do with quantized ops, which is called as it is."""
        self.read: Any = reads[0] if reads else None
        self.names: dict[str, Fixed] = {}
        self.body: Tensor | None = None
        """What has the shape of its result; None if it writes to its first argument, and gives that."""
        self.again: Again | None = None
        self.is_real = False
        """Whether it puts nothing off, so that it is made each time."""
        self.times = 0
        """How often it came while calls were worked out."""
        is_module = isinstance(what, nn.Module)
        self.hooks: Any = what._forward_hooks if is_module else None
        self.pre_hooks: Any = what._forward_pre_hooks if is_module else None


class Enter(Node):
    """The beginning of a call of a module that calls others."""

    __slots__ = ("code", "instruction", "module", "place")

    def __init__(self, before: Node, frames: Saved, step: Any, module: nn.Module, at: At) -> None:
        super().__init__(before, frames, step)
        self.module = module
        self.code, self.instruction, self.place = at.code, at.instruction, at.place


class Leave(Node):
    """The end of one."""

    __slots__ = ()


class At:
    """The place of a call, in a form in which it is quickly compared."""

    __slots__ = ("code", "instruction", "place")

    def __init__(self, place: Key, caller: FrameType | None) -> None:
        self.place = place
        is_near = caller is not None and len(place) == 2 and place[0] == id(caller.f_code)
        self.code: CodeType | None = caller.f_code if is_near and caller is not None else None
        """Of `forward` of the module around it, if that makes the call itself."""
        self.instruction: int = caller.f_lasti if caller is not None else -1


NOWHERE = At((), None)
"""The place of calls that are the same wherever they are made."""


def is_at(node: Call | Enter, caller: FrameType) -> bool:
    """Whether a call that is made from a frame is made from the place of a node."""
    if node.code is not None and node.instruction == caller.f_lasti:
        return node.code is caller.f_code
    return not node.place or node.place == place_from(caller)


class Trails:
    """All sequences of calls of one model."""

    def __init__(self) -> None:
        self.starts: dict[Hashable, Start] = {}
        self.calls = 0

    def start(self, frames: Saved, step: Any) -> Start:
        """Where one is when nothing is put off."""
        key = frames.key
        return self.starts.get(key) or self.starts.setdefault(key, Start(frames, step))

    def rest(self, node: Node, step: Any) -> Start:
        """Where one is when all that was put off up to a node is done."""
        if node.rest is None:
            node.rest = self.start(node.frames, step)
        return node.rest
