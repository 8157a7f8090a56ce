"""Capture by symbolic tracing (torch.fx): no example inputs needed, modules can be kept whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from quantc.capture.assemble import SymbolNames, assemble, inputs_of
from quantc.capture.attributes import shape_of
from quantc.capture.dimensions import SMALLEST, DynamicDim, dynamic_dims, leaf_names, upper_bound, widened
from quantc.capture.failures import SHAPES_ADVICE
from quantc.capture.proxies import Value
from quantc.capture.sources import forward_line
from quantc.capture.spellings import Kind
from quantc.capture.tracer import AtenTracer, LeafSelector
from quantc.capture.twins import Tensors, cloned_inputs, twin
from quantc.errors import CaptureError, suggest
from quantc.inline import GRADIENTS_LOST
from quantc.program import Program
from quantc.signature import Input, Signature


def leaf_selector(model: nn.Module, leaf: Iterable[str | type[nn.Module]]) -> LeafSelector:
    """Check that each leaf names or types a module of the model: a misspelt one must not be ignored."""
    wanted = (leaf,) if isinstance(leaf, str | type) else tuple(leaf)
    names = frozenset(item for item in wanted if isinstance(item, str))
    classes = tuple(item for item in wanted if isinstance(item, type))
    for item in wanted:
        if not isinstance(item, str | type):
            raise CaptureError(
                f"leaf holds a {type(item).__name__}",
                where=f"leaf={wanted!r}"[:200],
                advice="give the names of modules, as in model.named_modules(), or their classes",
            )
    known = {name: module for name, module in model.named_modules() if name}
    for name in sorted(names):
        if name not in known:
            raise CaptureError(
                f"leaf {name!r} names no module of {type(model).__name__}",
                where=f"leaf={name!r}",
                advice=suggest(name, known, noun="modules"),
            )
    for kind in classes:
        if not any(isinstance(module, kind) for module in known.values()):
            present = {type(module).__name__ for module in known.values()}
            raise CaptureError(
                f"leaf {kind.__name__}: {type(model).__name__} has no module of that class",
                where=f"leaf={kind.__name__}",
                advice=suggest(kind.__name__, present, noun="classes"),
            )
    # a scripted module has no Python code to follow, so it is whole by nature
    scripted = {name for name, module in known.items() if isinstance(module, torch.jit.ScriptModule)}
    return LeafSelector(names | scripted, classes)


def trace(
    model: nn.Module,
    args: tuple[Any, ...] | None,
    kwargs: dict[str, Any],
    *,
    dynamic_shapes: Any,
    leaves: LeafSelector,
) -> Program:
    """Trace `model` symbolically. Without example inputs no shapes are known and none are fixed."""
    marks = dynamic_dims(dynamic_shapes, args, kwargs, model) if args is not None else {}
    if args is not None:
        args, kwargs = widened(marks, args, kwargs)
    shape_env = ShapeEnv(specialize_zero_one=False, duck_shape=False) if marks else None
    fakes = None if args is None else FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    tracer = AtenTracer(leaves, fakes, is_training=model.training)
    if leaves and args is not None and fakes is not None and shape_env is None:
        outputs = _leaf_outputs(model, args, kwargs, leaves)
        tracer.leaf_values = pytree.tree_map_only(torch.Tensor, fakes.from_tensor, outputs)
    plan = _Inputs(model, args, kwargs, fakes, marks)
    graph = tracer.trace_into(model, plan.build)
    plan.check_still_dynamic()
    names = SymbolNames(plan.given_symbols())

    def signature(names: SymbolNames) -> Signature:
        placeholders = list(graph.find_nodes(op="placeholder"))
        if args is None:
            inputs = tuple(Input(node.name) for node in placeholders)
        else:
            inputs = inputs_of(placeholders, plan.leaves, names)
        return Signature(inputs, plan.in_spec, plan.out_spec, plan.ranges(names))

    program = assemble(
        graph,
        model,
        signature,
        name=type(model).__name__,
        method="fx",
        is_training=model.training,
        names=names,
        constants=tracer.state.constants,
        origin_of=tracer.origins.get,
        mode_source=model,
    )
    if tracer.changes_grad_mode and not model.training:
        program.note_inference_only(GRADIENTS_LOST)
    return program


class _Inputs:
    """The placeholders of a trace: one for each flat input, with its fake tensor where there are examples."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...] | None,
        kwargs: dict[str, Any],
        fakes: FakeTensorMode | None,
        marks: dict[tuple[int, int], DynamicDim],
    ) -> None:
        self.model = model
        self.marks = marks
        self.fakes = fakes
        self.out_spec = pytree.tree_structure(None)
        if args is None:
            self.names = _required_parameters(model)
            self.in_spec = pytree.tree_structure(((0,) * len(self.names), {}))
            self.leaves: list[Any] = [None] * len(self.names)
        else:
            flat, self.in_spec = pytree.tree_flatten((args, kwargs))
            self.names = leaf_names(model, args, kwargs)
            self.leaves = [self._faked(index, leaf) for index, leaf in enumerate(flat)]
            self._state_known()

    def _faked(self, index: int, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or self.fakes is None:
            return leaf
        if self.fakes.shape_env is None:
            return self.fakes.from_tensor(leaf.detach())
        is_dynamic = [(index, dim) in self.marks for dim in range(leaf.dim())]
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC if mark else DimDynamic.STATIC for mark in is_dynamic],
            constraint_sizes=[None] * leaf.dim(),
        )
        return self.fakes.from_tensor(leaf.detach(), symbolic_context=context, source=ConstantSource(self.names[index]))

    def _state_known(self) -> None:
        """Tell the trace what the user said: ranges, equal sizes, and sizes computed from others."""
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
            tracer.kinds[proxy.node] = Kind.TENSOR
            if shapes_known:
                proxy.node.meta["val"] = leaf
            values.append(proxy)
        for value in values:
            if isinstance(value, Value) and isinstance(value.fake, torch.Tensor):
                shape_of(tracer, value)  # reads the dynamic sizes, once each, before the model runs
        tracer.origins.rows.clear()

        def run(*flat: Any) -> Any:
            args, kwargs = pytree.tree_unflatten(list(flat), self.in_spec)
            result, self.out_spec = pytree.tree_flatten(self.model(*args, **kwargs))
            tracer.store_assigned()
            return tuple(result)

        return run, values

    def check_still_dynamic(self) -> None:
        for (leaf, dim), mark in self.marks.items():
            needed = self._needed(self.leaves[leaf].shape[dim], mark)
            if needed and mark.is_required:
                raise CaptureError(
                    f"dimension {dim} of input {self.names[leaf]!r} ({mark.name or 'dynamic'}) {needed}",
                    where=f"input {self.names[leaf]!r}, dimension {dim}; {forward_line(self.model)}",
                    advice=SHAPES_ADVICE,
                )

    def _needed(self, size: Any, mark: DynamicDim) -> str:
        """What the model asks of a size that the user did not grant; empty if nothing."""
        expression = size.node.expr if isinstance(size, torch.SymInt) else None
        if expression is None or expression.is_number:
            return f"is fixed to {size} by the model"
        low, high = self._limits(expression)
        if low > max(mark.low, SMALLEST):
            return f"has to be at least {low} for the model, but may be {mark.low} by dynamic_shapes"
        if high is not None and (mark.high is None or high < mark.high):
            return f"has to be at most {high} for the model, but may be larger by dynamic_shapes"
        return ""

    def _limits(self, expression: Any) -> tuple[int, int | None]:
        """What the trace found that a size has to be."""
        if self.fakes is None or self.fakes.shape_env is None or not expression.is_Symbol:
            return 0, None
        limits = self.fakes.shape_env.var_to_range[expression]
        return int(limits.lower), upper_bound(limits.upper)

    def given_symbols(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for (leaf, dim), mark in self.marks.items():
            size = self.leaves[leaf].shape[dim]
            if mark.name is not None and mark.name.isidentifier() and isinstance(size, torch.SymInt):
                found.setdefault(str(size.node.expr), mark.name)
        return found

    def ranges(self, names: SymbolNames) -> dict[str, tuple[int, int | None]]:
        """The limits of each symbol: the user's, and for hints without a name those that the trace found."""
        found: dict[str, tuple[int, int | None]] = {}
        for (leaf, dim), mark in self.marks.items():
            size = self.leaves[leaf].shape[dim]
            symbol = names.used.get(str(size.node.expr)) if isinstance(size, torch.SymInt) else None
            if symbol is None or symbol in found:
                continue
            found[symbol] = (mark.low, mark.high)
            if mark.name is None:
                low, high = self._limits(size.node.expr)
                found[symbol] = (max(mark.low, low), mark.high if high is None else high)
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


def _leaf_outputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: LeafSelector
) -> dict[str, list[Any]]:
    """What each leaf returns on the example inputs, so shapes are known behind code that cannot be traced."""
    runnable = twin(model, Tensors.COPIED)
    found: dict[str, list[Any]] = {}
    names = {module: name for name, module in runnable.named_modules() if name and leaves.selects(module, name)}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if module in names:
            found.setdefault(names[module], []).append(output)

    # a hook on all modules, because scripted ones take none of their own
    handle = register_module_forward_hook(note)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            given, named = cloned_inputs((args, kwargs))
            runnable(*given, **named)
    finally:
        handle.remove()
    return found
