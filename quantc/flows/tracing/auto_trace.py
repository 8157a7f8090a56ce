"""Partial capture of a program while it runs.

Two points are intercepted, `__torch_function__` and `torch.nn.Module.__call__`, in tracing, calibration and inference
alike. From there the hooks of `AutoQuantizationState` are called: see `Interception.__torch_function__`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from quantc.capture.model_copies import cloned_inputs
from quantc.capture.runtime.call_tracing import tensors_in
from quantc.errors import InputError
from quantc.flows.tracing.call_sites import BOUNDARIES, SKIPPED, Key, place_of_call
from quantc.flows.tracing.functions import Kind, gives_back, open_function
from quantc.flows.tracing.fused_calls import Stage, follow
from quantc.flows.tracing.quantization_state import AutoQuantizationState
from quantc.flows.tracing.recording import RECORDINGS, Recording, notice
from quantc.flows.tracing.run import ACTIVE, STATE, Frame, LeafCall, Run
from quantc.flows.tracing.trace import Phase, Trace, Watch
from quantc.flows.tracing.traced_tensor import (
    answer,
    call_on_floats,
    copy_elements,
    floats_of,
    on_floats,
    value_of,
    with_numbers,
)
from quantc.ir.finite_inputs import not_finite
from quantc.support.finite_tensors import why_not_finite


class Interception(TorchFunctionMode):
    """Sees every torch function that is called while a model runs."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run, kwargs = self.run, kwargs or {}
        # only some ops are quantizable; all others end here
        kind = run.trace.kind_of(func)
        if kind is Kind.OPENED:
            with self:
                return open_function(func)(*args, **kwargs)
        if kind is Kind.HOOKED or (run.trace.phase is not Phase.CONVERTED and kind is not Kind.QUERY):
            with torch._C.DisableTorchFunctionSubclass():
                return self._call_hooked(func, args, kwargs)
        if kind is Kind.MEMORY:
            run.hand_out(tensors_in(on_floats((args, kwargs), floats_of)))
        if not types:
            return with_numbers(func(*args, **kwargs), args)
        if kind is Kind.QUERY:
            return answer(func, args, kwargs)
        if kind is Kind.DROPOUT and gives_back(args, kwargs):
            return args[0]
        return copy_elements(func, args, kwargs) if kind is Kind.COPY else call_on_floats(func, args, kwargs)

    def _call_hooked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self.run
        state = run.frame.state
        phase = run.trace.phase
        key = run.key(func, args, 3)
        if phase is Phase.TRAINING and run.counts_batches(func, args):
            return args[0]
        if phase is Phase.TRACING:
            return run.recording.op(func, args, kwargs, key, run)  # type: ignore[union-attr]
        if run.trace.kind_of(func) is Kind.MEMORY:
            run.hand_out(tensors_in(on_floats((args, kwargs), floats_of)))
        # raises where control flow over quantizable ops is another than was seen
        site = state.validate_cur_op(func, args, kwargs, key, run)
        if site is None:
            return call_on_floats(func, args, kwargs)
        if phase is Phase.CONVERTED:
            args, kwargs = state.op_convert_before_hook(func, args, kwargs, site, run)
            function = state.op_convert_function(func, site, run)
            output = call_on_floats(func, args, kwargs) if function is None else function(*args, **kwargs)
            output = state.op_convert_after_hook(func, output, args, site)
        else:
            args, kwargs = state.op_prepare_before_hook(func, args, kwargs, site, run)
            output = state.op_prepare_function(func, site, run)(*args, **kwargs)
            output = state.op_prepare_after_hook(func, output, args, kwargs, site, run)
        if run.log is not None:
            run.log(site, site.leaf or state.path, output)
        return output


