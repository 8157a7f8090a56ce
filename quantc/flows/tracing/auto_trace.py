"""Partial capture of a program while it runs.

Two points are intercepted, `__torch_function__` and `torch.nn.Module.__call__`, in tracing, calibration and inference
alike. From there the hooks of `AutoQuantizationState` are called: see `Interception.__torch_function__`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from quantc.capture.tracing import tensors_in
from quantc.errors import InputError
from quantc.flows.tracing.bodies import with_numbers
from quantc.flows.tracing.call_sites import BOUNDARIES, SKIPPED, Key, place_of_call
from quantc.flows.tracing.following import NOTHING, Follower
from quantc.flows.tracing.functions import Kind, gives_back, opened
from quantc.flows.tracing.moves import moved, put_off, untouched
from quantc.flows.tracing.quantization_state import STATE, AutoQuantizationState
from quantc.flows.tracing.quick import NONE, Quick
from quantc.flows.tracing.recording import RECORDINGS, Recording, notice
from quantc.flows.tracing.run import ACTIVE, Frame, LeafCall, Run, has_global_hooks
from quantc.flows.tracing.trace import Phase, Trace, Watch
from quantc.flows.tracing.traced_tensor import HANDED_OUT, answer, call_on_floats, on_floats
from quantc.flows.tracing.trail import saved

_WITHOUT_INTERCEPTION = torch._C.DisableTorchFunction


class Interception(TorchFunctionMode):
    """Sees every torch function that is called while a model runs."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = self.run
        kwargs = kwargs or {}
        if run.follower is not None:
            output = run.follower.function(func, types, args, kwargs, sys._getframe(1))
            if output is not NOTHING:
                return output
        # only some ops are quantizable; all others end here
        kind = run.trace.kind_of(func)
        if kind is Kind.HOOKED or (run.trace.phase is not Phase.CONVERTED and kind is not Kind.QUERY):
            if kind is Kind.OPENED:
                with self:
                    return opened(func)(*args, **kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                return self._hooked(func, args, kwargs)
        if not types:
            if kind is not Kind.OPENED and kind is not Kind.MEMORY:
                return with_numbers(func(*args, **kwargs), args)
        elif kind is Kind.QUERY:
            return answer(func, args, kwargs)
        elif kind is Kind.DROPOUT and gives_back(args, kwargs):
            return args[0]
        elif kind is Kind.MOVE or kind is Kind.CALM:
            return self._moved(func, args, kwargs, moved if kind is Kind.MOVE else put_off)
        if kind is Kind.OPENED:
            with self:
                return opened(func)(*args, **kwargs)
        if kind is Kind.MEMORY:
            run.hand_out(tensors_in(on_floats((args, kwargs))))
        return call_on_floats(func, args, kwargs)

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], move: Callable[..., Any]) -> Any:
        """A call that moves elements, or may be put off with what it reads."""
        log = self.run.open()
        output = move(func, args, kwargs)
        if log is not None:
            log.move(func, args, kwargs, move, output)
        return output

    def _hooked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self.run
        state = run.frame.state
        phase = run.trace.phase
        key = run.key(func, args, 3)
        log = run.open()
        if phase is Phase.TRAINING and run.counts_batches(func, args):
            return args[0]
        if phase is Phase.TRACING:
            return run.recording.op(func, args, kwargs, key, run)  # type: ignore[union-attr]
        if run.trace.kind_of(func) is Kind.MEMORY:
            run.hand_out(tensors_in(on_floats((args, kwargs))))
        # raises where control flow over quantizable ops is another than was seen
        site = state.validate_cur_op(func, args, kwargs, key, run)
        unit = None if site is None else run.trace.units.get(site.number)
        if log is not None and unit is None:
            log.untouched(func, sys._getframe(2), key[2:], (*args, *kwargs.values()))
        if site is None:
            return untouched(func, args, kwargs)
        if phase is Phase.CONVERTED:
            args, kwargs = state.op_convert_before_hook(func, args, kwargs, site, run)
            function = state.op_convert_function(func, site, run)
            output = untouched(func, args, kwargs) if function is None else function(*args, **kwargs)
            if log is not None and unit is not None:
                log.function(func, sys._getframe(2), key[2:], unit, site.number, args, kwargs, output)
            return state.op_convert_after_hook(func, output, args, site)
        args, kwargs = state.op_prepare_before_hook(func, args, kwargs, site, run)
        output = state.op_prepare_function(func, site, run)(*args, **kwargs)
        return state.op_prepare_after_hook(func, output, args, kwargs, site, run)


