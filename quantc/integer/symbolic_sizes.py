"""Symbolic sizes: conversion between size expressions and torch's symbols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree

from quantc.ir.program import Program
from quantc.ir.size_expressions import evaluate
from quantc.ir.types import TensorType, tensor_type

FIRST_SIZE = 100
"""Symbols stand for sizes beyond this, all different and prime: none is taken for another, or for a number."""


class Sizes:
    """Symbols of one program, and fake tensors with such sizes.

    If all sizes are static, meta tensors are used: they are much faster than torch's fake tensors.
    """

    def __init__(self, program: Program) -> None:
        kinds = (tensor_type(node) for node in program.nodes())
        is_dynamic = any(kind is not None and not kind.is_static for kind in kinds)
        self._environment = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self._fakes = FakeTensorMode(shape_env=self._environment) if is_dynamic else None
        self._symbols: dict[str, torch.SymInt] = {}
        self.names: dict[Any, Any] = {}
        """The program's names of torch's symbols."""
        self._last = FIRST_SIZE

    def tensor(self, kind: TensorType) -> torch.Tensor:
        """Fake or meta tensor of a type."""
        if self._fakes is None:
            return torch.empty([int(size) for size in kind.shape], dtype=kind.dtype, device="meta")
        shape = [size if isinstance(size, int) else self._value(size) for size in kind.shape]
        with self._fakes:
            return torch.empty(shape, dtype=kind.dtype)

    def run(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Result of an op on such tensors."""
        if self._fakes is None:
            # results computed from numbers alone are real tensors
            return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), target(*args, **kwargs))
        with self._fakes, enable_python_dispatcher():
            return target(*args, **kwargs)

    def text(self, size: Any) -> int | str:
        """A size as in types: a number, or an expression over the program's symbols."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        return int(expression) if expression.is_number else str(expression.xreplace(self.names))

    def _value(self, text: str) -> Any:
        """Value of a size expression."""
        names = {name: self._symbol(name) for name in _names(text)}
        found: Any = evaluate(text, names)  # type: ignore[arg-type] # symbols calculate as numbers do
        return self._symbol(text) if found is None else found

    def _symbol(self, text: str) -> torch.SymInt:
        """The symbol for a name, or for an expression that we cannot calculate."""
        if text not in self._symbols:
            from torch._dynamo.source import ConstantSource  # imports all of torch._dynamo

            self._last = int(sympy.nextprime(self._last))
            source = ConstantSource(text)
            symbol = self._environment.create_symbol(self._last, source, DimDynamic.DYNAMIC)
            number: Any = self._environment.create_symintnode(symbol, hint=self._last, source=source)
            self._symbols[text] = number
            self.names[symbol] = sympy.Symbol(text if text.isidentifier() else f"({text})", integer=True)
        return self._symbols[text]


def _names(text: str) -> set[str]:
    word, found = "", set()
    for char in f"{text} ":
        if char.isalnum() or char == "_":
            word += char
        else:
            found |= {word} if word.isidentifier() else set()
            word = ""
    return found
