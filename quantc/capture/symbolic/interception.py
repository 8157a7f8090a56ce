"""Patches that are active during a trace, so that no call escapes it."""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch._tensor
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from quantc.capture.refused_trace import RefusedError
from quantc.capture.symbolic.proxies import ProxyValue, ValueTracer
from quantc.capture.symbolic.python_spellings import DUNDERS, FACTORIES, SIZED_FACTORIES, is_builtin, packet

QUERIES = frozenset({"detach", "is_floating_point", "size", "dim", "is_complex"})
"""Calls on real tensors that are answered at once."""
FOLLOWED = ("torch.nn.", "torch.functional", "torch.utils._pytree")
"""Parts of torch that are followed as if they were the model's own code."""
OPENED = (torch.nn.functional, torch.functional, torch._tensor)


@contextmanager
def intercept_calls(tracer: ValueTracer) -> Iterator[None]:
    """Context manager with all patches of a trace."""
    with ExitStack() as stack:
        for module in OPENED:
            for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
                # these functions, written in Python, would hand themselves over whole as soon as they see a traced
                # value; but it is the ATen calls in their bodies that the graph is made of
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, lambda *_: False))
        stack.enter_context(_buffers_watched(tracer))
        stack.enter_context(patch.object(builtins, "isinstance", _is_instance))
        stack.enter_context(patch.object(torch.autocast, "__enter__", _enter_autocast))
        stack.enter_context(patch.object(torch.nn.functional, "_list_with_default", _sizes_with_default))
        stack.enter_context(patch.object(torch, "_check", _check_of_sizes))
        for name in SIZED_FACTORIES:
            stack.enter_context(patch.object(torch, name, _taking_sizes(tracer, getattr(torch, name))))
        stack.enter_context(_Interceptor(tracer))
        yield


@contextmanager
def seeds_refused() -> Iterator[None]:
    """Refuse models that set the random seed: a graph has no op for it, and capture must not set it either."""

    def refuse(*_: Any) -> None:
        raise RefusedError("forward sets the seed of the random generator, which a graph cannot hold")

    with ExitStack() as stack:
        for module, name in ((torch, "manual_seed"), (torch, "seed"), (torch.random, "manual_seed")):
            stack.enter_context(patch.object(module, name, refuse))
        yield


_original_isinstance = isinstance
_check: Any = torch._check
_enter: Any = torch.autocast.__enter__


def _is_instance(value: Any, classes: Any) -> bool:
    """`isinstance` for traced values: a model that asks must get eager's answer.

    Only Python code asks here. A `__class__` of Tensor would reach C++ code too, which reads the memory.
    """
    if _original_isinstance(value, classes):
        return True
    return (
        type(value) is ProxyValue and _is_model_code(sys._getframe(1)) and _original_isinstance(value.stand_in, classes)
    )


def _is_model_code(frame: FrameType) -> bool:
    """Torch's own machinery asks in order to hand the value to C++, which takes no traced ones."""
    module = str(frame.f_globals.get("__name__", ""))
    return not module.startswith("torch.") or module.startswith(FOLLOWED)


def _check_of_sizes(condition: Any, message: Any = None) -> None:
    """`torch._check` on a dynamic size tells the trace what holds."""
    if type(condition) is not ProxyValue:
        _check(condition, message)
        return
    if not isinstance(condition.fake, torch.SymBool):
        raise RefusedError(f"torch._check asks about the value of {condition.node.name}, which depends on the data")
    with torch._C.DisableTorchFunction():
        _check(condition.fake, message)


def _sizes_with_default(sizes: Any, defaults: Any) -> Any:
    """Output sizes of a pool, those left out taken from the input. Torch's own asks for the rank first."""
    if not isinstance(sizes, list | tuple):
        return sizes
    return [defaults[index - len(sizes)] if size is None else size for index, size in enumerate(sizes)]


def _taking_sizes(tracer: ValueTracer, factory: Any) -> Any:
    """`torch.zeros` and the like refuse traced sizes, before any interceptor is asked, if these are spread out."""

    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if any(type(value) is ProxyValue for value in args):
            return tracer.lower_function(factory, args, kwargs)
        return factory(*args, **kwargs)

    return make


def _enter_autocast(region: Any) -> Any:
    if region._enabled:
        raise RefusedError("an autocast region chooses dtypes as it runs; only method='export' follows it")
    return _enter(region)


@contextmanager
def _buffers_watched(tracer: ValueTracer) -> Iterator[None]:
    """Catch assignments of traced values to buffers."""
    original: Any = nn.Module.__setattr__

    def assign(module: nn.Module, name: str, value: Any) -> None:
        if not isinstance(value, ProxyValue) or not tracer.assign_buffer(module, name, value):
            original(module, name, value)

    with patch.object(nn.Module, "__setattr__", assign):
        yield


class _Interceptor(TorchFunctionMode):
    """Catches torch calls that no traced value takes part in: tensors made in `forward`, and arithmetic on them."""

    def __init__(self, tracer: ValueTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch._C._set_grad_enabled:
            self.tracer.set_grad_enabled(func, args)
            return func(*args, **kwargs)
        flat = pytree.tree_leaves((args, kwargs))
        if any(isinstance(value, fx.Proxy) for value in flat) or (name in FACTORIES and is_builtin(func)):
            return self._lower(func, name, args, kwargs)
        has_tensor = any(isinstance(value, torch.Tensor) for value in flat)
        if not has_tensor or packet(name) is None or name in QUERIES:
            return func(*args, **kwargs)
        return self._lower(func, name, args, kwargs)

    def _lower(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if inspect.ismethoddescriptor(func) and name != "__get__" and args and name not in DUNDERS:
            return self.tracer.lower_method(name, args, kwargs)
        return self.tracer.lower_function(func, args, kwargs)
