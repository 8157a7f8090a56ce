"""Following the tree of calls that a converted model has made before.

While the same calls come one after another, none of them is worked out: each is compared with what came there the last time, and gives a
tensor that knows its shape and nothing else. When somebody looks, the ops of the whole sequence run as they did before. And when something else comes, all calls
so far are worked out as if they were made now, which changes nothing: they read only what nobody can write to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from sys import getrefcount
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantc.flows.tracing.deferred import Settings
from quantc.flows.tracing.functions import Kind, gives_back
from quantc.flows.tracing.run import Frame
from quantc.flows.tracing.traced_tensor import Light, Traced, answer, levels_on, on_grid
from quantc.flows.tracing.trail import (
    TIMES,
    Call,
    End,
    Enter,
    Fixed,
    Leave,
    Node,
    Outside,
    Read,
    Real,
    Saved,
    Start,
    is_at,
)

if TYPE_CHECKING:
    from quantc.flows.tracing.run import Run

NOTHING: Any = object()
"""What is given for a call that has to be worked out."""
UNHELD = 2
"""How often Python counts a result that nobody holds but the one who follows, and who counts."""


class Follower:
    """Follows the calls of one run of a model. Any thread may look at a result."""

    def __init__(self, run: Run, start: Start) -> None:
        self.run, self.queue, self.trace = run, run.queue, run.trace
        self.lock = self.queue.lock
        self.paths = self.queue.paths
        self.is_over = False
        self._begin(start)

    def _begin(self, start: Start) -> None:
        self.start = start
        self.node: Node = start
        self.made: list[Tensor | None] = []
        """What the calls gave; None for what nobody has held when somebody looked."""
        self.inputs: list[Tensor] = []
        """Bytes that they read, and that were there before."""
        self.is_inference = torch.is_inference_mode_enabled()

    # -- calls -----------------------------------------------------------------------------------------------------

    def leaf(self, leaf: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> Any:
        """What a module of torch.nn gives."""
        with self.lock:
            node = self.node.then
            if (
                len(args) == 1
                and not kwargs
                and type(node) is Call
                and node.what is leaf
                and node.instruction == caller.f_lasti
                and node.code is caller.f_code
                and not node.hooks
                and not node.pre_hooks
                and type(node.read) is int
                and self.made[node.read] is args[0]
                and self._is_usual()
            ):
                self.node = node
                if node.body is None:
                    return args[0]
                made = node.body.as_subclass(Light)
                made.follower = self
                self.made.append(made)
                return made
            return self._found(leaf, args, kwargs, caller)

    def function(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> Any:
        """What a torch function gives."""
        kind = self.trace.kind_of(func)
        if kind is Kind.QUERY:
            return answer(func, args, kwargs) if args and type(args[0]) is Light else NOTHING
        if kind is Kind.OPENED or (kind is not Kind.HOOKED and Light not in types):
            return NOTHING
        if kind is Kind.DROPOUT and gives_back(args, kwargs):
            return args[0]
        with self.lock:
            if kind is Kind.HOOKED or kind is Kind.MOVE or kind is Kind.CALM:
                return self._found(func, args, kwargs, caller)
            self.settle()
        return NOTHING

    def enter(self, module: nn.Module, caller: FrameType) -> bool:
        """Whether a call of a module comes again."""
        with self.lock:
            node = self.node.then
            if type(node) is Enter and node.module is module and is_at(node, caller) and not self.is_over:
                self.node = node
                return True
            return self._searched(lambda node: type(node) is Enter and node.module is module and is_at(node, caller))

    def exit(self) -> bool:
        """Whether the end of a call of a module comes again."""
        with self.lock:
            if type(self.node.then) is Leave and not self.is_over:
                self.node = self.node.then
                return True
            return self._searched(lambda node: type(node) is Leave)

    def _found(self, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> Any:
        def fits(node: Any) -> bool:
            return (
                type(node) is Call
                and node.what is what
                and is_at(node, caller)
                and self._is_usual()
                and self._fits(node, args, kwargs)
            )

        if fits(self.node.then):
            return self._go(self.node.then, args, kwargs)
        return self._go(self.node, args, kwargs) if self._searched(fits) else NOTHING  # type: ignore[arg-type]

    def _searched(self, fits: Callable[[Node], bool]) -> bool:
        """Go on to another of the calls that came next. If somebody has always looked here, what was put off is done, and
        it is one of those that came next then. Else nothing is followed any more."""
        if not self.is_over and not self.node.after and self.node.looks >= TIMES:
            self.settle()
        if not self.is_over:
            others = sorted(self.node.after.values(), key=_is_real)
            found = next(filter(fits, others), None)
            if found is not None:
                self.node.then = self.node = found
                return True
        self.leave()
        return False

    def _is_usual(self) -> bool:
        """Whether ops can be put off as they were before."""
        if not self.inputs:
            self.is_inference = torch.is_inference_mode_enabled()
        return (
            torch.is_inference_mode_enabled() is self.is_inference
            and not torch.is_autocast_enabled("cpu")
            and self.paths is self.trace.paths
            and not self.is_over
        )

    def _fits(self, node: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is given what it was given before. Inputs that it reads are taken in."""
        if node.hooks or node.pre_hooks or (node.is_real and node.times < TIMES):
            return False
        reads = node.reads
        if reads is None:
            return not any(isinstance(x, Traced) for x in (*args, *kwargs.values()))
        if len(reads) != len(args) or node.names.keys() != kwargs.keys():
            return False
        count = len(self.inputs)
        if all(map(self._is_read, reads, args)) and all(row.fits(kwargs[name]) for name, row in node.names.items()):
            return True
        del self.inputs[count:]
        return False

    def _is_read(self, read: Read, x: Any) -> bool:
        if type(read) is int:
            return self.made[read] is x
        if isinstance(read, Fixed | Real):
            return read.fits(x)
        if type(read) is Outside:
            return self._takes_in(read, x)
        numbers: Any = read
        is_several = isinstance(x, list | tuple) and len(x) == len(numbers)
        return is_several and all(self.made[number] is piece for number, piece in zip(numbers, x, strict=True))

    def _takes_in(self, read: Outside, x: Any) -> bool:
        """Whether an operand that was not made by these calls is like the one before: then its bytes are an input."""
        if type(x) is Light or not isinstance(x, Tensor):
            return False
        if type(x) is Traced and (x.plain is not None or x.grid != read.grid or x.levels is None):
            return False
        if type(x) is not Traced and (x.shape != read.shape or x.is_meta):
            return False
        with torch._C.DisableTorchFunction():
            levels = levels_on(x, read.grid)
            index = next((index for index, known in enumerate(self.inputs) if known is levels), len(self.inputs))
            if (index, levels.shape, levels.stride()) != (read.place, read.shape, read.stride):
                return False
        if index == len(self.inputs):
            self.inputs.append(levels)
        return True

    def _go(self, node: Call, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        self.node = node
        if node.reads is None:
            with torch._C.DisableTorchFunctionSubclass():
                return node.what(*args, **(kwargs or {}))
        if node.is_real:
            return self._made_in_any_case(node, args, kwargs or {})
        body = node.body
        if body is None:
            return args[0]
        made = body.as_subclass(Light)
        made.follower = self
        self.made.append(made)
        return made

    def _made_in_any_case(self, node: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives that puts nothing off. If it does so now, that is not known here."""
        with torch._C.DisableTorchFunction():
            made = node.again(args, kwargs, self.run)  # type: ignore[misc]
        if self.queue.results:
            node.times = 0
            self.leave()
        return made

    # -- looks -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Somebody looks: do all that was put off."""
        with self.lock, torch._C.DisableTorchFunction():
            if self.is_over or not self.made:
                return
            held = self._only_held()
            end = self.node.ends.get(held) if held else End((), ())
            if end is None or self.queue.results:
                self.leave(held)
                return
            self._finish(end)
            self.start.was_of_use()
            self._begin(self.paths.trails.rest(self.node, self.paths.start))
            if self.start.worth < 0 and not self.start.is_promising:
                self.leave()

    def _only_held(self) -> tuple[int, ...]:
        """The results that somebody holds. The others go, before kernels drive them out of the cache."""
        made = self.made
        held = tuple(
            number for number in range(len(made)) if made[number] is not None and getrefcount(made[number]) > UNHELD
        )
        self.made = [None] * len(made)
        for number in held:
            self.made[number] = made[number]
        return held

    def _finish(self, end: End) -> None:
        """Run the ops of the whole sequence, and give their results to who holds the tensors."""
        values = self.queue.run_sequence(self.node.step, self.inputs, end.wanted, self.is_inference) if end.rows else ()
        for number, place, grid in end.rows:
            x: Any = self.made[number]
            x.__class__ = Traced
            del x.follower
            if grid is None:
                x.plain = values[place]
            else:
                x.levels, x.grid = values[place], grid

    def leave(self, held: tuple[int, ...] | None = None) -> None:
        """Follow no more: the calls so far are worked out. With `held`, what somebody holds who looks is written down."""
        with self.lock, torch._C.DisableTorchFunction():
            if self.is_over:
                return
            self.is_over = True
            run = self.run
            if self.made:
                self.start.was_in_vain()
                with Settings(self.is_inference):
                    self._work_out()
            run.follower = None
            run.frame = unfolded(self.node.frames)
            if run.log is not None and self.queue.step is self.node.step:
                run.log.go_on(self.node, [x for x in self.made if x is not None])
                if held is not None:
                    kept = [x if number in held else None for number, x in enumerate(self.made)]
                    run.log.write_end(self.node, kept)
            self.made, self.inputs = [], []

    def _work_out(self) -> None:
        """Make the calls that were followed, one by one."""
        numbers = count()
        for node in self.node.calls:
            if node.reads is None or node.is_real:
                continue
            args = tuple(map(self._given, node.reads))
            names = {name: row.value for name, row in node.names.items()}
            got = node.again(args, names, self.run)  # type: ignore[misc]
            if node.body is not None:
                number = next(numbers)
                if self.made[number] is None:
                    self.made[number] = got
                else:
                    _become(self.made[number], got)

    def _given(self, read: Read) -> Any:
        if type(read) is int:
            return self.made[read]
        if type(read) is Outside:
            return on_grid(self.inputs[read.place], read.grid)
        numbers: Any = read
        return read.value if isinstance(read, Fixed) else [self.made[number] for number in numbers]


def _become(light: Any, got: Any) -> None:
    """Let a tensor be what its call has come to."""
    del light.follower
    light.__class__ = Traced
    if type(got) is not Traced:
        light.plain = got
        return
    vars(light).update(vars(got))
    if got.shared is not None:
        got.shared.members.append(weakref.ref(light))


def _is_real(node: Node) -> bool:
    return isinstance(node, Call) and node.is_real


def unfolded(frames: Saved) -> Frame:
    """A frame with those around it, as they were."""
    parent = None if frames.around is None else unfolded(frames.around)
    return Frame(frames.state, frames.context, parent, frames.previous, last=frames.last)
