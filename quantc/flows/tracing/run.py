"""One call of a model: where it is, and what it has seen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from quantc.capture.stamps import Exact, Stamp
from quantc.flows.tracing.bodies import body_for
from quantc.flows.tracing.call_sites import END, START, Context, Key, place_of_call
from quantc.flows.tracing.deferred import Queue
from quantc.flows.tracing.quantization_state import STATE, AutoQuantizationState
from quantc.flows.tracing.trace import Phase, Trace, Watch
from quantc.flows.tracing.traced_tensor import Traced, floats_of
from quantc.flows.tracing.trail_log import Log
from quantc.flows.tracing.units import Unit
from quantc.flows.tracing.weights import Weight, Weights

if TYPE_CHECKING:
    from quantc.flows.tracing.following import Follower
    from quantc.flows.tracing.recording import Recording

ACTIVE = threading.local()
"""`run` is the call of a model that this thread is in."""
HOOKS: Any = torch.nn.modules.module
MOST_SHAPES = 256


@dataclass(slots=True)
class Frame:
    """A call of a module that is running."""

    state: AutoQuantizationState
    context: Context | None
    parent: Frame | None
    previous: int = START
    steps: list[int] | None = None
    """What was called, while the model is traced."""
    last: str = ""
    """The module with parameters that was called last: the same line after another layer of a loop is another place."""


@dataclass(slots=True)
class LeafCall:
    """A call of a module of torch.nn, which holds no others."""

    path: str
    key: Key
    names: list[str] = field(default_factory=list)
    """The torch functions that it has called."""


class Run:
    """One call of a model: where it is, and what it has seen. Each thread has its own."""

    def __init__(self, trace: Trace, state: AutoQuantizationState, model: nn.Module) -> None:
        self.trace = trace
        context = state.contexts[0] if state.contexts else None
        self.frame = Frame(state, context, None)
        self.watch = Watch(trace) if trace.phase is Phase.OBSERVING else None
        self.recording: Recording | None = None
        self.is_quick = trace.phase is Phase.CONVERTED and not has_global_hooks()
        """Whether modules of torch.nn need not be called where a kernel does their work."""
        self.queue: Any = Queue(trace) if trace.phase is Phase.CONVERTED else None
        """What is put off; None before it is converted."""
        self.log: Log | None = None
        """Where calls are written down that put off ops."""
        if self.queue is not None and self.is_quick:
            self.log = self.queue.log = Log(self, self.queue)
        self.follower: Follower | None = None
        """Who knows the calls that come; None if each is worked out."""
        self.leaf: LeafCall | None = None
        self.handed_out: list[tuple[Weight, Stamp]] = []
        """Weights whose memory others have, and what they held before."""
        self.rounded: dict[Any, Any] = {}
        """In training: what was rounded in this run, by what rounds it."""
        bound: Bound | None = trace.bounds.get(state.path)
        if bound is None or (trace.phase is Phase.TRAINING and bound.is_loose):
            bound = trace.bounds[state.path] = Bound(trace, model, state.path)
        self.bound = bound
        self.constants: dict[str, Tensor] = self.bound.constants

    def open(self) -> Log | None:
        """Where a call that begins is to be written down; None if it is not."""
        return None if self.log is None or self.follower is not None or not self.log.open() else self.log

    def lose(self) -> None:
        """Something is done that is not written down."""
        if self.log is not None:
            self.log.lose()

    def stop_following(self) -> None:
        """Work out the calls from here on."""
        if self.follower is not None:
            self.follower.leave()

    def pop(self, path: str) -> None:
        """A call of the module at a path has ended."""
        frame = self.frame
        if frame.parent is None:
            raise RuntimeError("the frame of the model itself does not end before its run")
        if frame.steps is not None and frame.context is not None:
            frame.context.sequences[tuple(frame.steps)] = None
        self.frame = frame.parent
        self.frame.last = path

    def hand_out(self, tensors: list[Tensor]) -> None:
        """Others have the memory of tensors from now on, and write to it without torch counting."""
        if self.watch is not None:
            self.watch.hand_out(tensors)
        for weight in self.bound.rows:
            if any(tensor is weight.tensor for tensor in tensors) and self.trace.phase is not Phase.TRAINING:
                self.handed_out.append((weight, Stamp(weight.tensor, Exact.YES)))

    def check_weights(self) -> None:
        """Refuse to go on with weights that are other ones than those that were folded or packed."""
        phase, weights = self.trace.phase, self.bound.weights
        if weights is None:
            if phase is Phase.TRAINING and self.bound.is_loose:
                raise next(row for row in self.bound.rows if row.held.get(row.last) is not row.tensor).changed()
            return
        weights.check()
        if phase is Phase.OBSERVING:
            weights.check_all()
        for weight, stamp in self.handed_out:
            if not stamp.holds:
                raise weight.changed()

    def read_before_written(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """In training: the arguments of a call that writes to the first of them, with copies of what lies in its memory. The
        way back needs what was read, and those who share the memory need what is written."""
        first = floats_of(args[0]) if type(args[0]) is not Traced or args[0].plain is not None else None
        if first is None:
            return args
        return tuple(self._copied(x) if _shares_memory(x, first) else x for x in args)

    def _copied(self, x: Any) -> Any:
        if type(x) is Traced:
            return x if x.waiting is not None else floats_of(x).clone()
        made = x.clone()
        for (target, number, version), (value, _) in list(self.rounded.items()):
            if number == id(x) and version == x._version:  # it is rounded once, whoever reads it
                self.rounded[target, id(made), made._version] = (value, made)
        return made

    def key(self, func: Any, args: tuple[Any, ...], depth: int) -> Key:
        """The place of the torch function that is called. Modules of torch.nn call more of them in training."""
        leaf = self.leaf
        if leaf is None:
            own = self.bound.names.get(id(args[1]), "") if len(args) > 1 else ""
            return ("", own or self.frame.last, *place_of_call(depth + 1))
        name = getattr(func, "__name__", "")
        leaf.names.append(name)
        return (leaf.path, *leaf.key, name, leaf.names.count(name))

    def counts_batches(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a batch norm counts a batch, which the fused op that it is part of does too."""
        if self.leaf is None or getattr(func, "__name__", "") != "add_":
            return False
        is_counter = args[0] is self.constants.get(f"{self.leaf.path}.num_batches_tracked")
        return is_counter and self.leaf.path not in self.bound.left_float

    def is_left_float(self, leaf: str) -> bool:
        """Whether the config leaves a module float, so that it may be called from anywhere."""
        return bool(leaf) and leaf in self.bound.left_float

    def step_name(self, number: int) -> str:
        """A step, for messages."""
        if number == END:
            return "the end of forward"
        if number < 0:
            path = next((row.path for row in self.trace.context.walk() if row.number == number), "")
            return f"a call of {path}"
        site = self.bound.sites[number]
        return f"{site.name} at {site.where}"

    def shape_of_result(self, unit: Unit, call: int, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        """A tensor without numbers that has the shape of what a call would give."""
        shapes: dict[Any, Tensor] = self.bound.shapes
        given = args[0].shape
        found = shapes.get((call, given))
        if found is None:
            fakes = FakeTensorMode(allow_non_fake_inputs=True)
            with torch._C.DisableTorchFunction(), torch.no_grad(), torch.inference_mode(False), fakes:
                metas = pytree.tree_map(_without_numbers, (args, kwargs))
                shape = func(*metas[0], **metas[1]).shape
            found = body_for(torch.Size(shape))
            if len(shapes) < MOST_SHAPES:
                shapes[call, given] = found
        return found


def _shares_memory(x: Any, other: Tensor) -> bool:
    if type(x) is Traced:
        x = x.plain
    if not isinstance(x, Tensor) or x.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _without_numbers(x: Any) -> Any:
    return torch.empty(tuple(x.shape)) if isinstance(x, Tensor) else x


class Bound:
    """What a trace needs of the model it is attached to, or of the module of it that is called by itself."""

    def __init__(self, trace: Trace, model: nn.Module, path: str) -> None:
        prefix = f"{path}." if path else ""
        self.constants = {
            f"{prefix}{name}": tensor
            for rows in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
            for name, tensor in rows
        }
        self.names: dict[int, str] = {}
        for name, tensor in self.constants.items():
            if f"{STATE}." not in name:  # in training, the program has them too
                self.names.setdefault(id(tensor), name)
        self.sites = trace.sites
        quantized = {self.sites[number].leaf for number in trace.units if number in self.sites}
        self.left_float = {site.leaf for site in self.sites.values()} - quantized
        self.shapes: dict[Any, Tensor] = {}
        self.rows = [Weight(model, name, prefix) for name in sorted(trace.weights) if name.startswith(prefix)]
        is_settled = trace.phase in (Phase.OBSERVING, Phase.CONVERTED)
        self.weights = Weights(self.rows, trace.made_of) if is_settled else None
        if trace.phase is Phase.TRAINING:
            trace.tie(self.constants)

    @property
    def is_loose(self) -> bool:
        """Whether somebody has put other weights in the place of those that are known here."""
        return any(row.held.get(row.last) is not row.tensor for row in self.rows)


def has_global_hooks() -> bool:
    """Whether torch has hooks on the calls of all modules."""
    return bool(
        HOOKS._global_forward_hooks
        or HOOKS._global_forward_pre_hooks
        or HOOKS._global_backward_hooks
        or HOOKS._global_backward_pre_hooks
    )
