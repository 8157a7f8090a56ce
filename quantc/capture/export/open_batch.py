"""`dynamic_shapes="auto"`: makes the batch dimension dynamic where the model allows it.

The dimension is the first, if all example inputs share it. The capture itself shows whether the model's code holds for
other sizes. The captured program is then run against the model, on the example and on batches of other sizes: if the
two differ, if the model fails, or if its results mix the samples of a batch, sizes are fixed to those of the example.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from quantc.capture.capture_request import Request
from quantc.capture.export.dimensions import leaf_names
from quantc.capture.failures import WAYS_OUT, first_line
from quantc.capture.model_copies import Tensors, cloned_inputs, twin
from quantc.capture.source_lines import forward_line
from quantc.capture.statefulness import keep_attributes
from quantc.errors import CaptureError
from quantc.ir.program import Program
from quantc.pipeline.numeric_guard import isolated_run, why_not_guarded
from quantc.pipeline.pipeline import Preserves
from quantc.pipeline.tolerance import Tolerance, gap

SYMBOL = "batch"
"""The name of the size that is opened."""
Make = Callable[[Request], tuple[Program, list[str]]]
"""Captures a request; returns the program and notes for the log."""
FAILS, DIFFERS = "the captured program fails", "the captured program is not the model"
"""Prefixes of reasons that may have nothing to do with sizes."""
OTHER, NEXT = 3, 2
"""The size that a batch is tried at besides one and the example's; the next where that is the example's."""


@dataclass(frozen=True)
class Batch:
    """The dimension that all example inputs share."""

    size: int
    names: tuple[str, ...]
    shapes: dict[str, Any]
    """The `dynamic_shapes` of `torch.export` that make it dynamic."""


def shared_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch | str:
    """The dimension to make dynamic, or the reason why there is none."""
    leaves = zip(leaf_names(model, args, kwargs), pytree.tree_leaves((args, kwargs)), strict=True)
    tensors = {name: leaf for name, leaf in leaves if isinstance(leaf, Tensor)}
    if not tensors:
        return "no example input is a tensor"
    for name, tensor in tensors.items():
        if not tensor.dim():
            return f"input {name!r} has no dimensions"
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            return f"input {name!r} is no dense tensor with values"
    sizes = {name: tensor.shape[0] for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1:
        name, other = next((a, b) for a in sizes for b in sizes if sizes[a] != sizes[b])
        return f"the example inputs share no first size: {name} has {sizes[name]} and {other} has {sizes[other]}"
    size = next(iter(sizes.values()))
    if not size:
        return "the example batch is empty"
    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    mark = Dim(SYMBOL, min=1)
    shapes = pytree.tree_map(lambda leaf: {0: mark} if isinstance(leaf, Tensor) else None, dict(given))
    return Batch(size, tuple(sizes), shapes)


def with_open_batch(model: nn.Module, request: Request, make: Make) -> tuple[Program, list[str]]:
    """Result of `make` with a dynamic batch or, if that fails, with static sizes; and notes for its log."""
    args, kwargs = request.args or (), request.kwargs
    batch = shared_batch(model, args, kwargs)
    if isinstance(batch, str):
        return _make_fixed(request, make, batch)
    try:
        with mute_size_logs():
            program, notes = make(replace(request, dynamic_shapes=batch.shapes))
    except CaptureError as error:
        return _make_fixed(request, make, first_line(error))
    if (reason := why_fixed(program, model, args, kwargs, batch)) is not None:
        fixed, found = _make_fixed(request, make, reason)
        _refuse_broken(fixed, model, args, kwargs, batch, reason)
        return fixed, found
    if program.fixed_mode:
        fixed, found = _make_fixed(request, make, f"with an open batch {program.fixed_mode}")
        if not fixed.fixed_mode:
            return fixed, found
    signature = program.signature
    program.signature = replace(signature, opened=frozenset(signature.ranges))
    return program, [*notes, _note(program, batch)]


@contextmanager
def mute_size_logs() -> Iterator[None]:
    """Context manager that suppresses torch's error logs on sizes that cannot be dynamic: an attempt may fail."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _make_fixed(request: Request, make: Make, reason: str) -> tuple[Program, list[str]]:
    program, notes = make(replace(request, dynamic_shapes=None))
    return program, [*notes, f"sizes are fixed to those of the example inputs: {reason}"]


def _refuse_broken(
    program: Program, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch, reason: str
) -> None:
    """CaptureError where the program failed its check with open sizes, and fails it on the example with fixed ones too.

    Results that differ are no fault of a model that draws random numbers."""
    if not reason.startswith((FAILS, DIFFERS)):
        return
    with _preserve_state(model):
        trial = _Trial(model, args, kwargs, batch)
        found = trial.why_wrong(program, batch.size)
        if found is None or not (found.startswith(FAILS) or (found.startswith(DIFFERS) and trial.repeats_itself())):
            return
    raise CaptureError(
        f"{type(model).__name__} was captured by {program.method}, but on the example inputs {found}",
        where=forward_line(model),
        advice=WAYS_OUT,
    )