def has_hooks(module: Any, run: Run) -> bool:
    """Whether a module has hooks of its user's, so that it must be called as torch calls it."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or (not run.is_quick and has_global_hooks())


class Intercepted:
    """Stands before the class of a module: its calls are seen."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state: AutoQuantizationState = self._modules[STATE]  # type: ignore[attr-defined]
        run: Run | None = getattr(ACTIVE, "run", None)
        if run is None or run.trace is not state.trace:
            return _start(self, state, args, kwargs)
        if state.is_idle:
            run.stop_following()
            run.lose()
            args, kwargs = state.module_before_hook(args, kwargs, run)
            with torch._C.DisableTorchFunction():
                output = super().__call__(*args, **kwargs)  # type: ignore[misc]
            run.frame.last = state.path  # as when it was traced
            return output
        is_hooked = has_hooks(self, run)
        if is_hooked:
            run.stop_following()
        follower = None if is_hooked else run.follower or resumed(run)
        comes_again = follower is not None and follower.enter(self, sys._getframe(1))  # type: ignore[arg-type]
        log = None if comes_again else run.open()
        place = () if comes_again else place_of_call(2)
        if not comes_again:
            run.frame = _entered(state, run.frame, run, place)
        try:
            if not comes_again:
                args, kwargs = state.module_before_hook(args, kwargs, run)
            if is_hooked:
                run.lose()
            elif log is not None:
                log.enter(self, sys._getframe(1), place)  # type: ignore[arg-type]
            call: Any = super().__call__ if is_hooked else self.forward  # type: ignore[attr-defined, misc]
            output = call(*args, **kwargs)
            if run.follower is not None and run.follower.exit():
                return output
            log = run.open()
            state.end(run)
            output = state.module_after_hook(output, run)
        except BaseException:
            run.stop_following()
            run.pop(state.path)
            raise
        run.pop(state.path)
        if log is not None:
            log.leave()
        return output

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
        return (_same_class_again, (own_class(type(self)), *made[1][1:]), *made[2:])


class InterceptedLeaf(Intercepted):
    """Stands before the class of a module of torch.nn that holds no others. It has no state: its calls are those of the
    module around it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run: Run | None = getattr(ACTIVE, "run", None)
        if run is None:
            if RECORDINGS:
                notice(self, self._auto_quant_path)  # type: ignore[arg-type, attr-defined]
            return super(Intercepted, self).__call__(*args, **kwargs)  # type: ignore[misc]
        follower = run.follower or resumed(run)
        if follower is not None:
            output = follower.leaf(self, args, kwargs, sys._getframe(1))  # type: ignore[arg-type]
            if output is not NOTHING:
                return output
        frame, key = run.frame, place_of_call(2)
        quick = _quick_for(self, key, frame, run) if run.is_quick and len(args) == 1 and not kwargs else None
        if quick is not None:
            log = run.open()
            frame.state.step_to(quick.site, run)
            if self._parameters:  # type: ignore[attr-defined]
                frame.last = quick.path
            with _WITHOUT_INTERCEPTION():
                output = quick.again(args, NONE, run)
            if log is not None:
                log.leaf(self, sys._getframe(1), key, quick, args[0], output)
            return output
        run.lose()
        path: str = self._auto_quant_path  # type: ignore[attr-defined]
        around, run.leaf = run.leaf, LeafCall(path, key)
        try:
            return super(Intercepted, self).__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            run.leaf = around
            if self._parameters:  # type: ignore[attr-defined]
                frame.last = path


def _quick_for(leaf: Any, key: Key, frame: Frame, run: Run) -> Quick | None:
    """What runs instead of a module, by the place that calls it."""
    if frame.context is None or leaf._forward_hooks or leaf._forward_pre_hooks:
        return None
    found: Quick | None = frame.context.quick.get((leaf._auto_quant_path, *key))
    if found is not None:
        found.leaf = leaf
    return found


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


def _same_class_again(cls: type[nn.Module]) -> Any:
    made = intercepted_class(cls)
    return made.__new__(made)


_CLASSES: dict[type, type] = {}


def intercepted_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A class like `cls`, under the same name, whose calls are seen."""
    if cls not in _CLASSES:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        before = InterceptedSequential if issubclass(cls, nn.Sequential) else Intercepted
        if is_leaf_class(cls):
            before = InterceptedLeaf
        _CLASSES[cls] = type(cls.__name__, (before, cls), names)
    return _CLASSES[cls]


