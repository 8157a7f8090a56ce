"""Lowering of a model's Python calls to ATen overloads."""

from __future__ import annotations

import inspect
import math
import operator
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx.proxy import Attribute
from torch.overrides import resolve_name

from quantc.capture.refused_trace import RefusedError
from quantc.capture.symbolic.proxies import ProxyValue, ValueTracer
from quantc.capture.symbolic.python_spellings import (
    CASTS,
    DUNDERS,
    OPERATORS,
    PYTHON_METHODS,
    SIZED_FACTORIES,
    SPREAD,
    ArgumentKind,
    is_builtin,
    packet,
    resolve,
)
from quantc.ir.dialect import aten

NUMBER_FUNCTIONS = (math.floor, math.ceil, math.sqrt, math.prod, int, float, bool, round)
SQUARE_ROOT = math.sqrt  # while a model is traced, math.sqrt is another
BITWISE = frozenset({"__and__", "__or__", "__xor__"})
"""Dunder names that ATen has too."""
TENSOR_TYPES = {f"torch.{name.capitalize()}Tensor": dtype for name, dtype in CASTS.items()} | {
    "torch.BFloat16Tensor": torch.bfloat16
}
QUERIES = frozenset({"size", "dim", "numel", "ndimension", "nelement", "item", "tolist"})


