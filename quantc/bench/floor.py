"""The kernel floor: the time of a lowered module's ops alone, each on its best kernel.

    floor = kernel_floor(lowered, x)
    print(floor)              # floor 8.5 ms, the whole 9.2 ms: 0.92 of it
    print(floor.table())      # op by op

Each op is called in a tight loop on its inputs in the module, and so is the fastest kernel that tuning knows for it;
the better of the two counts. Ops are recorded like the module, so that Python has no part in either. The time of the
whole beyond the sum is spent between the ops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from quantc.bench.race import quietly_on_one_thread, repeats_of, seconds_of
from quantc.ir.dialect import op_name
from quantc.support.terminal import plain_rows
from quantc.targets.kernels.dispatch_trace import NoTapeError
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.lowered import Lowered, lower
from quantc.targets.kernels.replay import replay

ROUNDS = 5
TURNS, TURN = 3, 5e-4
"""Turns of each contender per round, and the seconds of one turn."""
UNTIMED = ("placeholder", "get_attr", "output")


@dataclass(frozen=True)
class OpTime:
    """One op of a lowered module, timed alone."""

    node: str
    op: str
    kernel: str
    """Its best kernel; empty where it runs on none."""
    shape: str
    """Operand shapes and, in brackets, the kind of kernel work and its output channels."""
    microseconds: float


@dataclass(frozen=True)
class Floor:
    """Every op alone, and the whole module."""

    ops: tuple[OpTime, ...]
    whole_milliseconds: float

    @property
    def milliseconds(self) -> float:
        return sum(row.microseconds for row in self.ops) / 1e3

    @property
    def share(self) -> float:
        """Fraction of the whole's time that the ops themselves take: 1 is all of it."""
        return self.milliseconds / self.whole_milliseconds

    def rows(self) -> list[tuple[str, ...]]:
        """Equal ops as one row: op, kernel, shape, count, total microseconds, share; most expensive first."""
        alike: dict[tuple[str, str, str], list[float]] = {}
        for row in self.ops:
            alike.setdefault((row.op, row.kernel, row.shape), []).append(row.microseconds)
        total = max(self.milliseconds * 1e3, 1e-9)
        dearest = sorted(alike.items(), key=lambda item: -sum(item[1]))
        return [(*key, str(len(times)), f"{sum(times):.1f}", f"{sum(times) / total:.3f}") for key, times in dearest]

    def table(self) -> str:
        """`rows` as text."""
        return "\n".join(plain_rows(COLUMNS, self.rows()))

    def to_data(self) -> dict[str, Any]:
        return {
            "milliseconds": self.milliseconds,
            "whole_milliseconds": self.whole_milliseconds,
            "share": self.share,
            "ops": [vars(row) for row in self.ops],
        }

    def __str__(self) -> str:
        whole = self.whole_milliseconds
        return f"floor {self.milliseconds:.2f} ms, the whole {whole:.2f} ms: {self.share:.2f} of it"


COLUMNS = ("op", "kernel", "shape", "count", "µs", "share")


def kernel_floor(lowered: Lowered, *inputs: Any, rounds: int = ROUNDS) -> Floor:
    """Time every op of a lowered module alone, and the whole in between; the best of all rounds counts for each."""
    leaves = pytree.tree_leaves(inputs)
    with quietly_on_one_thread():
        twin = lower(lowered.program, lowered.target, tune=inputs, progress="silent")
        twin(*inputs)  # packs the weights
        repeats = repeats_of(lowered, inputs)
        timing = _Timing(lowered, _kernels(twin.module))
        whole = float("inf")
        for _ in range(rounds):
            whole = min(whole, best_seconds(lowered, inputs, repeats))
            timing.run(*(leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves))
    return Floor(tuple(timing.ops.values()), whole * 1e3)


def _kernels(module: fx.GraphModule) -> dict[tuple[str, ...], Kernel]:
    """The kernels of a module, by the names of their node and of those it reads."""
    found = {node: module.get_submodule(str(node.target)) for node in module.graph.find_nodes(op="call_module")}
    return {_place(node): kernel for node, kernel in found.items() if isinstance(kernel, Kernel)}


def _place(node: fx.Node) -> tuple[str, ...]:
    return (node.name, *(source.name for source in node.all_input_nodes))


