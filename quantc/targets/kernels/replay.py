"""Records a lowered module once per input shape and replays it through the TorchScript interpreter.

Between two kernels of some dozen microseconds, Python takes about five to process twenty arguments, and evicts their
code and data from the cache. The TorchScript interpreter takes less than one. Nothing is compiled and every op is the
same, so results are bit-exact.

A recording is validated before use: two recordings on different data must have the same steps on the same tensors, and
the graph must yield the same bits as the function.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from quantc.errors import QuantcError
from quantc.targets.kernels.dispatch_trace import (
    Held,
    Made,
    NoTapeError,
    Operand,
    Several,
    Tape,
    TraceConstant,
    TracedInput,
    record_tape,
)

C: Any = torch._C
MAX_RECORDINGS = 16
"""Maximum number of shapes recorded, failures included. Further shapes run in Python."""
MAX_MET = 256
"""Maximum number of shapes remembered after one call; the oldest goes first."""
SETTINGS: dict[Any, Any] = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
    torch.strided: 0,
}
"""Integer codes, in torch's graphs, of layouts and memory formats."""

Run = Callable[..., Sequence[Any]]


class Replayed:
    """A tensor function, replayed from a recording for inputs whose shapes and strides were seen before.

    `watched` are inputs that must be finite; `alarm` is called with all inputs if one may not be. A recording sums up
    such inputs as part of its graph, which takes half as long as a separate check.
    """

    def __init__(self, line: Run, watched: Sequence[int] = (), alarm: Callable[[Sequence[Any]], None] | None = None):
        self.line = line
        self.watched, self.alarm = tuple(watched), alarm
        self.why_not = ""
        """The reason why the last recording was given up; empty if none was."""
        self._known: dict[Hashable, Run] = {}
        """Recordings by what the inputs look like."""
        self._met: dict[Hashable, None] = {}
        """Looks that were met once."""
        self._given_up: set[Hashable] = set()
        self._recording = threading.Lock()

    def __call__(self, *leaves: Any) -> Sequence[Any]:
        found = self.recording(leaves)
        return self.directly(*leaves) if found is None else found(*leaves)

    def directly(self, *leaves: Any) -> Sequence[Any]:
        """Call the function itself; a second call with the same shapes records it."""
        if self.alarm is not None and self.watched:
            self.alarm(leaves)
        look = look_of(leaves)
        if look is None:
            self.why_not = "inputs are more than plain tensors"
        elif is_usual():
            self._meet(look, leaves)
        return self.line(*leaves)

    def recording(self, leaves: Sequence[Any]) -> Run | None:
        """Recording for inputs like these; None if there is none."""
        look = look_of(leaves)
        found = None if look is None else self._known.get(look)
        return found if found is not None and is_usual() else None

    @property
    def count(self) -> int:
        """Number of recorded shapes."""
        return len(self._known)

    def __str__(self) -> str:
        if self.count:
            shapes = "one shape" if self.count == 1 else f"{self.count} shapes"
            return f"runs: recorded for {shapes} of inputs"
        return f"runs: called from Python, since {self.why_not}" if self.why_not else "runs: called from Python so far"

    def _meet(self, look: Hashable, leaves: Sequence[Tensor]) -> None:
        """Remember a look, and record it when it is met again."""
        if look in self._given_up or len(self._known) + len(self._given_up) >= MAX_RECORDINGS:
            return
        if not self._recording.acquire(blocking=False):
            return  # another thread is at it
        try:
            if look not in self._met:
                self._remember(look)
            elif look not in self._known:
                self._known[look] = self._record(leaves)
        except NoTapeError as error:
            self.why_not = str(error)
            self._given_up.add(look)
        finally:
            self._recording.release()

    def _remember(self, look: Hashable) -> None:
        self._met[look] = None
        if len(self._met) > MAX_MET:
            del self._met[next(iter(self._met))]

    def _record(self, leaves: Sequence[Tensor]) -> Run:
        line, watched = self.line, self.watched
        if not watched:
            return _with_own_errors(replay(line, leaves), line)
        run = replay(lambda *given: [*line(*given), *(given[index].sum() for index in watched)], leaves)

        def watching(*given: Any) -> Sequence[Any]:
            made = run(*given)
            if not all(math.isfinite(abs(total.item())) for total in made[-len(watched) :]):
                self._sound(given)
            return made[: -len(watched)]

        return _with_own_errors(watching, line)

    def _sound(self, leaves: Sequence[Any]) -> None:
        if self.alarm is not None:
            self.alarm(leaves)


def _with_own_errors(run: Run, line: Run) -> Run:
    """A recording that falls back to the function on errors: its messages are better."""

    def told(*leaves: Any) -> Sequence[Any]:
        try:
            return run(*leaves)
        except QuantcError:
            raise
        except Exception:  # noqa: BLE001 - whatever it is
            return line(*leaves)

    return told