def why_fixed(
    program: Program, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch
) -> str | None:
    """Reason why a program with dynamic batch must not be used, or None. If it is wrong for a single sample only, its
    range is raised to start at two.
    """
    if (reason := why_not_guarded(program, None)) is not None:
        return reason
    if (
        behind := next((node for node in program.graph.find_nodes(op="call_module") if not node.meta), None)
    ) is not None:
        return f"what {behind.target} gives for another batch is not known"
    sizes = dict.fromkeys((batch.size, OTHER if batch.size != OTHER else NEXT, 1))
    with _preserve_state(model):
        trial = _Trial(model, args, kwargs, batch)
        for size in sizes:
            reason = trial.why_wrong(program, size)
            if reason is not None and size == 1 != batch.size:
                program.signature = replace(program.signature, ranges={SYMBOL: (NEXT, None)})
            elif reason is not None:
                return f"{reason} for a batch of {size}" if size != batch.size else reason
        return trial.why_mixed(*list(sizes)[:2])


@dataclass
class _Trial:
    """Runs a model on batches made of its example inputs."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Batch

    def inputs(
        self, size: int, order: Callable[[Tensor], Tensor] = lambda x: x
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A batch of another size. The first samples are those of the example."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
            Tensor, lambda x: order(_samples(x.detach(), size)), (self.args, self.kwargs)
        )
        return found

    def run(
        self, inputs: tuple[tuple[Any, ...], dict[str, Any]], *, evaluated: bool = False, seed: int = 0
    ) -> list[Any]:
        runnable = twin(self.model, Tensors.COPIED)
        torch.manual_seed(seed)
        args, kwargs = cloned_inputs(inputs)
        return pytree.tree_leaves((runnable.eval() if evaluated else runnable)(*args, **kwargs))

    def repeats_itself(self) -> bool:
        """True if the model gives the same results with other random numbers."""
        inputs = self.inputs(self.batch.size)
        first, second = self.run(inputs), self.run(inputs, seed=1)
        return gap(first, second, Preserves.EXACTLY, Tolerance()) is None

    def why_wrong(self, program: Program, size: int) -> str | None:
        inputs = self.inputs(size)
        try:
            expected = self.run(inputs)
        except Exception as error:  # noqa: BLE001 - a model may refuse another batch in any way
            return f"the model itself fails ({first_line(error)})"
        try:
            with isolated_run(program, 0):
                args, kwargs = cloned_inputs(inputs)
                made = pytree.tree_leaves(program(*args, **kwargs))
                # a result may be a buffer of the program, which is restored
                actual = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in made]
        except Exception as error:  # noqa: BLE001 - so may the program, which was captured with another one
            return f"{FAILS} ({first_line(error)})"
        found = gap(expected, actual, Preserves.CLOSELY, Tolerance())
        return None if found is None else f"{DIFFERS} ({found})"

    def why_mixed(self, size: int, other: int) -> str | None:
        """Reason if a sample's results depend on the others in its batch, tested in eval mode."""
        few, many = sorted((size, other))
        runs = [self.inputs(few), self.inputs(many), self.inputs(many, lambda x: x.flip(0))]
        try:
            outputs = [self.run(inputs, evaluated=True) for inputs in runs]
        except Exception as error:  # noqa: BLE001 - as above
            return f"the model itself fails in eval mode ({first_line(error)})"
        for index, (first, second, turned) in enumerate(zip(*outputs, strict=False)):
            if not isinstance(first, Tensor):
                if gap(first, second, Preserves.EXACTLY, Tolerance()) is not None:
                    return f"output {index} is a number that depends on the size of the batch"
            elif not _is_apart(first, second, turned, few, many):
                return f"output {index} mixes the samples of a batch"
        return None if len({len(row) for row in outputs}) == 1 else "the number of outputs depends on the batch"


def _is_apart(first: Tensor, second: Tensor, turned: Tensor, few: int, many: int) -> bool:
    """True if a result holds one part per sample: equal in a smaller batch, and in another order."""
    if first.dim() != second.dim() or second.shape != turned.shape:
        return False
    grown = [dim for dim, (small, large) in enumerate(zip(first.shape, second.shape, strict=True)) if small != large]
    if not grown:
        return _agree(first, second) and _agree(second, turned)
    (dim, *others) = grown
    if others or first.shape[dim] % few or second.shape[dim] * few != first.shape[dim] * many:
        return False
    first, second, turned = (
        value.reshape((*value.shape[:dim], count, value.shape[dim] // count, *value.shape[dim + 1 :]))
        for value, count in ((first, few), (second, many), (turned, many))
    )
    return _agree(first, second.narrow(dim, 0, few)) and _agree(second, turned.flip(dim))


def _agree(left: Tensor, right: Tensor) -> bool:
    return gap(left, right, Preserves.CLOSELY, Tolerance()) is None


def _samples(x: Tensor, size: int) -> Tensor:
    """A given number of samples: those there are, then others like them. Values stay within the range of the example's."""
    rows = [x, *(_vary(x, turn) for turn in range(1, -(-size // x.shape[0])))]
    return torch.cat(rows)[:size]


def _vary(x: Tensor, turn: int) -> Tensor:
    """The same samples, each with its values in another order, and floats closer to zero."""
    moved = x.flatten(1).roll(turn, 1).view(x.shape) if x.dim() > 1 else x
    return moved * (1 - turn / 8) if x.is_floating_point() and turn < 8 else moved


@contextmanager
def _preserve_state(model: nn.Module) -> Iterator[None]:
    """Preserve the model, the random generator and the caller's settings. Attention uses its Python code."""
    fused = torch.backends.mha.get_fastpath_enabled()
    with keep_attributes(model), warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.autocast("cpu", enabled=False):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


def _note(program: Program, batch: Batch) -> str:
    """The note for the log of a program whose batch is open."""
    low, _ = program.signature.ranges.get(SYMBOL, (1, None))
    names = ", ".join(batch.names)
    return f"the batch (dimension 0 of {names}) is open, from {low}; it was captured with {batch.size}"
