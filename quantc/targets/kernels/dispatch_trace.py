"""Dispatch traces: the ops that a tensor function dispatches in one call, as data without Python.

A tape is valid for inputs of the same shapes and strides, as long as nothing in the function depends on data. A
function that reads data, which takes an op with a non-tensor result, or that creates tensors outside torch's
dispatcher, has no tape: `NoTapeError` gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

ATEN: Any = torch.ops.aten
ON_MEMORY: Any = ATEN.set_.source_Storage_storage_offset
ON_MEMORY_OF: Any = ATEN.set_.source_Tensor_storage_offset
"""Puts a tensor on the memory of another: the latter form names the other, and can be on a tape."""
NUMBERS = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class NoTapeError(Exception):
    """A function does more than dispatch ops. Internal: the caller falls back to the function itself."""


@dataclass(frozen=True, slots=True)
class TracedInput:
    """An input of the function."""

    index: int


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor or packed weight that the function closes over."""

    index: int


@dataclass(frozen=True, slots=True)
class Made:
    """A result of a step, or one item of a result that is a list."""

    step: int
    result: int
    item: int | None = None


@dataclass(frozen=True, slots=True)
class Several:
    """A list of operands."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class TraceConstant:
    """A number, string or setting; compared by type and repr, since 1, 1.0 and True are equal."""

    kind: type
    text: str
    value: Any


Operand = TracedInput | Held | Made | Several | TraceConstant


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One op: an operand for each argument of its schema, and the length of each result that is a list."""

    op: OpOverload
    operands: tuple[Operand, ...]
    lengths: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Tape:
    """A dispatch trace: steps in order, captured values and results."""

    inputs: int
    steps: tuple[TraceStep, ...]
    held: tuple[Any, ...]
    results: tuple[Operand, ...]

    def is_like(self, other: Tape) -> bool:
        """True if another tape has the same steps on identical captured tensors."""
        held, theirs = ([identity(value) for value in tape.held] for tape in (self, other))
        return held == theirs and self.steps == other.steps and self.results == other.results


def identity(value: Any) -> int:
    """Identity of a tensor or packed weight. Each access to a packed weight creates a new Python object, so its hash is used."""
    return hash(value) if isinstance(value, torch.ScriptObject) else id(value)


def record_tape(run: Callable[..., Sequence[Any]], leaves: Sequence[Tensor]) -> tuple[Tape, Sequence[Tensor]]:
    """The tape of a function for inputs of these shapes, and the results of the recorded call. The inputs must be
    distinct tensors, as the recorder identifies operands by object.
    """
    recorder = _Recorder(leaves)
    with recorder:
        made = run(*leaves)
    if not all(isinstance(value, Tensor) for value in made):
        raise NoTapeError("it yields other things than tensors")
    results = tuple(recorder.operand(value) for value in made)
    return Tape(len(leaves), tuple(recorder.steps), tuple(recorder.held), results), made


def _has_open_size(func: OpOverload, args: Sequence[Any]) -> bool:
    """True if an op's output shape depends on data: indexing with positions has a static shape, with a mask it does not."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    return func is not ATEN.index.Tensor or any(
        places is not None and places.dtype in (torch.bool, torch.uint8) for places in args[1]
    )


class _Recorder(TorchDispatchMode):
    """Runs ops as they come, and writes them down."""

    supports_higher_order_operators = True  # branches and loops come here too, and are refused

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[TraceStep] = []
        self.held: list[Any] = []
        self.places: dict[int, Held] = {}
        """Operands held by the trace, by identity: alive as long as the trace."""
        self.values: Any = WeakIdKeyDictionary()
        """Operands by tensor. A tensor that is gone is forgotten, or memory would fill up with all that was ever made."""
        self.owners: dict[int, ref[Tensor]] = {}
        """A tensor on a piece of memory, by the address of the latter."""
        for index, leaf in enumerate(leaves):
            self._note(leaf, TracedInput(index))
        self.given = set(self.owners)
        """The memory of inputs. Others may lie elsewhere in theirs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            raise NoTapeError(f"{func} is no op of tensors")
        if _has_open_size(func, args):
            raise NoTapeError(f"the size of what {func} makes depends on numbers")
        op, operands = self._call(func, args, kwargs)
        made = self._run(func, args, kwargs)
        returns = func._schema.returns
        results = [made] if len(returns) == 1 else list(made or ())
        lengths = tuple(len(result) if isinstance(result, list | tuple) else None for result in results)
        step = len(self.steps)
        self.steps.append(TraceStep(op, tuple(operands), lengths))
        for place, result in enumerate(results):
            if isinstance(result, list | tuple):
                for item, part in enumerate(result):
                    self._note_result(func, part, Made(step, place, item))
            elif result is not None:
                self._note_result(func, result, Made(step, place))
        return made

    @staticmethod
    def _run(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call an op; one that draws numbers at random is not on a tape, and the generator is left as if it had not."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = torch.get_rng_state()
        made = func(*args, **kwargs)
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            raise NoTapeError(f"{func} draws numbers at random")
        return made

    def _note_result(self, func: OpOverload, value: Any, operand: Made) -> None:
        if not isinstance(value, Tensor):
            raise NoTapeError(f"{func} looks at numbers")
        self._note(value, operand)

    def _note(self, tensor: Tensor, operand: Operand) -> None:
        self.values[tensor] = operand
        if tensor.layout is torch.strided:
            self.owners[tensor.untyped_storage()._cdata] = ref(tensor)

    def _call(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[OpOverload, list[Operand]]:
        """An op and its operands, one for each argument of the schema."""
        if func is ON_MEMORY:
            own, memory, *where = args
            return ON_MEMORY_OF, [self.operand(own), self._flat(memory), *map(self.operand, where)]
        found: list[Operand] = []
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            found.append(self.operand(value))
        return func, found

    def _flat(self, memory: Any) -> Operand:
        """All of a piece of memory as one row of elements: torch takes no other as memory."""
        if memory._cdata in self.given:
            raise NoTapeError("a tensor is put on the memory of an input")
        owner = self.owners.get(memory._cdata)
        tensor = None if owner is None else owner()
        if tensor is None:
            raise NoTapeError("a tensor is put on memory of unknown owner")
        size = [memory.nbytes() // tensor.element_size()]
        operands = (self.operand(tensor), *map(self.operand, (size, [1], 0)))
        self.steps.append(TraceStep(ATEN.as_strided.default, operands, (None,)))
        return Made(len(self.steps) - 1, 0)

    def operand(self, value: Any) -> Operand:
        """Operand that represents a value on the tape."""
        if isinstance(value, Tensor):
            known: Operand | None = self.values.get(value)
            return self._holding(value) if known is None else known
        if isinstance(value, torch.ScriptObject):
            return self._holding(value)
        if isinstance(value, list | tuple):
            return Several(tuple(self.operand(item) for item in value))
        if value is None or isinstance(value, NUMBERS):
            return TraceConstant(type(value), repr(value), value)
        raise NoTapeError(f"an op takes {type(value).__name__}")

    def _holding(self, value: Any) -> Held:
        place = self.places.get(identity(value))
        if place is None:
            place = self.places[identity(value)] = Held(len(self.held))
            self.held.append(value)
            if isinstance(value, Tensor):
                self._note(value, place)
        return place
