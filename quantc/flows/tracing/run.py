"""One call of a model: where it is, and what it has seen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from quantc.capture.runtime.tracing import INPUT, Recorder
from quantc.capture.runtime.write_detection import is_tracked
from quantc.errors import QuantcError
from quantc.flows.tracing.call_sites import END, START, Context, Key, OpSite, place_of_call
from quantc.flows.tracing.functions import name_of
from quantc.flows.tracing.fused_ops import Rounded, Unit
from quantc.flows.tracing.trace import Phase, Trace, UnseenOpError, Watch
from quantc.flows.tracing.traced_tensor import Escapes, Levels, Traced, floats_of, levels_on, value_of
from quantc.flows.tracing.weights import Weight, Weights
from quantc.ir.infinite_masks import is_mask
from quantc.qat.norms import LiveNorm

STATE = "_auto_quant_state"
"""The name under which a module has its state."""
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Function = Callable[..., Any]
Refusal = TypeVar("Refusal", bound=QuantcError)
ACTIVE = threading.local()
"""`run` is the model call of this thread, `log` the receiver of calls' results."""
HOOKS: Any = torch.nn.modules.module
GLOBAL_HOOKS = (
    HOOKS._global_forward_hooks, HOOKS._global_forward_pre_hooks, HOOKS._global_backward_hooks, HOOKS._global_backward_pre_hooks,
)  # fmt: skip
MAX_SHAPES = 256


class ModuleState(Protocol):
    """Interface of a module's state as a run uses it, with the hooks around the module's calls."""

    path: str
    contexts: list[Context]

    def validate_cur_op(self, func: Function, args: Args, kwargs: Kwargs, key: Key, run: Run) -> OpSite | None: ...

    def step_to(self, site: OpSite, run: Run) -> None: ...

    def unseen(self, seen: str, run: Run, leaf: str) -> UnseenOpError: ...

    def op_prepare_before_hook(
        self, func: Function, args: Args, kwargs: Kwargs, site: OpSite, run: Run
    ) -> tuple[Args, Kwargs]: ...

    def op_prepare_function(self, func: Function, site: OpSite, run: Run) -> Function: ...

    def op_prepare_after_hook(
        self, func: Function, output: Any, args: Args, kwargs: Kwargs, site: OpSite, run: Run
    ) -> Any: ...

    def op_convert_before_hook(
        self, func: Function, args: Args, kwargs: Kwargs, site: OpSite, run: Run
    ) -> tuple[Args, Kwargs]: ...

    def op_convert_function(self, func: Function, site: OpSite, run: Run) -> Function | None: ...

    def op_convert_after_hook(self, func: Function, output: Any, args: Args, site: OpSite) -> Any: ...


class Recording(Protocol):
    """Interface of a call recorder as a run uses it."""

    recorder: Recorder

    def enter(self, outer: Context, key: Key, state: ModuleState) -> Context: ...

    def op(self, func: Any, args: Args, kwargs: Kwargs, key: Key, run: Run) -> Any: ...


