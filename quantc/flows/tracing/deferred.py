"""Ops of a converted model that are put off until somebody looks at what they give.

Python goes on at once, with tensors that know their shape. The ops that were put off since the last look are run together: a
sequence that has come before runs as one function, as a lowered program does, with nothing of Python between kernels.

Only ops are put off that read bytes, or what others will give that were put off. That belongs to the model alone, so nothing can
change it in between; floats, which anybody may write to, are read at the call. And an op is put off only on shapes that it has run on before: what it refuses,
it refuses at the line that calls it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, fx, nn

from quantc.flows.tracing.bodies import body_for
from quantc.flows.tracing.moves import Move
from quantc.flows.tracing.sequence import line_of
from quantc.flows.tracing.traced_tensor import (
    CARRIERS,
    Grid,
    Pending,
    Traced,
    float32_of,
    levels_on,
    on_grid,
    rounded,
    to_come,
)
from quantc.flows.tracing.trail import Trails

if TYPE_CHECKING:
    from quantc.flows.tracing.trace import Trace
    from quantc.flows.tracing.trail_log import Log

MOST_WAITING = 256
"""How many ops are put off at most, so that a long loop does not fill the memory."""
MOST_STEPS = 8192
"""How many steps are remembered, in all sequences together. Ops that would be one more run at once."""
MOST_LINES = 64
"""How many sequences run as one function. Others run step by step."""
TIMES_BEFORE = 1
"""How often a sequence runs step by step before it is made one function: most of those that come once do not come again."""


class Action(Protocol):
    """What a step does: it takes bytes and gives a tensor."""

    makes: dict[Hashable, Tensor | None]
    """A body like its result, by the shapes that it has run on. None if it cannot be put off on those."""

    def forward(self, *operands: Tensor) -> Any: ...

    def draw(self, graph: fx.Graph, root: nn.Module, operands: Sequence[fx.Node], prefix: str) -> fx.Node:
        """Write it into a graph; gives the node of its result."""
        ...


class Op(Protocol):
    """What can be put off."""

    @property
    def out_grid(self) -> Grid | None:
        """What it gives is bytes on; None for floats."""
        ...

    @property
    def rounds_first(self) -> bool:
        """Whether floats that it reads are rounded by themselves anyway, so that this can be done at the call."""
        ...

    def action(self, trace: Trace, forms: tuple[Grid | None, ...]) -> Action:
        """What computes it from operands in the form they come in: bytes on a grid, or floats."""
        ...


class Step:
    """An op that is put off after certain others were, each on certain operands."""

    __slots__ = ("action", "after", "before", "body", "grid", "lines", "place", "reads", "times", "where")

    def __init__(
        self, before: Step | None, action: Any, reads: tuple[int, ...], body: Any, grid: Grid | None, where: str
    ) -> None:
        self.before = before
        self.place: int = -1 if before is None else before.place + 1
        self.action: Action = action
        self.reads = reads
        """The steps whose results it reads, or inputs: `~0` is the first of them."""
        self.body: Tensor = body
        self.grid = grid
        self.where = where
        self.after: dict[Hashable, Step] = {}
        self.times = 0
        """How often the sequence that ends here was run step by step."""
        self.lines: dict[tuple[int, ...], Callable[..., Sequence[Tensor]]] = {}
        """The sequence that ends here as one function, by the steps whose results are asked for."""

    @property
    def path(self) -> list[Step]:
        """The sequence that ends here."""
        found: list[Step] = []
        step = self
        while step.before is not None:
            found.append(step)
            step = step.before
        return found[::-1]


class Paths:
    """The sequences that have come up in one model."""

    def __init__(self) -> None:
        self.start = Step(None, None, (), None, None, "")
        self.steps = 0
        self.lines = 0
        self.moves: dict[Hashable, Any] = {}
        """Moves of elements that were put off, by what tells them apart."""
        self.trails = Trails()
        """The calls that put them off."""


class Queue:
    """What is put off in one call of a model. Any thread may look at a result."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.lock = threading.RLock()
        self.is_inference = False
        """Whether it is done in inference mode: what is made there cannot be used as other tensors can."""
        self.log: Log | None = None
        """Who wants to know when it is done."""
        self._empty()

    def _empty(self) -> None:
        self.paths: Paths = self.trace.paths
        self.step = self.paths.start
        self.results: list[weakref.ref[Pending]] = []
        self.inputs: list[Tensor] = []
        self.read = 0
        """How many of the inputs steps read: the others belong to an op that ran at once."""

    # -- putting off -----------------------------------------------------------------------------------------------

    def put_off(self, key: Hashable, op: Op, operands: Sequence[Any], grids: Sequence[Grid | None]) -> Any:
        """What an op will give, of operands that it reads on grids; None if it is to run at once. The key tells it from
        others."""
        if torch.is_autocast_enabled("cpu"):
            return None
        with self.lock:
            is_inference = torch.is_inference_mode_enabled()
            is_full = len(self.results) >= MOST_WAITING
            if is_full or is_inference != self.is_inference or self.paths is not self.trace.paths:
                self.flush()
                self.is_inference = is_inference
            if op.rounds_first:
                operands = [self._rounded(x, grid) for x, grid in zip(operands, grids, strict=True)]
            del self.inputs[self.read :]
            reads: list[Any] = [key]
            for x, grid in zip(operands, grids, strict=True):
                pending = self._waits_for(x)
                if pending is not None:
                    reads.append(pending.place)
                elif grid is not None and (op.rounds_first or (type(x) in CARRIERS and x.grid is not None)):
                    reads.append(self._input(levels_on(x, grid)))
                else:
                    return None
            step = self.step.after.get(path := tuple(reads))
            if step is not None:
                return self._wait_for(step)
            return self._first_time(path, op, operands, grids)

    def on_its_grid(self, x: Any, grid: Grid) -> Any:
        """An operand as bytes: those that it is, or it is rounded. If it is floats that were put off, so is this."""
        if type(x) is Traced and x.grid is None and self._waits_for(x) is not None:
            return self._rounded(x, grid)
        is_there = type(x) is Traced and x.grid == grid
        return x if is_there else on_grid(levels_on(x, grid), grid)

    def _rounded(self, x: Any, grid: Grid | None) -> Any:
        """Floats that were put off, on the grid that they are read on: this is put off as well."""
        if grid is None or self._waits_for(x) is None or x.grid is not None:
            return x
        move = Move(rounded, False, (grid,), {}, grid)
        made = self.put_off(move.key, move, (x,), (None,))
        return x if made is None else made

    def _waits_for(self, x: Any) -> Pending | None:
        """What an operand will be given by an op that is still put off; None if its numbers are there."""
        pending = x.pending if type(x) in CARRIERS else None
        return pending if pending is not None and pending.queue is self else None

    def _input(self, levels: Tensor) -> tuple[int, Any, Any]:
        """Where a tensor is among the inputs, and how it looks."""
        index = next((index for index, x in enumerate(self.inputs) if x is levels), len(self.inputs))
        if index == len(self.inputs):
            self.inputs.append(levels)
        return ~index, levels.shape, levels.stride()

    def _wait_for(self, step: Step) -> Traced:
        self.step, self.read = step, len(self.inputs)
        pending = Pending(self, step.place, step.body)
        self.results.append(weakref.ref(pending))
        return to_come(pending, step.grid)

    def _first_time(self, path: tuple[Any, ...], op: Op, operands: Sequence[Any], grids: Sequence[Grid | None]) -> Any:
        """An op that was never put off after just these others. On shapes that are new to it, it runs at once."""
        waits = [self._waits_for(x) for x in operands]
        forms = tuple(
            grid if pending is None else x.grid for x, grid, pending in zip(operands, grids, waits, strict=True)
        )
        if any(form is not None and form != grid for form, grid in zip(forms, grids, strict=True)):
            return None  # it must be rounded anew
        action, grid = op.action(self.trace, forms), op.out_grid
        shapes = tuple(
            pending.body.shape if pending is not None else levels_on(x, on).shape if on is not None else x.shape
            for x, on, pending in zip(operands, forms, waits, strict=True)
        )
        if shapes not in action.makes:
            given = (float32_of(x) if on is None else levels_on(x, on) for x, on in zip(operands, forms, strict=True))
            made = action.forward(*given)
            action.makes[shapes] = _body_like(made, grid)
            if not isinstance(made, Tensor):
                return None  # for the caller to take apart
            return made if grid is None else on_grid(made, grid)
        body = action.makes[shapes]
        if body is None or self.paths.steps >= MOST_STEPS:
            return None
        self.paths.steps += 1
        reads = tuple(read if isinstance(read, int) else read[0] for read in path[1:])
        step = Step(self.step, action, reads, body, grid, self.trace.where(path[0]))
        return self._wait_for(self.step.after.setdefault(path, step))

    # -- doing it --------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Do all that was put off. If that fails it is still to be done, for whoever looks next."""
        with self.lock:
            wanted = [(place, found) for place, ref in enumerate(self.results) if (found := ref()) is not None]
            if self.results and self.log is not None:
                self.log.looked_at()
            if wanted:
                with torch._C.DisableTorchFunction(), Settings(self.is_inference):
                    made = self._run(tuple(place for place, _ in wanted))
                for (_, pending), value in zip(wanted, made, strict=True):
                    pending.value, pending.queue = value, None
            self._empty()

    def run_sequence(
        self, step: Step, inputs: list[Tensor], wanted: tuple[int, ...], is_inference: bool
    ) -> Sequence[Tensor]:
        """Do what was put off before, on other inputs, while nothing else is."""
        self.step, self.inputs, self.read = step, inputs, len(inputs)
        try:
            with torch._C.DisableTorchFunction(), Settings(is_inference):
                return self._run(wanted)
        finally:
            self._empty()

    def _run(self, wanted: tuple[int, ...]) -> Sequence[Tensor]:
        step, inputs = self.step, self.inputs[: self.read]
        line = step.lines.get(wanted)
        if line is not None:
            return line(*inputs)
        step.times += 1
        if step.times <= TIMES_BEFORE or self.paths.lines >= MOST_LINES:
            return one_by_one(step.path, inputs, wanted)
        self.paths.lines += 1
        step.lines[wanted], made = line_of(step.path, inputs, wanted)
        return made