class Intercepted:
    """Stands before the class of a module: its calls are seen."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state: AutoQuantizationState = self._modules[STATE]  # type: ignore[attr-defined]
        run: Run | None = getattr(ACTIVE, "run", None)
        if run is None or run.trace is not state.trace:
            return _start(self, state, args, kwargs)
        if state.is_idle:
            args, kwargs = state.module_before_hook(args, kwargs, run)
            with torch._C.DisableTorchFunction():
                output = super().__call__(*args, **kwargs)  # type: ignore[misc]
            run.frame.last = state.path  # as when it was traced
            return output
        run.frame = _enter(state, run.frame, run, place_of_call(2))
        try:
            args, kwargs = state.module_before_hook(args, kwargs, run)
            if run.is_live and has_hooks(self):
                args, kwargs = _for_hooks(self, args, kwargs, state.path, run)
            call = self.forward if run.may_skip and not has_hooks(self) else super().__call__  # type: ignore[attr-defined, misc]
            output = call(*args, **kwargs)
            state.end(run)
            return state.module_after_hook(output, run)
        except RuntimeError as error:
            _refuse_backward_hooks(error, state.path, run)
            raise
        finally:
            run.pop(state.path)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The children that the module had before: models go through them to call them."""
        rows: Iterable[tuple[str, nn.Module]] = super().named_children()  # type: ignore[misc]
        return (row for row in rows if row[0] != STATE)

    def train(self, mode: bool = True) -> Any:
        """Its state goes into the same mode."""
        if STATE in self._modules:  # type: ignore[attr-defined]
            self._modules[STATE].train(mode)  # type: ignore[attr-defined]
        return super().train(mode)  # type: ignore[misc]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """torch hands each module its own part of a state dict, and the state of a model must know the weights."""
        state: Any = self._modules.get(STATE)  # type: ignore[attr-defined]
        if state is not None and not state.path:
            rows = ((name, state_dict.get(f"{prefix}{name}")) for name in state.trace.weights)
            state.arriving = {name: tensor for name, tensor in rows if tensor is not None}
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        return (_same_class_again, (own_class(type(self)), isinstance(self, InterceptedLeaf)), *made[2:])


