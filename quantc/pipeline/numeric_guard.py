"""The numeric guard: checks on the example inputs that a pass which promises to preserve the numbers does so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from quantc.errors import GuardError
from quantc.ir.dialect import writes
from quantc.ir.placements import PlacedModule
from quantc.ir.program import Program, Stage, attribute
from quantc.ir.types import tensor_type
from quantc.observe.module import observers_off
from quantc.pipeline.pipeline import Hook, Pass, Preserves
from quantc.pipeline.tolerance import Gap, Tolerance, gap

SMALL = 2000
"""Maximum number of nodes of a program that is guarded by default."""


@dataclass
class Trace:
    """The results of a program on its example inputs."""

    outputs: list[Any]
    written: dict[str, torch.Tensor]
    """The buffers, parameters and inputs it wrote to, with their values afterwards."""
    values: dict[str, Any] = field(default_factory=dict)
    """The value of each node of the top graph."""


class Guard(Hook):
    """Run the example inputs before and after each pass that preserves numbers, and compare.

    Compared are the outputs and everything the program writes to: buffers and inputs. A difference raises a GuardError
    that names the pass, the first node whose value differs, and by how much. The run draws its random numbers from
    `seed` and restores the generator and all buffers.

    Programs of more than `limit` nodes are skipped (None: none are). `skipped` lists the passes that could not be
    checked, with the reason; `checked` those that were.
    """

    def __init__(self, *, limit: int | None = SMALL, tolerance: Tolerance | None = None, seed: int = 0) -> None:
        self.limit = limit
        self.tolerance = Tolerance() if tolerance is None else tolerance
        self.seed = seed
        self.checked: list[str] = []
        self.skipped: list[str] = []
        self._before: Trace | None = None

    def before(self, program: Program, pass_: Pass) -> None:
        self._before = None
        if pass_.preserves is Preserves.NOTHING:
            return
        reason = why_not_guarded(program, self.limit) or (_rounds_otherwise(program) if _is_stepwise(pass_) else None)
        if reason is not None:
            self.skipped.append(f"{pass_.name}: {reason}")
            return
        self._before = self._trace(program, f"before {pass_.name} ran")

    def after(self, program: Program, pass_: Pass, changed: bool) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        when = f"after {pass_.name}, though it did before"
        if pass_.preserves is Preserves.STEPWISE:
            self._check_steps(program, pass_, before, when)
            self.checked.append(pass_.name)
            return
        after = self._trace(program, when)
        found = self._compare(before, after, pass_)
        if found is not None:
            raise self._error(program, pass_, before, after, *found)
        self.checked.append(pass_.name)

    def _compare(self, before: Trace, after: Trace, pass_: Pass) -> tuple[str, Gap] | None:
        pairs: list[tuple[str, Any, Any]] = [("the number of outputs", len(before.outputs), len(after.outputs))]
        pairs += [
            (f"output {index}", *pair) for index, pair in enumerate(zip(before.outputs, after.outputs, strict=False))
        ]
        names = dict.fromkeys([*before.written, *after.written])
        pairs += [(f"what is written to {name}", before.written.get(name), after.written.get(name)) for name in names]
        for what, left, right in pairs:
            if (found := gap(left, right, pass_.preserves, self.tolerance)) is not None:
                return what, found
        return None

    def _check_steps(self, program: Program, pass_: Pass, before: Trace, when: str) -> None:
        """Hold every op to what it yielded before, on the inputs that it had then."""
        recorder = StepRecorder(program, before.values, self.tolerance, pass_.gives is Stage.LOWERED)
        after = self._trace(program, when, recorder)
        found = recorder.found or self._compare(before, after, pass_)
        if found is not None:
            what, size = found
            raise GuardError(
                f"pass {pass_.name} changed the numbers: {what} {size}",
                where="each op was given what it had read before",
                advice="correct the pass; an 8-bit result may differ by one step, and a float by rounding",
            )

    def _error(self, program: Program, pass_: Pass, before: Trace, after: Trace, what: str, size: Gap) -> GuardError:
        where = f"{what}; no node that is in the program before and after differs"
        for node in program.graph.nodes:
            if node.op == "output" or node.name not in before.values:
                continue
            found = gap(before.values[node.name], after.values.get(node.name), pass_.preserves, self.tolerance)
            if found is not None:
                where = f"the first node that differs is {program.describe(node)}: {found}"
                break
        return GuardError(
            f"pass {pass_.name} changed the numbers: {what} {size}",
            where=where,
            advice=f"correct the pass; if it means to change numbers, let it declare so (it declares Preserves.{pass_.preserves.name})",
        )

    def _trace(self, program: Program, when: str, recorder: GuardRecorder | None = None) -> Trace:
        with isolated_run(program, self.seed) as tensors:
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in program.example_inputs or ()]
            recorder = GuardRecorder(program) if recorder is None else recorder
            try:
                outputs = pytree.tree_leaves(recorder.run(*leaves, enable_io_processing=False))
            except Exception as error:
                raise GuardError(
                    f"the program does not run on its example inputs {when}: {type(error).__name__}: {error}",
                    where=f"node {program.describe(recorder.current)}" if recorder.current is not None else None,
                    advice="look at the node with program.dump()",
                ) from error
            outputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in outputs]
            written = {name: tensor.clone() for name, tensor in tensors.items() if not _same(tensor, before[name])}
            for index, (leaf, given) in enumerate(zip(leaves, program.example_inputs or (), strict=True)):
                if isinstance(leaf, torch.Tensor) and not _same(leaf, given):
                    written[f"input {index}"] = leaf
        return Trace(outputs, written, recorder.values)


class NodeByNode(fx.Interpreter):
    """Runs the top graph of a program node by node."""

    def __init__(self, program: Program) -> None:
        for path, graph in program.graphs():
            if path and graph.owning_module is not None:
                graph.owning_module.recompile()
        super().__init__(program.root, garbage_collect_values=True, graph=program.graph)
        self.extra_traceback = False

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # the interpreter knows a module with two names by one of them only
        return attribute(self.module, str(target))(*args, **kwargs)


class GuardRecorder(NodeByNode):
    """Records the value of each node."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.current: fx.Node | None = None
        self.values: dict[str, Any] = {}
        self.copies = _has_writes(program)

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        value = super().run_node(n)
        # a later in-place write must not change the recorded value
        copied = self.copies and isinstance(value, torch.Tensor)
        self.values[n.name] = value.clone() if copied else value
        return value