@dataclass(slots=True)
class Frame:
    """A call of a module that is running."""

    state: ModuleState
    context: Context | None
    parent: Frame | None
    previous: int = START
    steps: list[int] | None = None
    """The calls so far, while the model is traced."""
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

    def __init__(self, trace: Trace, state: ModuleState, model: nn.Module) -> None:
        self.trace = trace
        context = state.contexts[0] if state.contexts else None
        self.frame = Frame(state, context, None)
        self.log: Callable[[OpSite, str, Any], None] | None = getattr(ACTIVE, "log", None)
        """Receives the result of each call of the model."""
        self.watch = Watch(trace) if trace.phase is Phase.OBSERVING and self.log is None else None
        self.recording: Recording | None = None
        self.is_live = trace.phase is Phase.TRAINING
        self.may_skip = trace.phase is Phase.CONVERTED and self.log is None and not any(map(bool, GLOBAL_HOOKS))
        """True if modules of torch.nn may be skipped where a kernel does their work."""
        self.leaf: LeafCall | None = None
        self.refused: QuantcError | None = None
        self.escapes = Escapes()
        self.gave_weights = False
        """True once the memory of a weight was exposed."""
        self.rounded: dict[Any, Any] = {}
        """In training: the tensors rounded in this run, by fake quantizer."""
        bound: Bound | None = trace.bounds.get(state.path)
        if bound is None or (trace.phase is Phase.TRAINING and bound.is_loose):
            if bound is not None:  # others may hold the tensors that were there before
                trace.bounds.clear()
            bound = trace.bounds[state.path] = Bound(trace, model, state.path)
        self.bound = bound
        self.constants: dict[str, Tensor] = self.bound.constants

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
        self.escapes.count += 1
        if self.watch is not None:
            self.watch.hand_out(tensors)
        self.gave_weights = self.gave_weights or any(id(tensor) in self.bound.names for tensor in tensors)

    def enter_whole(self, tensors: list[Tensor], path: str) -> None:
        """Tensors are given to a module of which nothing is seen: it may read them, write to them, and keep them."""
        self.hand_out([floats_of(x) for x in tensors])
        if self.recording is not None:
            self.recording.recorder.read(tensors, f"{path} is kept whole")

    def refuse(self, error: Refusal) -> Refusal:
        """Remember a refusal: a model that catches it all the same gives no result."""
        self.refused = self.refused or error
        return error

    def check_weights(self) -> None:
        """Refuse to go on with weights that are other ones than those that were folded or packed."""
        weights = self.bound.weights
        if weights is None:
            if self.is_live and self.bound.is_loose:
                raise next(row for row in self.bound.rows if row.held.get(row.last) is not row.tensor).changed()
        elif self.gave_weights or self.watch is not None:
            weights.check_all()
        else:
            weights.check()

    # -- modes -----------------------------------------------------------------------------------------------------

    def is_in_mode(self, unit: Unit, call: int, given: bool) -> bool:
        """In training: True if a fused op computes a call in the mode it is given. Modules frozen in the program fit either mode."""
        if call <= unit.trigger:  # it has not run yet
            self._follow_modes(unit)
        parts: list[Any] = [self.trace.held.root.get_submodule(name) for name in unit.modes.get(call, ())]
        return all(part.frozen or part.training == given for part in parts) and bool(parts or not given)

    def _follow_modes(self, unit: Unit) -> None:
        """In training: let norms and dropout be in the mode of the modules that call them, which may be another than the model's."""
        for call, names in unit.modes.items():
            owner: Any = self.bound.module(self.bound.sites[call].leaf)
            for name in names:
                part: Any = self.trace.held.root.get_submodule(name)
                part.training = owner.training
                if isinstance(part, LiveNorm) and isinstance(owner, nn.modules.batchnorm._BatchNorm):
                    part.momentum = owner.momentum

    def refuse_norms(self, unit: Unit, call: int) -> None:
        """In training: refuse a call that is given something else than when it was seen, if a norm would then learn twice from a batch,
        or not at all: in the fused op and where it is called."""
        calls = [norm for norm in unit.modes if norm == call or norm < call == unit.trigger]
        root = self.trace.held.root
        for norm in calls:
            self._follow_modes(unit)
            parts = (root.get_submodule(name) for name in unit.modes[norm])
            if any(isinstance(part, LiveNorm) and part.learns for part in parts):
                site, given = self.bound.sites[norm], self.bound.sites[call]
                raise self.refuse(
                    UnseenOpError(
                        f"{given.name} at {given.where} is given another tensor in training than when it was seen, and "
                        f"{site.name} of {site.leaf or 'the model'} is part of one op with it",
                        where=given.where,
                        advice="leave the op float with a config, so that the norm is not part of it, or freeze the norm: "
                        "quantc.qat.freeze_norms(prepared)",
                    )
                )

    # -- fused ops -------------------------------------------------------------------------------------------------

    def compute(self, unit: Unit, operands: dict[int, Any]) -> Any:
        """Compute a fused op, as far as the model has come: in float, as it is trained, or on a kernel."""
        program = self.trace.held
        if self.trace.phase is Phase.CONVERTED:
            if not torch.is_autocast_enabled("cpu"):
                return unit.run_quantized(program, operands, self.trace.target)
            with torch.autocast("cpu", enabled=False):
                return unit.run_quantized(program, operands, self.trace.target)
        with torch._C.DisableTorchFunctionSubclass():
            if not self.is_live:
                return unit.run_float(program, operands)
            self._follow_modes(unit)
            made = unit.run_trained(program, operands, self.round)
            return self.rounded_once(unit.yielded, made) if unit.yielded else made

    def snapshot(self, unit: Unit, number: int, x: Tensor) -> Any:
        """An operand as it is now, for calls that come later: it may be written to."""
        if self.is_live:
            return Rounded(self.round(unit.rounders[number], floats_of(x)))
        value = value_of(x)
        grid = unit.grids[number] if self.trace.phase is Phase.CONVERTED else None
        if grid is not None:
            return value if type(value) is Levels and value.grid is grid else levels_on(x, grid)
        return value if type(value) is Levels else floats_of(x).clone()

    def round(self, rounder: fx.Node | None, x: Tensor) -> Tensor:
        """In training: a fake-quantized tensor, in memory that is never written to."""
        return x.clone() if rounder is None else self.rounded_once(str(rounder.target), x)

    def rounded_once(self, target: str, x: Tensor) -> Tensor:
        """In training: a tensor as it is rounded; the same for all who read it before it is written to, so that it is observed
        once."""
        key = self._key_of(target, x)
        if key not in self.rounded:
            # it is read under torch.no_grad() now, and maybe with gradients later
            with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):
                self.rounded[key] = (self.trace.held.root.get_submodule(target)(x), x)
        made: Tensor = self.rounded[key][0]
        return made if torch.is_grad_enabled() or not made.requires_grad else made.detach()

    def gives(self, unit: Unit, call: int, made: Tensor, result: Any) -> None:
        """A call of a fused op gives a tensor. In training its result may be rounded already, and is not rounded again."""
        if unit.yielded and call == unit.members[-1]:
            self._is_rounded(unit.yielded, floats_of(made), result)

    def _is_rounded(self, target: str, x: Tensor, made: Tensor) -> None:
        """In training: record that a tensor is rounded already, as `made`, which is never written to."""
        if x.dtype is made.dtype:
            self.rounded[self._key_of(target, x)] = (made, x)

    def _key_of(self, target: str, x: Tensor) -> Any:
        place = (x.shape, x.stride(), x.storage_offset()) if x.layout is torch.strided else ()
        return target, id(x), _version(x), (self.escapes.count if is_tracked(x) else object(), place)

    def read_before_written(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """In training: the arguments of a call that writes to the first of them, with copies of those that share its memory. The
        backward pass needs the values read, and aliases of the memory need the values written."""
        first = floats_of(args[0]) if type(args[0]) is not Traced or args[0]._quantc_buffer is not None else None
        if first is None:
            return args
        return tuple(self.copied(x) if _shares_memory(x, first) else x for x in args)

    def copied(self, x: Any) -> Any:
        """In training: a copy of a tensor, which is rounded if that is."""
        if value_of(x) is not None:
            return x
        made = floats_of(x).clone()
        self.is_copy(made, x)
        return made

    def is_copy(self, made: Tensor, x: Tensor) -> None:
        """In training: record that a tensor holds the contents of another, so that both are rounded once for all readers."""
        for (target, _, version, _), (value, held) in list(self.rounded.items()):
            if held is x and version == _version(x):
                self._is_rounded(target, made, value)

    # -- where it is -----------------------------------------------------------------------------------------------

    def key(self, func: Any, args: tuple[Any, ...], depth: int) -> Key:
        """The place of the torch function that is called. Modules of torch.nn call more of them in training."""
        leaf = self.leaf
        if leaf is None:
            own = self.bound.names.get(id(args[1]), "") if len(args) > 1 else ""
            return ("", own or self.frame.last, name_of(func), *place_of_call(depth + 1))
        name = getattr(func, "__name__", "")
        leaf.names.append(name)
        return (leaf.path, *leaf.key, name, leaf.names.count(name))

    def counts_batches(self, func: Any, args: tuple[Any, ...]) -> bool:
        """True if a batch norm counts a batch that the fused op it is part of counts too."""
        leaf, context = self.leaf, self.frame.context
        if leaf is None or context is None or getattr(func, "__name__", "") != "add_":
            return False
        if args[0] is not self.constants.get(f"{leaf.path}.num_batches_tracked"):
            return False
        # the same norm may be called elsewhere, and not be folded there
        site = context.ops.get((leaf.path, *leaf.key, "batch_norm", 1))
        return site is not None and site.number in self.trace.units

    def is_left_float(self, leaf: str) -> bool:
        """True if no call of a leaf module is quantized, so that it may be called from anywhere."""
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

    def looks_of(
        self, call: int, func: Callable[..., Any], args: Any, kwargs: Any, autocast: torch.dtype | None
    ) -> tuple[torch.Size, torch.dtype]:
        """The shape and dtype of a call's result. Errors of the function are raised here."""
        looks = self.bound.looks
        key: Any = (call, autocast)
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and id(x) not in self.bound.names:
                key = (*key, x.shape, _dtype(x))
        found = looks.get(key)
        if found is None:
            fakes = FakeTensorMode(allow_non_fake_inputs=True)
            with torch._C.DisableTorchFunction(), torch.no_grad(), torch.inference_mode(False), fakes:
                metas = pytree.tree_map(_without_numbers, (args, kwargs))
                made = func(*metas[0], **metas[1])
            found = (torch.Size(made.shape), made.dtype)
            if len(looks) < MAX_SHAPES:
                looks[key] = found
        return found


def _version(x: Tensor) -> Any:
    """The version counter of a tensor; a unique object for inference tensors, which have none."""
    return object() if x.is_inference() else x._version


def _dtype(x: Tensor) -> torch.dtype:
    value = value_of(x)
    made: torch.dtype = floats_of(x).dtype if value is None else value.dtype
    return made


def _shares_memory(x: Any, other: Tensor) -> bool:
    if type(x) is Traced:
        x = None if x._quantc_buffer is None else x._quantc_buffer.floats
    if not isinstance(x, Tensor) or x.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _without_numbers(x: Any) -> Any:
    return torch.empty(tuple(x.shape), dtype=_dtype(x)) if isinstance(x, Tensor) else x


class Bound:
    """A trace's view of the model it is attached to, or of a submodule called by itself: tensors by name, and weights."""

    def __init__(self, trace: Trace, model: nn.Module, path: str) -> None:
        prefix = f"{path}." if path else ""
        self.model, self.prefix = model, prefix
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
        self.looks: dict[Any, tuple[torch.Size, torch.dtype]] = {}
        self.rows = [Weight(model, name, prefix) for name in sorted(trace.weights) if name.startswith(prefix)]
        given = [] if path or trace.program is None else trace.held.graph.find_nodes(op="placeholder")
        read = [node for node in given if node.name.startswith(INPUT) and node.users and not is_mask(node)]
        self.finite_inputs = {int(node.name.removeprefix(INPUT)) for node in read}
        """Flat positions of the model's inputs that must be finite."""
        is_settled = trace.phase in (Phase.OBSERVING, Phase.CONVERTED)
        self.weights = Weights(self.rows, trace.made_of) if is_settled else None
        if trace.phase is Phase.TRAINING:
            trace.tie(self.constants)

    def module(self, path: str) -> nn.Module:
        """A module of the whole model, by its path; the one that is called from outside if that lies elsewhere."""
        return (
            self.model.get_submodule(path.removeprefix(self.prefix))
            if path.startswith(self.prefix) and path
            else self.model
        )

    @property
    def is_loose(self) -> bool:
        """True if a weight of the model has been replaced by another tensor."""
        return any(row.held.get(row.last) is not row.tensor for row in self.rows)