class _Timing(fx.Interpreter):
    """Runs a module node by node, and times each on its inputs."""

    def __init__(self, lowered: Lowered, tuned: dict[tuple[str, ...], Kernel]) -> None:
        super().__init__(lowered.module)
        self.lowered, self.tuned = lowered, tuned
        self.placed = {row.node: row.op for row in lowered.placed}
        self.ops: dict[str, OpTime] = {}
        """By node; the best so far."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in UNTIMED:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            for step, kernel in self._candidates(n):
                row = OpTime(n.name, self._op(n), kernel, _shape(step, args), _microseconds(step, args, kwargs))
                best = self.ops.get(n.name)
                self.ops[n.name] = row if best is None or row.microseconds < best.microseconds else best
        return super().run_node(n)

    def _candidates(self, node: fx.Node) -> list[tuple[Callable[..., Any], str]]:
        """Callables that can run a node, with their names."""
        target: Any = node.target
        if node.op == "call_method":
            return [(lambda own, *args, **kwargs: getattr(own, target)(*args, **kwargs), "")]
        if node.op == "call_function":
            return [(target, "")]
        own, other = self.module.get_submodule(target), self.tuned.get(_place(node))
        candidates = [own] if other is None or other.extra_repr() == own.extra_repr() else [own, other]
        return [(each, each.extra_repr() if isinstance(each, Kernel) else "") for each in candidates]

    def _op(self, node: fx.Node) -> str:
        """Name of the op in the integer form; in the dialect if it stayed float."""
        meant = self.lowered.stands_for(node)
        first = meant[0] if isinstance(meant, tuple) else meant
        return self.placed.get(str(first)) or (op_name(node) if node.op == "call_function" else str(node.target))


def _microseconds(step: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """A tight loop; if the op overwrites its inputs, single calls on copies."""

    def call(*given: Any) -> Any:
        return step(*given, **kwargs)

    copies = _copy_tensors(args)
    call(*copies)
    if _is_same(args, copies):
        is_branch = isinstance(step, HigherOrderOperator)  # these look at numbers
        run, given = (call, tuple(args)) if is_branch else _without_python(call, args)
        return best_seconds(run, given, repeats_of(run, given, TURN)) * 1e6
    best, spent = float("inf"), 0.0
    while spent < TURN * TURNS:
        copies = _copy_tensors(args)
        begin = time.process_time()
        call(*copies)
        once = time.process_time() - begin
        best, spent = min(best, once), spent + max(once, 1e-6)
    return best * 1e6


def _without_python(call: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A recording of a call and the tensors to give it; the call itself, and all it takes, where there is none."""
    leaves, spec = pytree.tree_flatten(tuple(args))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def line(*tensors: Tensor) -> list[Any]:
        given = list(leaves)
        for index, tensor in zip(places, tensors, strict=True):
            given[index] = tensor
        return pytree.tree_leaves(call(*pytree.tree_unflatten(given, spec)))

    tensors = tuple(leaves[index] for index in places)
    try:
        return replay(line, tensors), tensors
    except NoTapeError:
        return call, tuple(args)


def best_seconds(step: Callable[..., Any], inputs: tuple[Any, ...], repeats: int) -> float:
    """The best turn of a round."""
    return min(seconds_of(step, inputs, repeats) for _ in range(TURNS))


def _copy_tensors(args: Any) -> tuple[Any, ...]:
    copied: tuple[Any, ...] = pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tuple(args)
    )
    return copied


def _is_same(args: Any, copies: Any) -> bool:
    pairs = zip(pytree.tree_leaves(tuple(args)), pytree.tree_leaves(copies), strict=True)
    return all(torch.equal(one, other) for one, other in pairs if isinstance(one, Tensor))


def _shape(step: Any, args: Sequence[Any]) -> str:
    read = [leaf for leaf in pytree.tree_leaves(tuple(args)) if isinstance(leaf, Tensor)]
    shown = ", ".join("×".join(map(str, leaf.shape)) or "scalar" for leaf in read)
    work = step.work(*args) if isinstance(step, Kernel) else None
    return shown if work is None else f"{shown} ({work.kind} → {work.channels[-1]})"