class StepRecorder(GuardRecorder):
    """Has every op read what it read when `known` was recorded, and finds the first that yields something else.

    For that, whatever may differ by a step is replaced by what was recorded: results of nodes that stand for others, and
    of those that call nested graphs. If the program `becomes_integer`, its plan says what nodes stand for: names of ops
    may have gone to parts of them.
    """

    def __init__(
        self, program: Program, known: Mapping[str, Any], tolerance: Tolerance, becomes_integer: bool = False
    ) -> None:
        super().__init__(program)
        self.program, self.known, self.tolerance, self.becomes_integer = program, known, tolerance, becomes_integer
        self.found: tuple[str, Gap] | None = None

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        expected = None if n.op == "output" else self._recorded(n)
        if expected is None:
            return value
        rounds = self._rounds(n)
        found = gap(expected, _as_sequence(value, expected), Preserves.STEPWISE, self.tolerance, rounds=rounds)
        if found is not None and self.found is None:
            self.found = self.program.describe(n), found
        stands = n in self.program.placements.stand_ins or n in self.program.plan.lowered
        if not stands and not isinstance(n.target, HigherOrderOperator):
            return value  # the program may write to it
        return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, expected)

    def _recorded(self, node: fx.Node) -> Any:
        """The value of what a node stands for; None if it was not recorded."""
        plan, rows = self.program.plan, self.program.placements
        if node not in rows.stand_ins and node in plan.claims and self.becomes_integer:
            return self.known.get(plan.lowered.get(node) or "")
        names = rows.stands_for(node)
        if isinstance(names, str):
            return self.known.get(names)
        found = tuple(self.known.get(name) for name in names)
        return None if any(value is None for value in found) else found

    def _rounds(self, node: fx.Node) -> bool:
        """True if a node may round floats that it reads: a kernel, or one that calls a nested graph."""
        module = attribute(self.program.root, str(node.target)) if node.op == "call_module" else None
        if not isinstance(module, PlacedModule) and not isinstance(node.target, HigherOrderOperator):
            return False
        kinds = [tensor_type(item) for item in node.all_input_nodes]
        return any(kind is not None and kind.dtype.is_floating_point for kind in kinds)


def _as_sequence(value: Any, expected: Any) -> Any:
    """Several results as a tuple, like what they are compared with."""
    return tuple(value) if isinstance(expected, tuple) and isinstance(value, list) else value


def why_not_guarded(program: Program, limit: int | None) -> str | None:
    """The reason why a program's numbers cannot be checked, or None if they can."""
    if program.example_inputs is None:
        return "the program has no example inputs; capture it with some"
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in program.example_inputs):
        return "the example inputs are on the meta device"
    if any(tensor.is_meta for tensor in _tensors(program.root, parameters=True).values()):
        return "the program's constants are on the meta device; parse it with its constants"
    size = sum(len(graph.nodes) for _, graph in program.graphs())
    if limit is not None and size > limit:
        return f"the program has {size} nodes, more than {limit}; ask for it with Guard(limit=None)"
    return None


def _is_stepwise(pass_: Pass) -> bool:
    return pass_.preserves is Preserves.STEPWISE


def _rounds_otherwise(program: Program) -> str | None:
    """The reason why the integer form of a program may be more than a step from its Q/DQ form."""
    for name, arithmetic in program.plan.arithmetic.items():
        if not arithmetic.saturate:
            return f"results wrap around on {name}, and Q/DQ saturates"
    return None


@contextmanager
def isolated_run(program: Program, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Run with a fixed seed, without gradients and observers; restore buffers and generator afterwards.

    Yields the restored tensors, by name.
    """
    tensors = _tensors(program.root, parameters=_has_writes(program))
    saved = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), observers_off(program.root):
        torch.manual_seed(seed)
        try:
            yield tensors
        finally:
            with torch.no_grad():  # a program may have turned gradients on, as its model does
                for name, tensor in tensors.items():
                    tensor.copy_(saved[name])


def _tensors(root: nn.Module, *, parameters: bool) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = dict(root.named_buffers())
    if parameters:
        found.update(root.named_parameters())
    return found


def _has_writes(program: Program) -> bool:
    """True if anything may be written in place: by an op whose schema says so, or by opaque code."""
    return any(node.op in ("call_module", "call_method") or bool(writes(node.target)) for node in program.nodes())


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return gap(left, right, Preserves.EXACTLY, Tolerance()) is None
