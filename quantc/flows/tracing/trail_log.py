"""Writing down the calls of a converted model while they are worked out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from quantc.flows.tracing.bodies import body_for
from quantc.flows.tracing.call_sites import Key
from quantc.flows.tracing.functions import PRODUCTS
from quantc.flows.tracing.moves import is_plain
from quantc.flows.tracing.queries import name_of
from quantc.flows.tracing.quick import advance
from quantc.flows.tracing.traced_tensor import Traced
from quantc.flows.tracing.trail import (
    MOST_CALLS,
    MOST_NEXT,
    NOWHERE,
    REAL,
    Again,
    At,
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
    Trails,
    saved,
)

if TYPE_CHECKING:
    from quantc.flows.tracing.deferred import Queue
    from quantc.flows.tracing.quick import Quick
    from quantc.flows.tracing.run import Run
    from quantc.flows.tracing.units import Unit


class Log:
    """Where in the tree of its calls a model is. That is lost with a call that does more than to put off ops, and found again
    when nothing is put off any more."""

    def __init__(self, run: Run, queue: Queue) -> None:
        self.run, self.queue = run, queue
        self.node: Node | None = None
        self.made: list[weakref.ref[Tensor]] = []
        self.numbers: dict[int, int] = {}
        """Which result a tensor is, by its id."""
        self.before: Node | None = None
        """Where it was when the last call began."""
        self.is_open = False
        """Whether that call has not ended yet."""

    @property
    def trails(self) -> Trails:
        return self.queue.paths.trails

    def go_on(self, node: Node, made: list[Tensor]) -> None:
        """Go on where the tree was followed to."""
        self.node, self.made, self.numbers = node, [], {}
        for x in made:
            self._add(x)

    def _add(self, x: Tensor) -> None:
        self.numbers[id(x)] = len(self.made)
        self.made.append(weakref.ref(x))

    def number_of(self, x: Any) -> int | None:
        """Which of the results a tensor is; None if it is none."""
        number = self.numbers.get(id(x))
        return number if number is not None and self.made[number]() is x else None

    def lose(self) -> None:
        """Something is done that is not written down."""
        self.node, self.is_open = None, False

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is put off, and nothing known of where the model is."""
        queue = self.queue
        return self.node is None and not queue.results and self.run.leaf is None and queue.paths is queue.trace.paths

    def open(self) -> bool:
        """A call begins. Gives whether it is known where the model is."""
        queue = self.queue
        if self.is_open or self.run.leaf is not None or queue.paths is not queue.trace.paths:
            self.node = None  # a call that has not ended has failed
        elif self.is_at_rest:
            frames = saved(self.run.frame)
            if frames is not None:
                start = self.trails.start(frames, queue.paths.start)
                start.worth += start.worth < 0
                self.go_on(start, [])
        self.before = self.node
        self.is_open = self.before is not None
        return self.is_open

    def _close(self) -> bool:
        """A call has ended. Gives whether it has done no more than can be written down."""
        self.is_open = False
        if self.node is not self.before:
            self.node = None
        return self.node is not None

    # -- calls -----------------------------------------------------------------------------------------------------

    def leaf(self, leaf: Any, caller: FrameType, place: Key, quick: Quick, x: Any, got: Any) -> None:
        """A module of torch.nn was called."""
        if self._close():
            self._call(leaf, At(place, caller), (self._read(x, quick.unit, quick.operand),), {}, quick.again, (x,), got)

    def function(
        self,
        func: Any,
        caller: FrameType,
        place: Key,
        unit: Unit,
        number: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        got: Any,
    ) -> None:
        """A function was called that is part of a quantized op."""
        if not self._close():
            return
        if unit.derived_of(number):
            self.node = None  # weights that the model computes are looked at each time
            return
        operands = {path[1]: operand for operand, path in unit.by_call.get(number, ()) if path[0] == 0}
        reads = tuple(self._read(x, unit, operands.get(index, -1)) for index, x in enumerate(args))
        trace = self.run.trace

        def again(args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
            return advance(trace, unit, number, func, args, kwargs, run)

        self._call(func, At(place, caller), reads, kwargs, again, args, got)

    def move(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], move: Callable[..., Any], got: Any
    ) -> None:
        """Elements were moved, or a mean was taken."""
        first = args[0] if args else None
        pieces = first if isinstance(first, list | tuple) else (first,)
        numbers = [self.number_of(x) for x in pieces]
        if not self._close() or not any(number is not None for number in numbers):
            return  # perhaps it has nothing to do with what was put off
        read: Any = None
        if None not in numbers:
            read = tuple(numbers) if first is pieces else numbers[0]
        rest = tuple(self._read(x, None, -1) for x in args[1:])
        self._call(func, NOWHERE, (read, *rest), kwargs, lambda args, kwargs, _: move(func, args, kwargs), args, got)

    def untouched(self, func: Any, caller: FrameType, place: Key, given: Any) -> None:
        """A function was called that might have been part of a quantized op, and is not."""
        if not self._close():
            return
        if any(isinstance(x, Traced) for x in given) or name_of(func) in PRODUCTS:
            self.node = None  # with another tensor it might be one that must not be left float
            return
        self._go(
            (Call, func, place), lambda before, frames, step: Call(before, frames, step, func, At(place, caller), None)
        )

    def enter(self, module: nn.Module, caller: FrameType, place: Key) -> None:
        """A call of a module has begun."""
        if self._close():
            self._go(
                (Enter, id(module), place),
                lambda before, frames, step: Enter(before, frames, step, module, At(place, caller)),
            )

    def leave(self) -> None:
        """A call of a module has ended."""
        if self._close():
            self._go(Leave, Leave)

    def _read(self, x: Any, unit: Unit | None, operand: int) -> Read | None:
        """What an argument is; None if that cannot be written down."""
        number = self.number_of(x)
        if number is not None:
            return number
        if not isinstance(x, Tensor):
            return Fixed(x) if is_plain(x) or type(x) is float else None
        bound = self.run.bound
        if bound.constants.get(bound.names.get(id(x), "")) is x:
            return Fixed(x)
        is_first = unit is not None and operand in unit.reading and unit.operands[operand].call == unit.trigger
        if not is_first or unit is None or not self.queue.results:
            return REAL
        read, grid = self.queue.step.reads[unit.reading.index(operand)], unit.grids[operand]
        if read >= 0 or grid is None:
            return REAL
        levels = self.queue.inputs[~read]
        return Outside(~read, grid, levels.shape, levels.stride())

    def _call(
        self,
        what: Any,
        at: At,
        reads: tuple[Read | None, ...],
        kwargs: dict[str, Any],
        again: Again,
        args: tuple[Any, ...],
        got: Any,
    ) -> None:
        names: Any = {name: self._read(x, None, -1) for name, x in kwargs.items()}
        known: Any = reads
        is_real = not self.is_put_off(got)
        kinds = {type(read) for read in known}
        is_known = kinds <= ({Fixed, Real} if is_real else {int, tuple, Outside, Fixed})
        if not is_known or any(type(read) is not Fixed for read in names.values()):
            self.node = None
            return
        gives_first = got is args[0]

        def make(before: Node, frames: Saved, step: Any) -> Call:
            made = Call(before, frames, step, what, at, known)
            made.names, made.again, made.is_real = names, again, is_real
            made.body = None if is_real or gives_first else body_for(got.shape)
            return made

        is_module = isinstance(what, nn.Module)
        self._go((Call, id(what) if is_module else what, at.place, known, tuple(names.items())), make)
        if self.node is not None and not is_real and not gives_first:
            self._add(got)

    def _go(self, key: Hashable, make: Callable[[Node, Saved, Any], Node]) -> None:
        """Go on to what comes next."""
        with self.queue.lock:  # another thread may look, and then nothing is put off any more
            before = self.node
            if before is None:
                return
            found = before.after.get(key)
            if found is None:
                frames = saved(self.run.frame)
                if frames is None or self.trails.calls >= MOST_CALLS or len(before.after) >= MOST_NEXT:
                    self.node = None
                    return
                self.trails.calls += 1
                found = before.after.setdefault(key, make(before, frames, self.queue.step))
            if type(found) is Call:
                found.times += 1
            before.then = self.node = found

    def is_put_off(self, x: Any) -> bool:
        """Whether a tensor waits for the queue, or for other calls of its fused op."""
        if type(x) is not Traced or x.plain is not None or x.levels is not None:
            return False
        if x.waiting is not None:
            return x.waiting.result is None or self.is_put_off(x.waiting.result.value)
        return x.pending is not None and x.pending.queue is self.queue

    # -- looks -----------------------------------------------------------------------------------------------------

    def looked_at(self) -> None:
        """What was put off is about to be done: write down what of it is held."""
        node, self.node = self.node, None
        if node is not None:
            node.looks += 1
            self.write_end(node, [ref() for ref in self.made])

    def write_end(self, node: Node, made: list[Any]) -> None:
        """Write down what has to be done for the results that are held; not if one of them is still to be fused."""
        held = [(number, x) for number, x in enumerate(made) if x is not None]
        places: dict[int, int] = {}
        shared = [x.shared for _, x in held if x.shared is not None]
        if len(shared) != len(set(map(id, shared))):
            return  # their floats lie in one memory
        for _, x in held:
            if not self.is_put_off(x) or x.waiting is not None:
                return
            if x.grid is None and x.pending.place in places:
                return  # each of them must have floats of its own
            places.setdefault(x.pending.place, len(places))
        wanted = tuple(sorted(places))
        rows = tuple((number, wanted.index(x.pending.place), x.grid) for number, x in held)
        node.ends[tuple(number for number, _ in held)] = End(wanted, rows)