class InterceptedLeaf(Intercepted):
    """Stands before the class of a module of torch.nn that holds no others. It has no state: its calls are those of the
    module around it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run: Run | None = getattr(ACTIVE, "run", None)
        if run is None:
            _refuse_backward(self._auto_quant_path)  # type: ignore[attr-defined]
            if RECORDINGS:
                notice(self, self._auto_quant_path)  # type: ignore[arg-type, attr-defined]
            return super(Intercepted, self).__call__(*args, **kwargs)  # type: ignore[misc]
        frame, path, place = run.frame, self._auto_quant_path, place_of_call(2)  # type: ignore[attr-defined]
        site = frame.context.leaves.get((path, *place)) if run.may_skip and frame.context is not None else None
        is_plain = site is not None and len(args) == 1 and not kwargs and not has_hooks(self)
        if site is not None and is_plain and site.is_as_checked(self):
            frame.state.step_to(site, run)
            if self._parameters:  # type: ignore[attr-defined]
                frame.last = path
            with torch._C.DisableTorchFunction():
                return follow(run.trace.units[site.number], site.number, self.forward, args[0], run)  # type: ignore[attr-defined]
        around, run.leaf = run.leaf, LeafCall(path, place)
        if run.is_live and has_hooks(self):
            args, kwargs = _for_hooks(self, args, kwargs, path, run)
        try:
            output = super(Intercepted, self).__call__(*args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            _refuse_backward_hooks(error, path, run)
            raise
        finally:
            run.leaf = around
            if self._parameters:  # type: ignore[attr-defined]
                frame.last = path
        if site is not None and is_plain:
            site.was_checked(self)
        return output


def has_hooks(module: Any) -> bool:
    """True if a module has hooks of the user's, so that it must be called through `Module.__call__`."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class InterceptedSequential(Intercepted):
    """The same for `nn.Sequential`, which calls all of its children."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([child for name, child in self._modules.items() if name != STATE])  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self._modules) - 1  # type: ignore[attr-defined]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return nn.Sequential(*list(self)[index])
        return super().__getitem__(index)  # type: ignore[misc]


def _same_class_again(cls: type[nn.Module], is_leaf: bool) -> Any:
    made = intercepted_class(cls, is_leaf)
    return made.__new__(made)


_CLASSES: dict[tuple[type, type], type] = {}


def intercepted_class(cls: type[nn.Module], is_leaf: bool = False) -> type[nn.Module]:
    """A class like `cls`, under the same name, whose calls are seen; those of a leaf are calls of the module around it."""
    before = InterceptedLeaf if is_leaf else InterceptedSequential if issubclass(cls, nn.Sequential) else Intercepted
    if (before, cls) not in _CLASSES:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _CLASSES[before, cls] = type(cls.__name__, (before, cls), names)
    return _CLASSES[before, cls]


def is_leaf_class(cls: type) -> bool:
    """True for classes of torch.nn that call functions themselves, rather than other modules."""
    holds_others = (nn.Sequential, nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return cls.__module__.startswith("torch.nn.modules") and not issubclass(cls, holds_others + layers)


def own_class(cls: type) -> type:
    """The class that a module had before it was intercepted."""
    return (
        next(base for base in cls.__mro__ if not issubclass(base, Intercepted)) if issubclass(cls, Intercepted) else cls
    )


def _enter(state: AutoQuantizationState, outer: Frame, run: Run, place: Key) -> Frame:
    """The frame of a module that is called from another."""
    steps: list[int] | None = [] if run.recording is not None else None
    if outer.context is None:
        return Frame(state, None, outer, steps=steps)
    key = (*place, state.path)
    context = outer.context.children.get(key)
    if context is None and run.recording is not None:
        context = run.recording.enter(outer.context, key, state)
    if context is not None and outer.steps is not None:
        outer.steps.append(context.number)
    return Frame(state, context, outer, steps=steps)


def _start(module: Any, state: AutoQuantizationState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of the model from outside."""
    trace = state.trace
    if trace.phase is Phase.TRAINING:
        _refuse_backward(state.path or type(module).__name__)
    if trace.phase is Phase.TRACING or not state.contexts:  # in a thread of the model's own
        notice(module, state.path)
        return nn.Module.__call__(module, *args, **kwargs)
    if trace.phase is Phase.CONVERTED and torch.is_grad_enabled():
        _refuse_gradients(args, kwargs)
    outer = getattr(ACTIVE, "run", None)
    if outer is not None:  # what the model around gives may be traced there
        args, kwargs = on_floats((args, kwargs))
    run = Run(trace, state, module)
    if trace.phase is Phase.CONVERTED:
        _refuse_numbers(module, run, args, kwargs)
    ACTIVE.run = run
    try:
        if run.watch is not None:
            _watch_inputs(trace, run.watch, args, kwargs)
        with Interception(run):
            output = nn.Module.__call__(module, *args, **kwargs)
        state.end(run)
        output = state.module_after_hook(output, run)
        run.check_weights()
        if run.refused is not None:
            raise run.refused  # the model has caught it, and gone on without
    finally:
        ACTIVE.run = outer
    if run.watch is not None:
        trace.commit(run.watch.tally)
    return output


def _watch_inputs(trace: Trace, watch: Watch, args: Any, kwargs: Any) -> None:
    leaves = pytree.tree_leaves((args, kwargs))
    for index, groups in trace.watched.get(-1, {}).items():
        if index < len(leaves):
            watch.observe(groups, leaves[index], partial("input {}".format, index))


def _refuse_backward(where: str) -> None:
    """Refuse what is computed again on the way back: there is no call of the model then that it is part of."""
    if torch._C._current_graph_task_id() != -1:
        raise InputError(
            f"{where} is computed again on the way back, as by torch.utils.checkpoint: it would be computed otherwise",
            where=where,
            advice="train without checkpoints",
        )


def _for_hooks(module: Any, args: Any, kwargs: Any, path: str, run: Run) -> Any:
    """The arguments of a module with hooks, in training: floats, which have gradients, for tensors that were written in place.
    Values inside a fused op have none, so backward hooks on them are refused."""
    watches = bool(module._backward_hooks or module._backward_pre_hooks) and torch.is_grad_enabled()
    if watches and any(type(value_of(x)) is Stage for x in tensors_in((args, kwargs))):
        raise _hook_error(path, run)
    return on_floats((args, kwargs), lambda x: floats_of(x) if isinstance(x, Tensor) and value_of(x) is None else x)