class AtenLowering(ValueTracer):
    """Selects the overload of each call; the tracer records it."""

    @abstractmethod
    def record(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: ArgumentKind) -> Any:
        """Record any other call; a plain number if that is its result."""

    @abstractmethod
    def shape_owner(self, x: Any) -> Any:
        """The tensor whose whole shape a traced value is; None if it is not one."""

    def kind_of(self, value: Any) -> ArgumentKind | None:
        """Kind of a traced value; None for plain Python values."""
        if isinstance(value, ProxyValue):
            return value.kind
        return ArgumentKind.ANYTHING if isinstance(value, fx.Proxy) else None

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) or self.kind_of(value) in (ArgumentKind.TENSOR, ArgumentKind.ANYTHING)

    def has_tensor(self, values: Iterable[Any]) -> bool:
        return any(self.is_tensor(value) for value in values)

    def lower_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Lower a Python function call to ATen."""
        if isinstance(function, OpOverload):
            return self.call(function, args, kwargs)
        if isinstance(function, OpOverloadPacket):
            return self._resolve_call(function, function.__name__, args, kwargs)
        if function is getattr:
            found = getattr(args[0], args[1])
            return self.opaque("call_function", getattr, args, {}) if isinstance(found, Attribute) else found
        if function is operator.getitem:
            return self.get_item(args[0], args[1])
        if function in OPERATORS:
            return self.lower_operator(function, args)
        if function in NUMBER_FUNCTIONS or getattr(function, "__module__", "") == "math":
            return self.plain(function, args, kwargs)
        name = getattr(function, "__name__", "")
        if function is torch.tensor and args and self.kind_of(args[0]) is ArgumentKind.NUMBER:
            return self._scalar_tensor(args[0], **kwargs)
        if name in SIZED_FACTORIES and is_builtin(function) and args and self._is_spread(args[0]):
            args = (list(args),)  # torch.zeros(2, 3) means torch.zeros([2, 3])
        if name in DUNDERS and name not in BITWISE:
            return DUNDERS[name](*args, **kwargs)
        if name == "__get__":
            return getattr(args[0], str(resolve_name(function)).split(".")[-2])
        op = packet(name) if is_builtin(function) else None
        if op is None:
            return self.opaque("call_function", function, args, kwargs)
        return self._resolve_call(op, name, args, kwargs, function)

    def lower_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Lower a method call `args[0].name(...)` to ATen."""
        x, rest = args[0], args[1:]
        if not self.is_tensor(x):
            if name == "numel" and (owner := self.shape_owner(x)) is not None:
                return self.call(aten.sym_numel.default, (owner,))
            raise RefusedError(f".{name}() is called on {x.node.name}, which is not a tensor while tracing")
        if name in QUERIES:
            return self._query(x, name, rest, kwargs)
        if name == "new_tensor":
            return self._new_tensor(x, *rest, **kwargs)
        if name == "type" and (rest or kwargs):
            return self._convert(x, tuple(map(_dtype, (*rest, *kwargs.values()))), {})
        if name in CASTS and not rest:
            return self.call(aten.to.dtype, (x, CASTS[name]))
        if name == "cpu":
            return x
        if name == "to":
            return self._convert(x, rest, kwargs)
        if name in PYTHON_METHODS:
            return getattr(torch.Tensor, name)(x, *rest, **kwargs)
        if (
            name in SPREAD
            and rest
            and not isinstance(rest[0], list | tuple | torch.dtype)
            and self.kind_of(rest[0]) is not ArgumentKind.SHAPE
        ):
            rest = (list(rest),)
        op = packet(name)
        if op is None:
            raise RefusedError(f".{name}() is no tensor operation that a graph can hold")
        return self._resolve_call(op, name, (x, *rest), kwargs)

    def _is_spread(self, first: Any) -> bool:
        return not isinstance(first, list | tuple) and self.kind_of(first) is not ArgumentKind.SHAPE

    def _scalar_tensor(self, number: ProxyValue, dtype: torch.dtype | None = None, **_: Any) -> Any:
        is_whole = isinstance(number.stand_in, int)
        return self.call(
            aten.scalar_tensor.default, (number,), {"dtype": dtype or (torch.int64 if is_whole else torch.float32)}
        )

    def _new_tensor(self, x: Any, data: Any, **kwargs: Any) -> Any:
        made = torch.tensor(data, **kwargs)
        fake = x.fake if isinstance(x, ProxyValue) else x
        if "dtype" in kwargs:
            return made
        if isinstance(fake, torch.Tensor):
            return made.to(fake.dtype)
        return self.call(aten.type_as.default, (made, x))

    def _convert(self, x: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`x.to(...)` with any mix of dtype, device and other tensor."""
        wanted = dict(kwargs)
        for value in rest:
            if isinstance(value, torch.dtype) or self.kind_of(value) is ArgumentKind.DTYPE:
                wanted["dtype"] = value
            elif isinstance(value, str | torch.device | int):
                wanted["device"] = value
            elif isinstance(value, ProxyValue) and isinstance(value.fake, torch.Tensor):
                wanted |= {"dtype": value.fake.dtype, "device": value.fake.device}
            else:
                return self._resolve_call(aten.to, "to", (x, *rest), kwargs)
        device, dtype = wanted.pop("device", None), wanted.pop("dtype", None)
        wanted = {name: value for name, value in wanted.items() if value not in (None, False, torch.preserve_format)}
        if wanted or (device is not None and torch.device(device).type != "cpu"):
            return self._resolve_call(aten.to, "to", (x, *rest), kwargs)
        return x if dtype is None else self.call(aten.to.dtype, (x, dtype))

    def _query(self, x: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "size":
            dim = rest[0] if rest else kwargs.get("dim")
            shape = self.tensor_attribute(x, "shape")
            return shape if dim is None else shape[dim]
        if name in ("dim", "ndimension"):
            return self.tensor_attribute(x, "ndim")
        if name in ("numel", "nelement"):
            fake = x.fake if isinstance(x, ProxyValue) else x
            with torch._C.DisableTorchFunction():
                count: Any = fake.numel() if isinstance(fake, torch.Tensor) else None
            if isinstance(count, torch.SymInt):
                return self.size(aten.sym_numel.default, (x,), count)
            return self.call(aten.sym_numel.default, (x,)) if count is None else count
        raise RefusedError(f".{name}() turns a tensor into a Python value, which a graph cannot hold")

    def lower_inplace(self, inplace: Any, plain: Any, left: ProxyValue, right: Any) -> Any:
        """`x += y`: an in-place write on a tensor; on a number it only rebinds the name."""
        return self.lower_operator(inplace if self.is_tensor(left) else plain, (left, right))

    def lower_operator(self, function: Any, args: tuple[Any, ...]) -> Any:
        """`a + b` and the like: tensor arithmetic only if an operand is a tensor."""
        if not self.has_tensor(args):
            return self.plain(function, args, {})
        if len(args) == 2 and not self.is_tensor(args[0]):
            number, x = args
            if function is operator.sub:
                return self.call(aten.rsub.Scalar, (x, number))
            if function is operator.truediv:
                return self.call(aten.mul.Tensor, (self.call(aten.reciprocal.default, (x,)), number))
            if function in (operator.add, operator.mul):
                args = (x, number)
        name = OPERATORS[function]
        op = packet(name)
        if op is None:
            return self.opaque("call_function", function, args, {})
        return self._resolve_call(op, name, args, {}, function)

    def _resolve_call(
        self, op: OpOverloadPacket, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], function: Any = None
    ) -> Any:
        binding = resolve(op, args, kwargs, self.kind_of)
        if binding is not None:
            return self.call(binding.overload, binding.args, binding.kwargs)
        if function is None:
            raise TypeError(f"no overload of {name} takes the arguments it is called with")
        return self.opaque("call_function", function, args, kwargs)

    def plain(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arithmetic on Python numbers and shapes; evaluated at once unless a size is dynamic."""
        if not any(isinstance(value, fx.Proxy) for value in args):
            return function(*args, **kwargs)
        called = torch._sym_sqrt if function is SQUARE_ROOT else function  # type: ignore[attr-defined]
        kinds = [self.kind_of(value) for value in args]
        kind = ArgumentKind.SHAPE if ArgumentKind.SHAPE in kinds else ArgumentKind.NUMBER
        result = self.record("call_function", called, args, kwargs, kind)
        if called.__module__ == "math" and not isinstance(result, ProxyValue):
            raise RefusedError(f"math.{called.__name__} of a dynamic size fixes the size")
        return result

    def opaque(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call without an ATen equivalent; it stays opaque, and is reported."""
        if isinstance(target, HigherOrderOperator) or inspect.isclass(target):
            name = getattr(target, "__name__", target)
            raise RefusedError(f"{name} cannot be traced symbolically; use method='export'")
        return self.record(op, target, args, kwargs, ArgumentKind.ANYTHING)


def _dtype(given: Any) -> Any:
    """Argument of `x.type(...)`: a dtype, or the name or class of a tensor type such as torch.FloatTensor."""
    if isinstance(given, torch.dtype):
        return given
    found = given if isinstance(given, str) else f"{given.__module__}.{given.__name__}"
    dtype = TENSOR_TYPES.get(found)
    if dtype is None:
        raise RefusedError(f".type({found}) is no dtype; use .to(dtype)")
    return dtype