def is_leaf_class(cls: type) -> bool:
    """Whether a class is one of torch.nn's own that makes its calls itself."""
    holds_others = (nn.Sequential, nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return cls.__module__.startswith("torch.nn.modules") and not issubclass(cls, holds_others + layers)


def own_class(cls: type) -> type:
    """The class that a module had before it was intercepted."""
    return (
        next(base for base in cls.__mro__ if not issubclass(base, Intercepted)) if issubclass(cls, Intercepted) else cls
    )


def _entered(state: AutoQuantizationState, outer: Frame, run: Run, place: Key) -> Frame:
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
    if trace.phase is Phase.TRACING or not state.contexts:  # in a thread of the model's own
        notice(module, state.path)
        return nn.Module.__call__(module, *args, **kwargs)
    if trace.phase is Phase.CONVERTED and torch.is_grad_enabled():
        _refuse_gradients(args, kwargs)
    run = Run(trace, state, module)
    outer = getattr(ACTIVE, "run", None)
    if outer is not None:
        outer.stop_following()  # what this model is given is known there alone
    handed_out = getattr(HANDED_OUT, "memory", True)
    ACTIVE.run, HANDED_OUT.memory = run, False
    try:
        if run.watch is not None:
            _watch_inputs(trace, run.watch, args, kwargs)
        resumed(run)
        with Interception(run):
            output = nn.Module.__call__(module, *args, **kwargs)
        if run.follower is None or not run.follower.exit():
            log = run.open()
            state.end(run)
            if log is not None:
                log.leave()
        output = state.module_after_hook(output, run)
        if run.follower is not None:
            run.follower.settle()  # somebody may have kept a tensor
        if run.queue is not None:
            run.queue.flush()
        run.check_weights()
    except BaseException:
        run.stop_following()
        raise
    finally:
        ACTIVE.run, HANDED_OUT.memory = outer, handed_out
    if run.watch is not None:
        trace.commit(run.watch.tally)
    return output


def resumed(run: Run) -> Follower | None:
    """Who knows the calls that come. If nobody does, and nothing is put off, it may be known what comes from here on."""
    if run.follower is None and run.log is not None and run.log.is_at_rest and (frames := saved(run.frame)) is not None:
        start = run.trace.paths.trails.starts.get(frames.key)
        if start is not None and start.is_promising:
            run.follower = Follower(run, start)
    return run.follower


def _watch_inputs(trace: Trace, watch: Watch, args: Any, kwargs: Any) -> None:
    leaves = pytree.tree_leaves((args, kwargs))
    for index, groups in trace.watched.get(-1, {}).items():
        if index < len(leaves):
            watch.observe(groups, leaves[index], partial("input {}".format, index))


def _refuse_gradients(args: Any, kwargs: Any) -> None:
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((args, kwargs))):
        raise InputError(
            "an input asks for gradients, and kernels have none",
            where="a converted model",
            advice="call it under torch.no_grad(), or train what prepare(..., qat=True) gives",
        )


BOUNDARIES.update(id(function.__code__) for function in (Intercepted.__call__, _start))
SKIPPED.add(id(Interception.__torch_function__.__code__))


def add_auto_observation(
    model: nn.Module, examples: Iterable[tuple[tuple[Any, ...], dict[str, Any]]], trace: Trace
) -> Recording:
    """Have the calls of a model intercepted, and trace it with examples: `first_call` captures, later calls observe.

    Each module that holds others gets an `AutoQuantizationState` as a child; the model itself is changed."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.ModuleList | nn.ModuleDict | torch.jit.ScriptModule):
            continue  # never called, or not Python
        if name and is_leaf_class(type(module)):
            module.__class__ = intercepted_class(type(module))
            object.__setattr__(module, "_auto_quant_path", name)
            continue  # its calls are those of the module around it
        state = AutoQuantizationState(trace, name, type(module).__name__)
        module.__class__ = intercepted_class(type(module))
        module.add_module(STATE, state)
    root: AutoQuantizationState = model._modules[STATE]  # type: ignore[assignment]
    root.contexts.append(trace.context)
    types = {name: own_class(type(module)) for name, module in model.named_modules()}
    recording = Recording(model, trace, types, Interception)
    for args, kwargs in examples:
        recording.run(model, args, kwargs)
    return recording


def add_auto_convert(model: nn.Module, trace: Trace, program: Any) -> nn.Module:
    """Have the intercepted calls of a model run quantized: what was prepared is put in their place."""
    trace.converted(program)
    for parameter in model.parameters():
        if parameter.is_leaf:
            parameter.requires_grad_(False)
        else:  # as the parameters of a copied ScriptModule are
            parameter.detach_()
    return model


__all__ = ["Intercepted", "Interception", "Run", "add_auto_convert", "add_auto_observation"]
