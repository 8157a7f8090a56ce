"""What is patched while a model is traced, so that nothing it does goes unseen."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch._tensor
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from quantc.capture.proxies import Value
from quantc.capture.spellings import DUNDERS, FACTORIES, SIZED_FACTORIES, Kind, is_builtin, packet

if TYPE_CHECKING:
    from quantc.capture.tracer import AtenTracer

QUERIES = frozenset({"detach", "is_floating_point", "size", "dim", "is_complex"})
"""Calls on real tensors that are answered at once."""
OPENED = (torch.nn.functional, torch.functional, torch._tensor)


@contextmanager
def intercepted(tracer: AtenTracer) -> Iterator[None]:
    """Everything a trace needs, undone afterwards."""
    with ExitStack() as stack:
        for module in OPENED:
            for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
                # these functions, written in Python, would hand themselves over whole as soon as they see a traced
                # value; but it is the ATen calls in their bodies that the graph is made of
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, lambda *_: False))
        stack.enter_context(_buffers_watched(tracer))
        stack.enter_context(_Interceptor(tracer))
        yield


@contextmanager
def _buffers_watched(tracer: AtenTracer) -> Iterator[None]:
    """Catch assignments of traced values to buffers."""
    original: Any = nn.Module.__setattr__

    def assign(module: nn.Module, name: str, value: Any) -> None:
        if not isinstance(value, Value) or not tracer.assign_buffer(module, name, value):
            original(module, name, value)

    with patch.object(nn.Module, "__setattr__", assign):
        yield


class _Interceptor(TorchFunctionMode):
    """Catches torch calls that no traced value takes part in: tensors made in `forward`, and arithmetic on them."""

    def __init__(self, tracer: AtenTracer) -> None:
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
        if name in SIZED_FACTORIES and args:
            first = args[0]
            is_list = isinstance(first, list | tuple) or self.tracer.kind_of(first) is Kind.SHAPE
            args = args if is_list else (list(args),)  # torch.zeros(2, 3) means torch.zeros([2, 3])
        if inspect.ismethoddescriptor(func) and name != "__get__" and args and name not in DUNDERS:
            return self.tracer.lower_method(name, args, kwargs)
        return self.tracer.lower_function(func, args, kwargs)
