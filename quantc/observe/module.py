"""Observers as modules, for graphs that are run outside quantc."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from quantc.errors import DataError
from quantc.ir.program import Program, attribute
from quantc.spec.observation import Observation


class ObserverModule(nn.Module):
    """The identity, which updates an observation while `enabled`.

    All observers of a group share one observation. It is updated with real data only: while torch exports, compiles or
    traces, an observer is the identity and nothing else.
    """

    _is_impure = True  # fx must not eliminate the call, even if its result has no users

    def __init__(self, group: str, observation: Observation, where: str = "") -> None:
        super().__init__()
        self.group = group
        self.observation = observation
        self.where = where
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        if self.enabled and not torch.compiler.is_compiling() and _has_numbers(x):
            self._observe(x)
        return x

    @torch.no_grad()
    def _observe(self, x: Tensor) -> None:
        before = self.observation.non_finite
        self.observation.update(x, where=self.where)
        if self.observation.non_finite > before:
            raise DataError(
                f"{self.observation.non_finite - before} of {x.numel()} values are NaN or infinite",
                where=self.where,
                advice="look for the op that makes them, correct the model or the data, and prepare again",
            )

    def extra_repr(self) -> str:
        state = "" if self.enabled else ", off"
        return f"{self.group}, {self.observation.statistics}, {self.observation.seen} seen{state}"


def _has_numbers(x: object) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, FakeTensor) and not x.is_meta


def observers_in(module: nn.Module) -> Iterator[ObserverModule]:
    """The observers of a module, each once."""
    return (child for child in module.modules() if isinstance(child, ObserverModule))


@contextmanager
def observers_off(module: nn.Module) -> Iterator[None]:
    """Disable the observers of a module in this context."""
    enabled = [observer for observer in observers_in(module) if observer.enabled]
    for observer in enabled:
        observer.enabled = False
    try:
        yield
    finally:
        for observer in enabled:
            observer.enabled = True


def observer_nodes(program: Program) -> dict[fx.Node, ObserverModule]:
    """The nodes that call observers."""
    found: dict[fx.Node, ObserverModule] = {}
    for _, graph in program.graphs():
        owner = program.owner(graph)
        for node in graph.find_nodes(op="call_module"):
            module = attribute(owner, str(node.target))
            if isinstance(module, ObserverModule):
                found[node] = module
    return found


def behind(node: Any, observers: Container[fx.Node]) -> Any:
    """The operand with observers skipped."""
    while node in observers:
        node = node.args[0]
    return node
