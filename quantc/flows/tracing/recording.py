"""Tracing: several runs of a model whose calls are written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantc.capture.runtime.call_tracing import tensors_in
from quantc.capture.runtime.tracing import Recorder, SeenAt, SeenCall
from quantc.capture.runtime.write_detection import Stamp, is_wrapped
from quantc.errors import CaptureError
from quantc.flows.tracing.call_sites import BOUNDARIES, FIRST_CHILD, Context, Key, OpSite, source_of_call
from quantc.flows.tracing.functions import is_product, name_of
from quantc.flows.tracing.fused_ops import CallFacts, Derived, Path
from quantc.flows.tracing.quantization_state import AutoQuantizationState
from quantc.flows.tracing.run import ACTIVE, STATE, ModuleState, Run
from quantc.flows.tracing.trace import Trace
from quantc.flows.tracing.weights import digest
from quantc.ir.program import Program
from quantc.ir.sites import Origin

RECORDINGS: set[Recording] = set()
"""The running recordings of all threads."""


def notice(module: nn.Module, path: str) -> None:
    """A module is called where no call of the model is: if one is being recorded, by a thread that it has started."""
    for recording in list(RECORDINGS):
        if id(module) in recording.modules:
            recording.elsewhere.add(path)


class Recording:
    """Several runs of a model whose calls are written down."""

    def __init__(
        self,
        model: nn.Module,
        trace: Trace,
        types: Mapping[str, type],
        interception: Callable[[Run], AbstractContextManager[Any]],
    ) -> None:
        self.trace = trace
        self.recorder = Recorder(model)
        self.types = types
        """The classes of the modules, by path."""
        self.interception = interception
        self.paths: dict[int, tuple[Path, ...]] = {}
        self.fixed: dict[int, tuple[tuple[Path, Any], ...]] = {}
        self.derived: dict[int, tuple[Derived, ...]] = {}
        self.views: set[int] = set()
        """Calls that gave another tensor in the memory of one that they were given."""
        self.contexts = 1
        self.last: Any = None
        """The model's result in the last run."""
        self.trees: Any = None
        self.gives_tensors = True
        self.many_at_once: dict[int, str] = {}
        """Calls on tensors that stand for many, as within torch.vmap, and where they are."""
        self.modules = {id(module) for module in model.modules()}
        self.elsewhere: set[str] = set()
        """Modules that were called in threads that the model has started."""

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model once; gives its result."""
        state: AutoQuantizationState = model._modules[STATE]  # type: ignore[assignment]
        self.trace.bounds = {}
        run = Run(self.trace, state, model)
        run.recording = self
        run.frame.steps = []
        self.recorder.begin(pytree.tree_leaves((args, kwargs)))
        ACTIVE.run = run
        RECORDINGS.add(self)
        try:
            with torch.no_grad(), self.interception(run):
                output = nn.Module.__call__(model, *args, **kwargs)
        except RuntimeError as error:
            if (refused := _compile_refusal(error, model)) is None:
                raise
            raise refused from error
        finally:
            RECORDINGS.discard(self)
            ACTIVE.run = None
            self.trace.bounds = {}
        self.trace.context.sequences[tuple(run.frame.steps)] = None
        self.recorder.read(tensors_in(output))
        leaves, out_spec = pytree.tree_flatten(output)
        self.trees = (pytree.tree_flatten((args, kwargs))[1], out_spec)
        self.gives_tensors = self.gives_tensors and all(isinstance(leaf, Tensor) for leaf in leaves)
        self.last = output
        return output

    def enter(self, outer: Context, key: Key, state: ModuleState) -> Context:
        """A module that is called from a place where it was not seen before."""
        found = outer.around(state.path)
        if found is None:
            found = Context(state.path, FIRST_CHILD - self.contexts, outer)
            self.contexts += 1
            state.contexts.append(found)
        outer.children[key] = found
        return found

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Key, run: Run) -> Any:
        """A torch function is called."""
        before = self.recorder.arrive(tensors_in((args, kwargs)))
        output = func(*args, **kwargs)
        given, results = (args, kwargs), tensors_in(output)
        file, line = source_of_call(4)
        if not results:
            name = getattr(func, "__name__", "")
            if name != "__set__":
                self.recorder.read(tensors_in(given), f"{name} looks at numbers ({file.rsplit('/', 1)[-1]}:{line})")
            if name != "__setitem__":
                return output
        context = run.frame.context
        if context is None:
            return output
        site = context.ops.get(key)
        if site is None:
            leaf = str(key[0])
            path = leaf or run.frame.state.path
            kind = self.types.get(path, nn.Module)
            origin = Origin(path, f"{kind.__module__}.{kind.__qualname__}", file, line)
            recorded = Tensor.detach if name_of(func) == "data" else func  # torch has no graph of the former
            call = self.recorder.see(recorded, given, output, origin, before)
            site = OpSite(call.number, call.name, origin.source, leaf, is_product(func, args, kwargs))
            context.ops[key] = site
            self.paths[call.number], self.fixed[call.number] = arguments_of(args, kwargs)
            self.derived[call.number] = tuple(self._find_derived(call, before))
            if any(is_wrapped(x) for x in tensors_in(given)):
                self.many_at_once[call.number] = f"{call.name} at {origin.source}"
        else:
            self.recorder.again(self.recorder.calls[site.number], given, output)
        ids = {id(stamp.tensor) for stamp in before}
        others = [x for x in results if id(x) not in ids]
        if any(stamp.shares_memory(x) for stamp in before for x in others):
            self.views.add(site.number)
        if run.frame.steps is not None:
            run.frame.steps.append(site.number)
        return output

    def _find_derived(self, call: SeenCall, before: Sequence[Stamp]) -> Iterator[Derived]:
        for position, (node, stamp) in enumerate(zip(call.reads, before, strict=False)):
            sources = self.recorder.sources(node)
            if sources and stamp.copy is not None:
                yield Derived(position, f"{call.number}:{position}", sources, digest(stamp.copy))

    @property
    def made_of_nothing(self) -> str:
        """The first call that makes a tensor without reading one."""
        return next((call.name for call in self.recorder.calls if not call.reads), "")

    def facts(self, captured: Program) -> tuple[CallFacts, ...]:
        """The facts of each recorded call."""
        rows = self.recorder.calls
        origins = (captured.origins.get(node) for node in captured.graph.nodes)
        used = {origin.call for origin in origins if isinstance(origin, SeenAt)}
        return tuple(
            CallFacts(
                call.number,
                call.name,
                tuple(node.name for node in call.reads),
                tuple(self.recorder.parameter(node) for node in call.reads),
                self.paths[call.number],
                tuple(node.name if node is not None else "" for node in call.makes),
                self.fixed[call.number],
                call.writes_first,
                call.number in self.views,
                bool(set(call.writes) - {0}) or any(path[:2] == (1, "out") for path in self.paths[call.number]),
                call.number in used or any(node is not None and node.users for node in call.makes),
                self.derived[call.number],
            )
            for call in rows
        )


BOUNDARIES.add(id(Recording.run.__code__))


def _compile_refusal(error: RuntimeError, model: nn.Module) -> CaptureError | None:
    """The refusal of code that torch compiles while calls are intercepted; None for errors of the model's own."""
    if type(error).__module__ != "torch._dynamo.exc":
        return None
    return CaptureError(
        "a part of the model is compiled as it runs, as torch.cond and torch.compile do, where calls cannot be intercepted",
        where=type(model).__name__,
        advice="write torch.cond as a branch in Python, which this flow takes; or capture the model: qc.capture, qc.prepare",
    )


def arguments_of(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Path, ...], tuple[tuple[Path, Any], ...]]:
    """The paths of the tensors in a call's arguments, and the numbers, strings and flags among the others with theirs."""
    tensors: list[Path] = []
    others: list[tuple[Path, Any]] = []
    leaves, _ = pytree.tree_flatten_with_path((args, kwargs))
    for keys, leaf in leaves:
        path = tuple(getattr(key, "idx", getattr(key, "key", None)) for key in keys)
        if isinstance(leaf, Tensor):
            tensors.append(path)
        elif isinstance(leaf, int | float | str | bool | None):
            others.append((path, leaf))
    return tuple(tensors), tuple(others)