def _refuse_backward_hooks(error: RuntimeError, path: str, run: Run) -> None:
    """Refuse a hook on gradients that torch cannot watch: they are inside a fused op, or of a tensor that was written in place."""
    if "setting up backward hooks" in str(error):
        raise _hook_error(path, run) from error


def _hook_error(path: str, run: Run) -> InputError:
    return run.refuse(
        InputError(
            f"{path} has a backward hook, and begins or ends within a fused op, or with a call in place: there is no tensor "
            "that has the gradient",
            where=path,
            advice="put the hook on a module around the whole op (convolution, norm, activation), without calls in place, "
            "or leave the module float with a config",
        )
    )


def _refuse_gradients(args: Any, kwargs: Any) -> None:
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((args, kwargs))):
        raise InputError(
            "an input asks for gradients, and kernels have none",
            where="a converted model",
            advice="call it under torch.no_grad(), or train what prepare(..., qat=True) gives",
        )


def _refuse_numbers(module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse NaN and infinity, except infinity in a possible mask."""
    for index, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.is_meta:
            continue
        if why := why_not_finite(leaf, may_be_infinite=index not in run.bound.finite_inputs):
            raise not_finite(f"input {_name_of_input(module, index, args, kwargs)!r}", why)


def _name_of_input(module: nn.Module, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The name of the `forward` argument that a flat input belongs to."""
    paths = [path for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
    place = [getattr(key, "idx", getattr(key, "key", None)) for key in paths[index]]
    if place[0] == 1:
        return str(place[1])
    at = int(str(place[1]))
    rows = list(inspect.signature(module.forward).parameters.values())
    variadic = next((row.name for row in rows if row.kind is row.VAR_POSITIONAL), f"argument {at}")
    return rows[at].name if at < len(rows) and rows[at].kind is rows[at].POSITIONAL_OR_KEYWORD else f"{variadic}[{at}]"


BOUNDARIES.update(id(function.__code__) for function in (Intercepted.__call__, _start))
SKIPPED.add(id(Interception.__torch_function__.__code__))


def add_auto_observation(
    model: nn.Module,
    examples: Iterable[tuple[tuple[Any, ...], dict[str, Any]]],
    trace: Trace,
    leaves: Collection[str] = (),
) -> Recording:
    """Intercept the calls of a model, and trace it with examples: `first_call` captures, later calls observe.

    Each module that holds others gets an `AutoQuantizationState` as a child; the model itself is changed. Calls of the modules
    named in `leaves` are recorded, and nothing inside them.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.ModuleList | nn.ModuleDict | torch.jit.ScriptModule):
            continue  # never called, or not Python
        if any(name.startswith(f"{leaf}.") for leaf in leaves):
            continue
        if name in leaves:
            module.__class__ = intercepted_class(type(module))
            module.add_module(STATE, AutoQuantizationState(trace, name, type(module).__name__, is_whole=True))
            continue
        if name and is_leaf_class(type(module)):
            module.__class__ = intercepted_class(type(module), is_leaf=True)
            object.__setattr__(module, "_auto_quant_path", name)
            continue  # its calls are those of the module around it
        state = AutoQuantizationState(trace, name, type(module).__name__)
        module.__class__ = intercepted_class(type(module))
        module.add_module(STATE, state)
    root: AutoQuantizationState = model._modules[STATE]  # type: ignore[assignment]
    root.contexts.append(trace.context)
    types = {name: own_class(type(module)) for name, module in model.named_modules()}
    recording = Recording(model, trace, types, Interception)
    for example in examples:
        recording.run(model, *cloned_inputs(example))  # the model may write to them
    return recording


def add_auto_convert(model: nn.Module, trace: Trace, program: Any) -> nn.Module:
    """Run the intercepted calls of a model quantized, by the converted program."""
    trace.converted(program)
    for parameter in model.parameters():
        if parameter.is_leaf:
            parameter.requires_grad_(False)
        else:  # as the parameters of a copied ScriptModule are
            parameter.detach_()
    return model


__all__ = ["Intercepted", "Interception", "Run", "add_auto_convert", "add_auto_observation"]