def one_by_one(path: Sequence[Step], inputs: Sequence[Tensor], wanted: Sequence[int]) -> Sequence[Tensor]:
    """Run a sequence step by step. Results go as soon as nobody reads them any more."""
    last = {read: step.place for step in path for read in step.reads}
    values: dict[int, Tensor] = {}
    for step in path:
        operands = [values[read] if read >= 0 else inputs[~read] for read in step.reads]
        try:
            values[step.place] = step.action.forward(*operands)
        except Exception as error:
            error.add_note(f"in {step.where}, which was put off until somebody looked at a result")
            raise
        for read in step.reads:
            if last[read] == step.place and read not in wanted:
                values.pop(read, None)
    return [values[place] for place in wanted]


def _body_like(made: Any, grid: Grid | None) -> Tensor | None:
    """What stands for a result until it is there; None if it is none that can be waited for."""
    if type(made) is not Tensor or not made.numel():
        return None
    return None if grid is None and made.dtype is not torch.float32 else body_for(made.shape)


class Settings:
    """The settings of the thread that ops were put off under, for one that may have others."""

    __slots__ = ("inner", "is_inference")

    def __init__(self, is_inference: bool) -> None:
        self.is_inference = is_inference
        self.inner: ExitStack | None = None

    def __enter__(self) -> None:
        is_inference, is_autocast = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        if is_inference == self.is_inference and not is_autocast:
            return
        self.inner = ExitStack()
        self.inner.enter_context(torch.inference_mode(self.is_inference))
        self.inner.enter_context(torch.autocast("cpu", enabled=False))

    def __exit__(self, *error: object) -> None:
        if self.inner is not None:
            self.inner.close()
