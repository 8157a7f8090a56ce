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
from quantc.errors import InputError
from quantc.flows.tracing.bodies import body_for
from quantc.flows.tracing.call_sites import END, START, Context, Key, Link, place_of_call
from quantc.flows.tracing.deferred import Queue
from quantc.flows.tracing.quantization_state import AutoQuantizationState
from quantc.flows.tracing.trace import Phase, Trace, Watch
from quantc.flows.tracing.units import Unit

if TYPE_CHECKING:
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
    at: Link
    """The last place that is known to be quick; the next one is guessed from it."""
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
        self.frame = Frame(state, context, None, context.start if context is not None else Link())
        self.watch = Watch(trace) if trace.phase is Phase.OBSERVING else None
        self.recording: Recording | None = None
        self.is_quick = trace.phase is Phase.CONVERTED and not has_global_hooks()
        """Whether modules of torch.nn need not be called where a kernel does their work."""
        self.queue: Any = Queue(trace) if trace.phase is Phase.CONVERTED else None
        """What is put off; None before it is converted."""
        self.leaf: LeafCall | None = None
        self.handed_out: list[tuple[Weight, Stamp]] = []
        """Weights whose memory others have, and what they held before."""
        self.replaced: dict[int, tuple[Tensor, Any]] = {}
        """In training: tensors that were written to in place, by id, and what they are instead."""
        self.rounded: dict[Any, Any] = {}
        """In training: what was rounded in this run, by what rounds it."""
        if trace.bound is None:
            trace.bound = Bound(trace, model)
        self.constants: dict[str, Tensor] = trace.bound.constants

    def hand_out(self, tensors: list[Tensor]) -> None:
        """Others have the memory of tensors from now on, and write to it without torch counting."""
        if self.watch is not None:
            self.watch.hand_out(tensors)
        for weight in self.trace.bound.weights:
            if any(tensor is weight.tensor for tensor in tensors) and self.trace.phase is not Phase.TRAINING:
                self.handed_out.append((weight, Stamp(weight.tensor, Exact.YES)))

    def check_weights(self) -> None:
        """Refuse to go on with weights that are other ones than those that were folded or packed."""
        if self.trace.phase is Phase.TRAINING:
            return
        for held, last, tensor, version, weight in self.trace.bound.rows:
            if held.get(last) is not tensor or tensor._version != version:
                raise weight.changed()
        for weight, stamp in self.handed_out:
            if not stamp.holds:
                raise weight.changed()

    def as_replaced(self, given: Any) -> Any:
        """Arguments, with what tensors are instead that were written to in place."""
        return pytree.tree_map(lambda x: self.replaced[id(x)][1] if id(x) in self.replaced else x, given)

    def key(self, func: Any, args: tuple[Any, ...], depth: int) -> Key:
        """The place of the torch function that is called. Modules of torch.nn call more of them in training."""
        leaf = self.leaf
        if leaf is None:
            own = self.trace.bound.names.get(id(args[1]), "") if len(args) > 1 else ""
            return ("", own or self.frame.last, *place_of_call(depth + 1))
        name = getattr(func, "__name__", "")
        leaf.names.append(name)
        return (leaf.path, *leaf.key, name, leaf.names.count(name))

    def counts_batches(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a batch norm counts a batch, which the fused op that it is part of does too."""
        if self.leaf is None or getattr(func, "__name__", "") != "add_":
            return False
        is_counter = args[0] is self.constants.get(f"{self.leaf.path}.num_batches_tracked")
        return is_counter and self.leaf.path not in self.trace.bound.left_float

    def is_left_float(self, leaf: str) -> bool:
        """Whether the config leaves a module float, so that it may be called from anywhere."""
        return bool(leaf) and leaf in self.trace.bound.left_float

    def step_name(self, number: int) -> str:
        """A step, for messages."""
        if number == END:
            return "the end of forward"
        if number < 0:
            path = next((row.path for row in self.trace.context.walk() if row.number == number), "")
            return f"a call of {path}"
        site = self.trace.bound.sites[number]
        return f"{site.name} at {site.where}"

    def shape_of_result(self, unit: Unit, call: int, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        """A tensor without numbers that has the shape of what a call would give."""
        shapes: dict[Any, Tensor] = self.trace.bound.shapes
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


def _without_numbers(x: Any) -> Any:
    return torch.empty(tuple(x.shape)) if isinstance(x, Tensor) else x


class Bound:
    """What a trace needs of the model it is attached to."""

    def __init__(self, trace: Trace, model: nn.Module) -> None:
        self.constants = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        # the first name of each: what trains with the model has the same tensors under others
        self.names = {id(tensor): name for name, tensor in reversed(self.constants.items())}
        contexts = trace.context.walk()
        self.sites = {site.number: site for context in contexts for site in context.ops.values()}
        quantized = {self.sites[number].leaf for number in trace.units if number in self.sites}
        self.left_float = {site.leaf for site in self.sites.values()} - quantized
        self.shapes: dict[Any, Tensor] = {}
        rows = {name for unit in trace.units.values() for call in unit.members for name in trace.calls[call].parameters}
        self.weights = [
            Weight(model, name) for name in rows if name in self.constants and not self.constants[name].is_inference()
        ]
        self.rows = [(row.held, row.last, row.tensor, row.version, row) for row in self.weights]
        """The same, in the form in which they are looked at after every call."""


class Weight:
    """A parameter or buffer that is part of a quantized op."""

    __slots__ = ("held", "last", "name", "tensor", "version")

    def __init__(self, model: nn.Module, name: str) -> None:
        self.name = name
        owner, _, self.last = name.rpartition(".")
        module = model.get_submodule(owner)
        self.held: Any = module._parameters if self.last in module._parameters else module._buffers
        tensor: Any = self.held[self.last]
        self.tensor: Tensor = tensor
        self.version: int = self.tensor._version

    def changed(self) -> InputError:
        """The error for one that is another now."""
        return InputError(
            f"{self.name} was written to or replaced, and the quantized op has it as it was",
            where=f"a model of the dynamic tracing flow, {self.name}",
            advice="change weights before prepare and convert; or load a state dict of a model that was converted alike",
        )


def has_global_hooks() -> bool:
    """Whether torch has hooks on the calls of all modules."""
    return bool(
        HOOKS._global_forward_hooks
        or HOOKS._global_forward_pre_hooks
        or HOOKS._global_backward_hooks
        or HOOKS._global_backward_pre_hooks
    )
