"""Inputs of a symbolic trace: placeholders, and fake tensors for the examples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from quantc.capture.assemble import SymbolNames
from quantc.capture.containers import refuse_hidden_tensors, refuse_unknown_containers
from quantc.capture.export.dimensions import SMALLEST, DynamicDim, leaf_names, upper_bound
from quantc.capture.failures import SHAPES_ADVICE
from quantc.capture.source_lines import forward_line
from quantc.capture.symbolic.proxies import ProxyValue
from quantc.capture.symbolic.python_spellings import ArgumentKind
from quantc.capture.symbolic.tensor_attributes import shape_of
from quantc.capture.symbolic.tracer import AtenTracer
from quantc.errors import CaptureError


@dataclass(frozen=True)
class Narrowing:
    """A limit that a trace assumed for a dynamic dimension, and sizes that violate it."""

    leaf: int
    dim: int
    beyond: dict[tuple[int, int], int]
    reason: str


class TracedInputs:
    """Placeholders of a trace: one per flat input, with its fake tensor where there are examples."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...] | None,
        kwargs: dict[str, Any],
        fakes: FakeTensorMode | None,
        marks: dict[tuple[int, int], DynamicDim],
    ) -> None:
        self.model = model
        self.marks = dict(marks)
        self.fakes = fakes
        self.out_spec = pytree.tree_structure(None)
        if args is None:
            self.names = _required_parameters(model)
            self.in_spec = pytree.tree_structure(((0,) * len(self.names), {}))
            self.leaves: list[Any] = [None] * len(self.names)
        else:
            flat, self.in_spec = pytree.tree_flatten((args, kwargs))
            self.names = leaf_names(model, args, kwargs)
            for name, leaf in zip(self.names, flat, strict=True):
                refuse_hidden_tensors(name, leaf)
            self.leaves = [self._fake(index, leaf) for index, leaf in enumerate(flat)]
            self._state_known()

    def _fake(self, index: int, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or self.fakes is None:
            return leaf
        if self.fakes.shape_env is None:
            return self.fakes.from_tensor(leaf.detach())
        from torch._dynamo.source import ConstantSource  # imports all of torch._dynamo

        is_dynamic = [(index, dim) in self.marks for dim in range(leaf.dim())]
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC if mark else DimDynamic.STATIC for mark in is_dynamic],
            constraint_sizes=[None] * leaf.dim(),
        )
        return self.fakes.from_tensor(leaf.detach(), symbolic_context=context, source=ConstantSource(self.names[index]))

    def _state_known(self) -> None:
        """Pass the user's constraints to the trace: ranges, equal sizes, and sizes computed from others."""
        first: dict[str, Any] = {}
        for (leaf, dim), mark in self.marks.items():
            size = self.leaves[leaf].shape[dim]
            if mark.low > SMALLEST:
                torch._check(size >= mark.low)  # type: ignore[no-untyped-call]
            if mark.high is not None:
                torch._check(size <= mark.high)  # type: ignore[no-untyped-call]
            if mark.name is None:
                continue
            other = first.setdefault(mark.name, size)
            if other is not size:
                torch._check(other == size)  # type: ignore[no-untyped-call]
        for (leaf, dim), mark in self.marks.items():
            if mark.relation is not None and mark.root in first:
                relation = self.leaves[leaf].shape[dim] == mark.relation(first[mark.root])
                torch._check(relation)  # type: ignore[no-untyped-call]

    def build(self, tracer: AtenTracer) -> tuple[Callable[..., Any], list[Any]]:
        shapes_known = self.fakes is not None
        values: list[Any] = []
        for name, leaf in zip(self.names, self.leaves, strict=True):
            proxy = tracer.create_proxy("placeholder", name, (), {})
            if shapes_known and not isinstance(leaf, torch.Tensor):
                values.append(leaf)
                continue
            tracer.kinds[proxy.node] = ArgumentKind.TENSOR
            if shapes_known:
                proxy.node.meta["val"] = leaf
            values.append(proxy)
        for value in values:
            if isinstance(value, ProxyValue) and isinstance(value.fake, torch.Tensor):
                shape_of(tracer, value)  # reads the dynamic sizes, once each, before the model runs
        tracer.origins.rows.clear()

        def run(*flat: Any) -> Any:
            args, kwargs = pytree.tree_unflatten(list(flat), self.in_spec)
            result, self.out_spec = pytree.tree_flatten(self.model(*args, **kwargs))
            refuse_unknown_containers(result)
            tracer.store_assigned()
            return tuple(result)

        return run, values

    def check_still_dynamic(self) -> None:
        for (leaf, dim), mark in self.marks.items():
            size = self.leaves[leaf].shape[dim]
            if mark.is_required and (not isinstance(size, torch.SymInt) or size.node.expr.is_number):
                raise self._refusal(leaf, dim, f"is fixed to {size} by the model")

    def narrowings(self) -> Iterator[Narrowing]:
        """Size limits that the trace assumed and the user did not state."""
        for (leaf, dim), mark in self.marks.items():
            symbol = self._symbol(leaf, dim)
            low, high = self._assumed_range(symbol)
            if symbol is not None and low > max(mark.low, SMALLEST):
                reason = f"has to be at least {low} for the model, but may be {mark.low} by dynamic_shapes"
                yield Narrowing(leaf, dim, self._places(symbol, low - 1), reason)
            if symbol is not None and high is not None and (mark.high is None or high < mark.high):
                reason = f"has to be at most {high} for the model, but may be larger by dynamic_shapes"
                yield Narrowing(leaf, dim, self._places(symbol, high + 1), reason)

    def accept(self, narrowing: Narrowing) -> None:
        """Handle an assumption that matters: refuse it, or, for a hint that leaves the range to the trace, make it the range."""
        mark = self.marks[narrowing.leaf, narrowing.dim]
        if mark.is_required:
            raise self._refusal(narrowing.leaf, narrowing.dim, narrowing.reason)
        low, high = self._assumed_range(self._symbol(narrowing.leaf, narrowing.dim))
        self.marks[narrowing.leaf, narrowing.dim] = replace(mark, low=max(low, mark.low), high=high or mark.high)

    def _refusal(self, leaf: int, dim: int, reason: str) -> CaptureError:
        name = self.marks[leaf, dim].name or "dynamic"
        return CaptureError(
            f"dimension {dim} of input {self.names[leaf]!r} ({name}) {reason}",
            where=f"input {self.names[leaf]!r}, dimension {dim}; {forward_line(self.model)}",
            advice=SHAPES_ADVICE,
        )

    def _symbol(self, leaf: int, dim: int) -> Any:
        size = self.leaves[leaf].shape[dim]
        expression = size.node.expr if isinstance(size, torch.SymInt) else None
        return expression if expression is not None and expression.is_Symbol else None

    def _assumed_range(self, symbol: Any) -> tuple[int, int | None]:
        if symbol is None or self.fakes is None or self.fakes.shape_env is None:
            return 0, None
        limits = self.fakes.shape_env.var_to_range[symbol]
        return int(limits.lower), upper_bound(limits.upper)

    def _places(self, symbol: Any, value: int) -> dict[tuple[int, int], int]:
        """The size of every dimension that depends on a symbol, were it `value`."""
        found: dict[tuple[int, int], int] = {}
        for leaf, dim in self.marks:
            size = self.leaves[leaf].shape[dim]
            if isinstance(size, torch.SymInt) and symbol in size.node.expr.free_symbols:
                found[leaf, dim] = int(size.node.expr.subs(symbol, value))
        return found

    def given_symbols(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for (leaf, dim), mark in self.marks.items():
            size = self.leaves[leaf].shape[dim]
            if mark.name is not None and mark.name.isidentifier() and isinstance(size, torch.SymInt):
                found.setdefault(str(size.node.expr), mark.name)
        return found

    def ranges(self, names: SymbolNames) -> dict[str, tuple[int, int | None]]:
        """Range of each symbol."""
        found: dict[str, tuple[int, int | None]] = {}
        for (leaf, dim), mark in self.marks.items():
            symbol = names.used.get(str(self._symbol(leaf, dim)))
            if symbol is not None:
                found.setdefault(symbol, (mark.low, mark.high))
        return found


def _required_parameters(model: nn.Module) -> list[str]:
    """Without examples the inputs are the parameters of `forward` that have no default."""
    names = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise CaptureError(
                f"forward takes *{parameter.name}, so the number of inputs is not known",
                where=forward_line(model),
                advice="give example_inputs to capture",
            )
        if parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return names