def look_of(leaves: Sequence[Any]) -> Hashable:
    """Cache key of a call: shapes, strides, dtypes and devices; None if an input is not a plain tensor."""
    for leaf in leaves:
        if type(leaf) is not Tensor and type(leaf) is not nn.Parameter:
            return None
        if leaf.layout is not torch.strided or leaf.is_nested:
            return None
    return tuple([(leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves])


def is_usual() -> bool:
    """True if ops behave as when recorded: autocast changes them, and torch.jit.trace observes Python."""
    return not torch.is_autocast_enabled("cpu") and not C._is_tracing()


def replay(line: Run, leaves: Sequence[Tensor]) -> Run:
    """Recording of a function on such inputs, as a function; NoTapeError if the function does more than dispatch ops."""
    try:
        with torch.no_grad():
            return _replay(line, leaves)
    except NoTapeError:
        raise
    except Exception as error:  # fall back to the function itself, which reports its own errors
        raise NoTapeError(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def _replay(line: Run, leaves: Sequence[Tensor]) -> Run:
    tape, _ = record_tape(line, [_copy(leaf) for leaf in leaves])  # a caller may give one tensor twice
    others = [_reverse(leaf) for leaf in leaves]
    second, wanted = record_tape(line, others)
    if not tape.is_like(second):
        raise NoTapeError("two calls are not the same ops on the same weights")
    made = to_torchscript(tape)
    if not all(_same(one, other) for one, other in zip(made(*others), wanted, strict=True)):
        raise NoTapeError("its ops alone yield other numbers")
    return made


def _copy(leaf: Tensor) -> Tensor:
    """The same numbers elsewhere, lying in memory as they do."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    return leaf.as_strided((extent,), (1,)).clone().as_strided(leaf.shape, leaf.stride())


def _reverse(leaf: Tensor) -> Tensor:
    """The same values in reversed order, with the same strides. Non-float tensors may be indices or lengths, and are unchanged."""
    turned = _copy(leaf)
    if not leaf.is_floating_point():
        return turned
    if torch._debug_has_internal_overlap(leaf):  # pyright: ignore[reportPrivateImportUsage]
        raise NoTapeError("elements of an input share their memory")
    return turned.copy_(leaf.flip(list(range(leaf.dim()))))


def _same(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are bit-identical, NaN and strides included."""
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


# -- torch's graphs -----------------------------------------------------------------------------------------------------


def to_torchscript(tape: Tape) -> Run:
    """Function that runs a tape on the TorchScript interpreter."""
    run: Any = C._create_function_from_graph("replayed", _Drawing(tape).graph)
    held = tape.held
    optimize, is_optimized = C._set_graph_executor_optimize, C._get_graph_executor_optimize

    def replayed(*leaves: Tensor) -> Sequence[Any]:
        before = is_optimized()
        optimize(False)  # otherwise torch's fusion passes make the graph slower
        try:
            return cast("Sequence[Any]", run(*leaves, *held))
        finally:
            optimize(before)

    return replayed


class _Drawing:
    """A tape as a TorchScript graph: inputs first, then captured values."""

    def __init__(self, tape: Tape) -> None:
        self.graph: Any = C.Graph()
        self.given = [self.graph.addInput(f"x{index}") for index in range(tape.inputs)]
        self.held = [self.graph.addInput(f"w{index}") for index in range(len(tape.held))]
        for value, held in zip(self.held, tape.held, strict=True):
            if not isinstance(held, Tensor):
                value.setType(held._type())
        self.made: dict[Made, Any] = {}
        self.constants: dict[Operand, Any] = {}
        for index, step in enumerate(tape.steps):
            self._step(index, step.op._schema, step.operands, step.lengths)
        results = [self._value(result, None) for result in tape.results]
        whole = self._insert("prim::TupleConstruct", results, 1).output()
        whole.setType(C.TupleType([value.type() for value in results]))
        self.graph.registerOutput(whole)

    def _step(self, index: int, schema: Any, operands: Sequence[Operand], lengths: Sequence[int | None]) -> None:
        kinds = [argument.type for argument in schema.arguments]
        inputs = [self._value(operand, kind) for operand, kind in zip(operands, kinds, strict=True)]
        node = self._insert(schema.name, inputs, len(schema.returns))
        for place, (value, returned) in enumerate(zip(node.outputs(), schema.returns, strict=True)):
            value.setType(returned.type)
            self.made[Made(index, place)] = value
            length = lengths[place] if place < len(lengths) else None
            if length is not None:
                for item, part in enumerate(self._insert("prim::ListUnpack", [value], length).outputs()):
                    self.made[Made(index, place, item)] = part

    def _insert(self, name: str, inputs: list[Any], results: int) -> Any:
        node = self.graph.create(name, inputs, results)
        self.graph.insertNode(node)
        return node

    def _value(self, operand: Operand, kind: Any) -> Any:
        match operand:
            case TracedInput(index):
                return self.given[index]
            case Held(index):
                return self.held[index]
            case Made():
                return self.made[operand]
            case TraceConstant():
                return self._constant(operand)
            case Several(items):
                return self._list(items, kind)

    def _constant(self, constant: TraceConstant) -> Any:
        found = self.constants.get(constant)
        if found is None:
            value = constant.value
            number = SETTINGS[value] if isinstance(value, torch.memory_format | torch.layout) else value
            found = self.constants[constant] = self.graph.insertConstant(number)
        return found

    def _list(self, items: Sequence[Operand], kind: Any) -> Any:
        whole = kind.getElementType() if isinstance(kind, C.OptionalType) else kind
        element = whole.getElementType()
        value = self._insert("prim::ListConstruct", [self._value(item, element) for item in items], 1).output()
        value.setType(C.ListType(element))
        return value
