"""State isolation of batches: restores everything a program writes, and seeds random numbers by batch.

So a batch gives the same statistics whatever came before it, in this process or in another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from quantc.ir.alias_analysis import Aliasing
from quantc.ir.program import Program, attribute
from quantc.observe.module import ObserverModule


class Isolation:
    """Snapshot of the state that a program may modify."""

    def __init__(self, program: Program) -> None:
        tensors = {id(tensor): tensor for tensor in _find_written(program)}
        self._saved = [(tensor, tensor.detach().clone(), tensor._version) for tensor in tensors.values()]
        self._random = any(_is_random(node) for node in program.nodes())
        self._inputs = _written_inputs(program)

    @contextmanager
    def batch(self, index: int, leaves: Sequence[Any]) -> Iterator[list[Any]]:
        """Context manager for one batch; yields the inputs to run it on."""
        inputs = [
            leaf.clone() if place in self._inputs and isinstance(leaf, Tensor) else leaf
            for place, leaf in enumerate(leaves)
        ]
        try:
            if not self._random:
                yield inputs
                return
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(index)
                yield inputs
        finally:
            self._put_back()

    def _put_back(self) -> None:
        with torch.no_grad():
            for place, (tensor, before, version) in enumerate(self._saved):
                # the version says whether anything was written, so sound programs copy nothing
                if tensor._version != version:
                    tensor.copy_(before)
                    self._saved[place] = (tensor, before, tensor._version)


def _find_written(program: Program) -> Iterator[Tensor]:
    """The constants that the program may write to: by an op, or inside a module of which nothing is known."""
    for _, graph in program.graphs():
        owner = program.owner(graph)
        for module in _modules(graph, owner):
            yield from (*module.parameters(), *module.buffers())
        aliasing = Aliasing(graph, owner)
        if not aliasing.has_writes:
            continue
        for node in graph.find_nodes(op="get_attr"):
            tensor = program.tensor(node)
            if tensor is not None and aliasing.is_written(node):
                yield tensor


def _modules(graph: fx.Graph, owner: nn.Module) -> Iterable[nn.Module]:
    modules = (attribute(owner, str(node.target)) for node in graph.find_nodes(op="call_module"))
    return (module for module in modules if isinstance(module, nn.Module) and not isinstance(module, ObserverModule))


def _written_inputs(program: Program) -> frozenset[int]:
    aliasing = Aliasing(program.graph, program.owner(program.graph))
    inputs = program.graph.find_nodes(op="placeholder") if aliasing.has_writes else ()
    return frozenset(place for place, node in enumerate(inputs) if aliasing.is_written(node))


def _is_random(node: fx.Node) -> bool:
    if node.op in ("call_module", "call_method"):
        return True
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
