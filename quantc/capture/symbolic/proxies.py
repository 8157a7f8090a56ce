"""Proxies: the values that flow through a model while it is traced.

A `ProxyValue` stands for one node. Where shapes are known (example inputs were given) questions about them are answered
with plain Python numbers, so shape arithmetic never enters the graph; where they are not, a size is a node of its own,
marked as a number, so that it cannot be taken for a tensor.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.fx.proxy import Attribute

from quantc.capture.refused_trace import RefusedError
from quantc.capture.symbolic.python_spellings import ArgumentKind
from quantc.capture.symbolic.traced_state import TensorState

TENSOR_FACTS = frozenset({"shape", "ndim", "dtype", "device"})
"""Attributes that only tensors have."""
MEMORY = frozenset({"data", "real", "imag"})
"""Assigning these gives a tensor other memory, or writes to a part of it."""
NUMBERS: tuple[tuple[type, Any], ...] = ((torch.SymFloat, 0.0), (float, 0.0), (torch.SymBool, False), (bool, False))
"""Placeholder values of non-integer numbers, by type."""
A_TENSOR = torch.empty(0)


class ValueTracer(fx.Tracer, ABC):
    """Interface of the tracer for proxies and interceptors."""

    kinds: dict[fx.Node, ArgumentKind]
    state: TensorState

    @abstractmethod
    def proxy(self, node: fx.Node) -> ProxyValue:
        """The value of a node."""

    @abstractmethod
    def call(self, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Record a call of an overload; its traced result."""

    @abstractmethod
    def size(self, target: OpOverload, args: tuple[Any, ...], size: Any) -> Any:
        """Traced value of a symbolic size, which `target` would read from a tensor."""

    @abstractmethod
    def constant_like(self, value: Any, x: ProxyValue) -> torch.Tensor:
        """A number as a tensor of the dtype of another."""

    @abstractmethod
    def tensor_attribute(self, x: Any, name: str) -> Any:
        """`x.name` of a tensor."""

    @abstractmethod
    def get_item(self, x: Any, index: Any) -> Any:
        """`x[index]`."""

    @abstractmethod
    def set_item(self, x: ProxyValue, index: Any, value: Any) -> None:
        """`x[index] = value`."""

    @abstractmethod
    def lower_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a function."""

    @abstractmethod
    def lower_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a method of a tensor."""

    @abstractmethod
    def lower_inplace(self, inplace: Any, plain: Any, left: ProxyValue, right: Any) -> Any:
        """`x += y`."""

    @abstractmethod
    def decide(self, x: fx.Proxy) -> bool:
        """Truth of a value, where shapes alone decide it."""

    @abstractmethod
    def assign_buffer(self, module: nn.Module, name: str, value: ProxyValue) -> bool:
        """`self.buffer = value` in `forward`; whether there is such a buffer."""

    @abstractmethod
    def set_grad_enabled(self, function: Any, args: tuple[Any, ...]) -> None:
        """A `no_grad` region begins or ends."""


class ProxyValue(fx.Proxy):
    """A traced value: a tensor, a number or a sequence that only exists at run time."""

    tracer: ValueTracer

    @property
    def kind(self) -> ArgumentKind:
        return self.tracer.kinds.get(self.node, ArgumentKind.ANYTHING)

    @property
    def fake(self) -> Any:
        """The fake tensor or symbolic number of the node; None if shapes are unknown."""
        return self.node.meta.get("val")

    @property
    def stand_in(self) -> Any:
        """A value of the type that the node has at run time."""
        if self.kind is ArgumentKind.TENSOR:
            tensor = self.tracer.state.real(self.node)
            return A_TENSOR if tensor is None else tensor
        if self.kind is ArgumentKind.NUMBER:
            return next((plain for kind, plain in NUMBERS if isinstance(self.fake, kind)), 0)
        return self.fake

    def __getattr__(self, name: str) -> Any:
        if self.kind is ArgumentKind.TENSOR or (self.kind is ArgumentKind.ANYTHING and name in TENSOR_FACTS):
            return self.tracer.tensor_attribute(self, name)
        return Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in MEMORY:
            raise RefusedError(
                f"`.{name}` of {self.node.name} is assigned, and what becomes of its memory is not followed"
            )
        super().__setattr__(name, value)

    def __getitem__(self, index: Any) -> Any:
        return self.tracer.get_item(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.set_item(self, index, value)

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.lower_inplace(operator.iadd, operator.add, self, other)

    def __isub__(self, other: Any) -> Any:
        return self.tracer.lower_inplace(operator.isub, operator.sub, self, other)

    def __imul__(self, other: Any) -> Any:
        return self.tracer.lower_inplace(operator.imul, operator.mul, self, other)

    def __itruediv__(self, other: Any) -> Any:
        return self.tracer.lower_inplace(operator.itruediv, operator.truediv, self, other)

    def __ifloordiv__(self, other: Any) -> Any:
        return self.tracer.lower_inplace(operator.ifloordiv, operator.floordiv, self, other)

    def __imod__(self, other: Any) -> Any:
        return self.tracer.lower_inplace(operator.imod, operator.mod, self, other)

    def __ipow__(self, other: Any) -> Any:
        return self.tracer.lower_inplace(operator.ipow, operator.pow, self, other)

    def __iand__(self, other: Any) -> Any:
        return self.tracer.lower_inplace(operator.iand, operator.and_, self, other)

    def __ior__(self, other: Any) -> Any:
        return self.tracer.lower_inplace(operator.ior, operator.or_, self, other)

    def __len__(self) -> int:
        fake = self.fake
        if isinstance(fake, torch.Tensor) and fake.dim() and type(fake.shape[0]) is int:
            return fake.shape[0]
        if isinstance(fake, tuple | list):
            return len(fake)
        raise RefusedError(f"the length of {self.node.name} is not known while tracing")

    def __bool__(self) -> bool:
        return self.tracer.decide(self)

    def __int__(self) -> int:
        raise self._no_number()

    def __float__(self) -> float:
        raise self._no_number()

    def __index__(self) -> int:
        raise self._no_number()

    def _no_number(self) -> RefusedError:
        cause = "a dynamic size" if self.kind is ArgumentKind.NUMBER else "the data"
        return RefusedError(f"{self.node.name} is used as a Python number, but it depends on {cause}")

    def __hash__(self) -> int:
        return id(self)
