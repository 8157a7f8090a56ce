"""ONNX graph builder: nodes, initializers, unique names."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from quantc.targets.onnx.dtypes import initializer, onnx_module, onnx_type
from quantc.text.digests import raw_bytes


class GraphBuilder:
    """Collects nodes and initializers in order of creation. Names are unique."""

    def __init__(self) -> None:
        self._helper = onnx_module().helper
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.scope = ""
        """Base name of new values: the node being written."""
        self._taken: dict[str, int] = {}
        self._constants: dict[tuple[Any, ...], str] = {}

    def name(self, hint: str) -> str:
        """An unused name derived from `hint`."""
        while True:
            count = self._taken.get(hint, 0)
            self._taken[hint] = count + 1
            found = hint if not count else f"{hint}.{count}"
            if found not in self._taken or not count:
                self._taken.setdefault(found, 1)
                return found

    def many(self, op: str, inputs: Sequence[str], outputs: int, **attributes: Any) -> tuple[str, ...]:
        """Add a node with several results."""
        names = tuple(self.name(self.scope or op) for _ in range(outputs))
        given = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(self._helper.make_node(op, list(inputs), list(names), name=names[0], **given))
        return names

    def emit(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one result. Attributes that are None are omitted; an empty name is an omitted input."""
        return self.many(op, inputs, 1, **attributes)[0]

    def constant(self, value: Tensor, hint: str = "constant", kind: int | None = None) -> str:
        """Name of an initializer; equal contents are deduplicated, so a layer that is called twice is stored once."""
        content = raw_bytes(value)
        key = (value.dtype, kind, tuple(value.shape), sha256(content.data).digest())
        if key not in self._constants:
            self._constants[key] = self.name(hint)
            self.initializers.append(initializer(self._constants[key], value, kind))
        return self._constants[key]

    def numbers(self, values: Sequence[int]) -> str:
        """An int64 vector: axes, sizes, steps."""
        return self.constant(torch.tensor(list(values), dtype=torch.int64), "numbers")

    def scalar(self, value: float | bool, dtype: torch.dtype) -> str:
        """A number as a rank-0 tensor."""
        return self.constant(torch.tensor(value, dtype=dtype), "number")

    def cast(self, value: str, dtype: torch.dtype) -> str:
        return self.emit("Cast", value, to=onnx_type(dtype))
