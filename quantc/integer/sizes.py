"""Sizes that are known by name only: as symbols torch can calculate with, and as text again."""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from quantc.symbols import evaluate
from quantc.types import TensorType

FIRST_SIZE = 100
"""Symbols stand for sizes beyond this, all different and prime: none is taken for another, or for a number."""


class Sizes:
    """The symbols of one program, and tensors without numbers that have such sizes."""

    def __init__(self) -> None:
        self.environment = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.fakes = FakeTensorMode(shape_env=self.environment)
        self._symbols: dict[str, torch.SymInt] = {}
        self.names: dict[Any, Any] = {}
        """What the program calls each of torch's symbols."""
        self._last = FIRST_SIZE

    def tensor(self, kind: TensorType) -> torch.Tensor:
        """A tensor of a type, without numbers."""
        shape = [size if isinstance(size, int) else self._value(size) for size in kind.shape]
        with self.fakes:
            return torch.empty(shape, dtype=kind.dtype)

    def text(self, size: Any) -> int | str:
        """A size as types have it: a number, or an expression over the program's symbols."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        return int(expression) if expression.is_number else str(expression.xreplace(self.names))

    def _value(self, text: str) -> Any:
        """The size that an expression comes to."""
        names = {name: self._symbol(name) for name in _names(text)}
        found: Any = evaluate(text, names)  # type: ignore[arg-type] # symbols calculate as numbers do
        return self._symbol(text) if found is None else found

    def _symbol(self, text: str) -> torch.SymInt:
        """The symbol for a name, or for an expression that we cannot calculate."""
        if text not in self._symbols:
            self._last = int(sympy.nextprime(self._last))
            source = ConstantSource(text)
            symbol = self.environment.create_symbol(self._last, source, DimDynamic.DYNAMIC)
            number: Any = self.environment.create_symintnode(symbol, hint=self._last, source=source)
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
