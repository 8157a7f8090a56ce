"""Placement of kernels: ops of the integer form are replaced by what runs them on a processor."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import ClassVar

from pydantic import Field
from torch import fx
from torch.fx.graph import CodeGen

from quantc.integer.library import op_of
from quantc.ir.mac_count import example_sizes
from quantc.ir.placements import KernelChoice, Placed
from quantc.ir.program import Program, Stage
from quantc.passes.eliminate_dead import EliminateDead
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.rewrite.constant_order import forget_unread
from quantc.support.progress import Style
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_nodes import PREFIX, is_read_in_order, kernel_of, kernels_of
from quantc.targets.kernels.kernel_table import Call, Placement, candidates, highest_level, kernels_for
from quantc.targets.kernels.saturation import warn_of_saturation
from quantc.targets.kernels.selection import Choice, by_table
from quantc.targets.kernels.tuning import tune


class PlaceKernels(Pass):
    """Let kernels of a target run the ops of the integer form.

    Each op gets the first of the kernels that support it, in the order of the target's cost table; ops without one
    stay as they are written. Some kernels take over ops before theirs too. `program.placements` has a row for each op:
    its kernel, or the reason for none. Each kernel computes what its op does, within one step of an 8-bit result.
    """

    name: ClassVar[str] = "place-kernels"
    needs: ClassVar[Stage] = Stage.LOWERED
    gives: ClassVar[Stage | None] = Stage.PLACED
    before: ClassVar[Stage | None] = Stage.PLACED
    preserves: ClassVar[Preserves] = Preserves.STEPWISE

    target: str
    """The kernels' target: "x86" or "qnnpack", or one that third parties have registered kernels for."""
    allow_float: bool = False
    """Allow products of bytes in float where that is faster."""
    tune: bool = False
    """Time kernels here, on the program's example inputs."""
    choices: dict[str, str] = Field(default_factory=dict)
    """The kernels that were chosen before, by op: `branch/conv2d` for one in a nested graph."""
    progress: Style = "auto"
    """The display of progress while kernels are timed."""

    def run(self, program: Program) -> Outcome:
        placing = _Placing(self, program)
        placing.place()
        EliminateDead().run(program)
        if self.tune and not self.choices:
            placing.tune()
        placing.tell()
        forget_unread(program)
        rows = program.placements.placed
        on_kernels = sum(bool(row.kernel) for row in rows)
        return Outcome(bool(rows), (f"{on_kernels} of {len(rows)} ops on kernels of {self.target}",) if rows else ())


@dataclass
class _Placing:
    """One run of the pass."""

    options: PlaceKernels
    program: Program
    choices: dict[fx.Node, Choice] = field(default_factory=dict)
    keys: dict[fx.Node, str] = field(default_factory=dict)

    def place(self) -> None:
        """Replace ops by kernels."""
        options, program = self.options, self.program
        makers, ops, sizes = kernels_for(options.target), program.placements.ops, example_sizes(program)
        for path, graph in program.graphs():
            for node in list(graph.nodes):
                call = Call(program, node)
                if node.op != "call_function" or (call.op not in makers and op_of(node.target) is None):
                    continue
                key = f"{path}/{node.name}" if path else node.name
                found, reason = candidates(makers.get(call.op, []), call, options.allow_float)
                if not found:
                    ops[key] = Placed(node.name, call.op, "", reason)
                    program.placements.runs[node] = (key,)
                    continue
                # kernels that absorb other ops come first, and are not compared with those that do not
                alike = [item.kernel for item in found if item.inputs == found[0].inputs]
                choice = by_table(options.target, alike, found[0].inputs, sizes)
                choice = _as_saved(choice, options.choices.get(key), key)
                ops[key] = Placed(node.name, call.op, choice.taken.name, reason)
                made = _put(program, call, Placement(choice.taken, found[0].inputs))
                program.placements.runs[made] = (key,)
                self.choices[made], self.keys[made] = choice, key

    def tune(self) -> None:
        """Time the candidates of each op, and put the fastest in its place."""
        program = self.program
        families = {node: _families(choice) for node, choice in self.choices.items()}
        for node, choice in self.choices.items():
            for candidate in choice.candidates:
                candidate.in_order = is_read_in_order(program, node)
        module = program.module
        module.graph.set_codegen(CodeGen())
        module.recompile()
        inputs = program.example_inputs
        self.choices = tune(module, self.choices, inputs, self._exchange, self.options.progress)
        program.touch()
        for kernel in (kernel for choice in self.choices.values() for kernel in choice.candidates):
            kernel.in_order = True
        self._note(families)

    def tell(self) -> None:
        """Write down which kernel runs each op, and warn of those whose sums are cut off."""
        rows, program = self.program.placements, self.program
        if not rows.choices:
            self._note({node: _families(choice) for node, choice in self.choices.items()})
        kernels: list[tuple[str, Kernel]] = []
        for _, graph in program.graphs():
            for node, kernel in kernels_of(program, graph):
                (key,) = rows.keys(node)
                choice = self.choices[node]
                rows.ops[key] = replace(
                    rows.ops[key],
                    kernel=kernel.extra_repr(),
                    chosen=choice.by,
                    work=str(choice.work or ""),
                    microseconds={name: round(time, 1) for name, time in choice.microseconds.items()},
                )
                kernels.append((rows.ops[key].node, kernel))
        warn_of_saturation(kernels, program)

    def _note(self, families: dict[fx.Node, tuple[tuple[str, str], ...]]) -> None:
        for node, choice in self.choices.items():
            self.program.placements.choices[self.keys[node]] = KernelChoice(choice.taken.name, families[node])

    def _exchange(self, node: fx.Node, kernel: Kernel) -> None:
        """Have another kernel run a node."""
        path, _, name = str(node.target).rpartition(".")
        owner = self.program.owner(node.graph)
        (owner.get_submodule(path) if path else owner).add_module(name, kernel)


def _families(choice: Choice) -> tuple[tuple[str, str], ...]:
    return tuple((kernel.name, kernel.family) for kernel in choice.candidates)


def _as_saved(choice: Choice, name: str | None, key: str) -> Choice:
    """The choice that was made before. Where there is no such kernel any more it is made again, and said."""
    if name is None or (len(choice.candidates) == 1 and choice.taken.name == name):
        return choice
    ordered = sorted(choice.candidates, key=lambda kernel: kernel.name != name)
    if ordered[0].name == name:
        return Choice(tuple(ordered), "saved", choice.work)
    warnings.warn(
        f"{key} was saved with the kernel {name!r}, which cannot run it here: {choice.taken.name!r} is taken instead",
        stacklevel=2,
    )
    return choice


def _put(program: Program, call: Call, placement: Placement) -> fx.Node:
    """Have a kernel run a call; the node that runs it."""
    old = call.node
    name, read = f"{PREFIX}{old.name}", old.all_input_nodes
    program.owner(old.graph).add_module(name, placement.kernel)
    made = program.emit(name, placement.inputs, before=old, like=old)
    program.placements.highest[made] = highest_level(program, old)
    program.placements.stand_ins[made] = old.name
    program.modes.drop(old)  # kernels have no training mode
    program.replace(old, made)
    for node in read:
        if not node.users and kernel_of(program, node) is not None:
            program.erase(node)  # dequantized a weight that the new kernel reads as stored
    return made
