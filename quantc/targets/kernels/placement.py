"""Kernel placement: replaces ops by kernels, selects among candidates, and fuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen

from quantc.integer.library import op_of
from quantc.ir.dialect import may_alias
from quantc.ir.mac_count import example_sizes
from quantc.ir.program import Program
from quantc.pipeline.registry import PASSES
from quantc.rewrite.constant_order import forget_unread
from quantc.support.progress import Style
from quantc.targets.kernels.codegen import straight_line, why_not_recorded, why_not_repeated
from quantc.targets.kernels.fuse_sdpa import fuse_attention
from quantc.targets.kernels.int8_conv import settle_summands
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_fusion import (
    PREFIX,
    absorb_readers,
    erase_unread,
    in_usual_order,
    is_read_in_order,
    join_siblings,
    kernels_of,
)
from quantc.targets.kernels.kernel_table import (
    HIGHEST,
    Call,
    Maker,
    NoKernelError,
    Placement,
    highest_level,
    kernels_for,
)
from quantc.targets.kernels.program_race import fastest, race
from quantc.targets.kernels.replay import Replayed
from quantc.targets.kernels.residual_linear import absorb_sums, settle_float_summands
from quantc.targets.kernels.saturation import warn_of_saturation
from quantc.targets.kernels.selection import Choice, by_table
from quantc.targets.kernels.tuning import Times, tune


@dataclass(frozen=True, slots=True)
class Placed:
    """One op of the integer form, and the kernel that runs it."""

    node: str
    op: str
    kernel: str
    """Empty where it runs as it is written."""
    reason: str
    """Why no kernel took it, or why those that come first did not."""
    chosen: str = ""
    """What the choice among several kernels was made by: "table", "measured", "remembered", "saved"; or "whole" where
    another one is faster by itself, and this one in the program."""
    work: str = ""
    """What it has to do, where there was a choice."""
    microseconds: dict[str, float] = field(default_factory=dict)
    """The time of each kernel that could have been taken; of the nearest shape, if chosen by the table."""

    @property
    def why(self) -> str:
        """Reason and times, on one line."""
        times = ", ".join(f"{name} {time:.0f} µs" for name, time in self.microseconds.items())
        return "; ".join(part for part in (self.reason, f"{self.chosen}: {times}" if times else "") if part)

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.node} ({self.op}): {self.kernel or 'as written'}{why}"


@dataclass(frozen=True, slots=True)
class Choosing:
    """Options of kernel selection."""

    tune: bool | tuple[Any, ...] = False
    """Whether they are timed here, or the inputs to time them on."""
    allow_float: bool = False
    """Whether a product of bytes may be computed in float where that is faster."""
    progress: Style = "auto"
    saved: Mapping[str, str] = field(default_factory=dict)
    """The kernels that were chosen before, by op: `branch/conv2d` for one in a nested graph."""


@dataclass(frozen=True, slots=True)
class RunningForm:
    """A lowered program: module, placements and selected kernels."""

    module: fx.GraphModule
    """Takes the flat inputs and gives the flat outputs: trees take as long as a small layer."""
    placed: tuple[Placed, ...]
    choices: dict[str, str]
    """The kernel that was taken for each op, as `Choosing.saved` has it."""
    others: dict[str, dict[str, str]] = field(default_factory=dict)
    """The choices that could have been made for the whole, where it was tuned, by name."""


def on_kernels(program: Program, target: str, choosing: Choosing) -> RunningForm:
    """Lower a program to kernels; the program itself is not modified."""
    made = _on_kernels(program, target, choosing)
    if not made.others or why_not_repeated(made.module) is not None:
        return made
    saved = [replace(choosing, tune=False, saved=choices) for choices in made.others.values()]
    forms = {"measured": made, **{
        name: _on_kernels(program, target, each) for name, each in zip(made.others, saved, strict=True)
    }}  # fmt: skip
    times = _times_of_wholes(forms, _inputs(program, choosing))
    taken = forms[fastest(times)]
    alone = {row.node: row for row in made.placed}
    rows = [_told(row, alone.get(row.node)) for row in taken.placed]
    return RunningForm(taken.module, tuple(rows), taken.choices)


def _told(row: Placed, alone: Placed | None) -> Placed:
    """A row with the times of all kernels that could have been taken."""
    if alone is None or not alone.chosen:
        return row
    own = next(iter(alone.microseconds), "")
    chosen = alone.chosen if own in row.kernel else "whole"
    return replace(row, chosen=chosen, work=alone.work, microseconds=alone.microseconds)


def _times_of_wholes(forms: Mapping[str, RunningForm], inputs: Sequence[Any]) -> dict[str, float]:
    """Times of whole-program variants, measured unless cached."""
    times = Times.remembered()
    texts = {name: "\n".join(f"{key} {value}" for key, value in form.choices.items()) for name, form in forms.items()}
    works = "\n".join(f"{row.node} {row.op} {row.work}" for row in forms["measured"].placed)
    keys = {
        name: times.key_of("whole", sha256(f"{works}\n{text}".encode()).hexdigest()) for name, text in texts.items()
    }
    if any(times.get(key) is None for key in keys.values()):
        with torch.no_grad():
            for form in forms.values():
                form.module(*(leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in inputs))
        for name, found in race(
            {name: Replayed(straight_line(form.module)) for name, form in forms.items()}, inputs
        ).items():
            times.put(keys[name], found)
        times.write()
    return {name: times.get(key) or 0.0 for name, key in keys.items()}


def _running(module: fx.GraphModule) -> Callable[..., Any]:
    """A module as it will run."""
    line = straight_line(module)
    return Replayed(line) if why_not_recorded(module) is None else line


def _inputs(program: Program, choosing: Choosing) -> Sequence[Any]:
    """Inputs for timing."""
    given = choosing.tune
    return program.example_inputs or () if isinstance(given, bool) else _leaves(program, given)


def _of_whole(choices: Mapping[str, Choice], measured: dict[str, str]) -> dict[str, dict[str, str]]:
    """Other choices for all ops: as the table has them, and of one family each; `choices` are those by the table."""
    found = {"table": {key: choice.taken.name for key, choice in choices.items()}}
    families = {kernel.family for choice in choices.values() for kernel in choice.candidates}
    for family in sorted(families, reverse=True):
        own = {
            key: {kernel.family: kernel.name for kernel in reversed(choice.candidates)}
            for key, choice in choices.items()
        }
        found[family] = {key: own[key].get(family, name) for key, name in measured.items()}
    seen = [measured]
    for name, each in list(found.items()):
        if each in seen:
            del found[name]
        seen.append(each)
    return found


def _on_kernels(program: Program, target: str, choosing: Choosing) -> RunningForm:
    draft = program.draft()
    _share_tensors(draft.root, program.root)
    placed, choices, keys = _place(draft, target, choosing)
    PASSES["eliminate-dead"]().run(draft)
    erase_unread(draft)
    by_table = {keys[node]: choice for node, choice in choices.items()}
    is_tuned = choosing.tune is not False and not choosing.saved
    if is_tuned:
        inputs = program.example_inputs if isinstance(choosing.tune, bool) else _leaves(program, choosing.tune)
        for node, choice in choices.items():
            for candidate in choice.candidates:
                candidate.in_order = is_read_in_order(draft, node)
        choices = tune(_flat(draft.module), choices, inputs, partial(_exchange, draft), choosing.progress)
    for node, choice in choices.items():
        times = {name: round(time, 1) for name, time in choice.microseconds.items()}
        placed[node] = replace(placed[node], chosen=choice.by, work=str(choice.work or ""), microseconds=times)
    taken = {keys[node]: choice.taken.name for node, choice in choices.items()}
    absorb_readers(draft)
    for _, graph in draft.graphs():
        for node, kernel in kernels_of(draft, graph):
            placed[node] = replace(placed[node], kernel=kernel.extra_repr())
    left = set(draft.nodes())
    placed = {node: row for node, row in placed.items() if node in left}
    warn_of_saturation(
        ((placed[node].node, kernel) for _, graph in draft.graphs() for node, kernel in kernels_of(draft, graph)),
        program,
    )
    for node, count in join_siblings(draft).items():
        placed[node] = replace(placed[node], kernel=f"{placed[node].kernel}; {count} in one")
    fuse_attention(draft)
    for node in absorb_sums(draft):
        placed[node] = replace(placed[node], kernel=f"{placed[node].kernel} + sum")
    in_usual_order(draft)
    PASSES["eliminate-dead"]().run(draft)
    settle_summands(draft)
    settle_float_summands(draft)
    _set_apart(draft)
    _copy_returned_constants(draft)
    forget_unread(draft)
    others = _of_whole(by_table, taken) if is_tuned else {}
    return RunningForm(_flat(draft.module), tuple(placed.values()), taken, others)


def _copy_returned_constants(draft: Program) -> None:
    """Copy results that would be constants, or views of them: a caller who writes to a result would otherwise change
    later calls. Buffers that a program writes to itself stay shared, as in the model.
    """
    if why_not_repeated(draft.module) is not None:
        return
    (output,) = draft.graph.find_nodes(op="output")
    constants: set[fx.Node] = set()
    for node in draft.graph.nodes:
        is_part = (
            node.op == "call_function" and may_alias(node.target) and not constants.isdisjoint(node.all_input_nodes)
        )
        if is_part or node.op == "get_attr":
            constants.add(node)
    for node in [node for node in output.all_input_nodes if node in constants]:
        with draft.graph.inserting_before(output):
            copied = draft.graph.call_function(torch.ops.aten.clone.default, (node,))
        copied.meta = dict(node.meta)
        output.replace_input_with(node, copied)
    draft.touch()


def _set_apart(draft: Program) -> None:
    """Take kernels that others were made of out of the module, with their tensors: these are looked up there later."""
    joined = {id(part) for kernel in draft.root.modules() if isinstance(kernel, Kernel) for part in kernel.made_of}
    for owner in list(draft.root.modules()):
        for name, child in list(owner._modules.items()):
            if id(child) in joined:
                del owner._modules[name]


def _flat(module: fx.GraphModule) -> fx.GraphModule:
    """A module that takes flat inputs and gives flat outputs."""
    module.graph.set_codegen(CodeGen())
    module.recompile()
    return module


def _leaves(program: Program, inputs: tuple[Any, ...]) -> list[Any]:
    leaves, spec = program.signature.flatten(inputs, {})
    program.signature.check(leaves, spec)
    return leaves


def _place(
    draft: Program, target: str, choosing: Choosing
) -> tuple[dict[fx.Node, Placed], dict[fx.Node, Choice], dict[fx.Node, str]]:
    """Replace ops by kernels; the placement of each, by the node that now computes it, and its former name."""
    makers = kernels_for(target)
    sizes = example_sizes(draft)
    placed: dict[fx.Node, Placed] = {}
    choices: dict[fx.Node, Choice] = {}
    keys: dict[fx.Node, str] = {}
    for path, graph in draft.graphs():
        for node in list(graph.nodes):
            call = Call(draft, node)
            if node.op != "call_function" or (call.op not in makers and op_of(node.target) is None):
                continue
            found, reason = candidates(makers.get(call.op, []), call, choosing.allow_float)
            if not found:
                placed[node] = Placed(node.name, call.op, "", reason)
                continue
            # kernels that absorb other ops come first, and are not compared with those that do not
            alike = [item.kernel for item in found if item.inputs == found[0].inputs]
            key = f"{path}/{node.name}" if path else node.name
            choice = _as_saved(by_table(target, alike, found[0].inputs, sizes), choosing.saved.get(key), key)
            running = _put(draft, graph, call, Placement(choice.taken, found[0].inputs))
            placed[running] = Placed(node.name, call.op, choice.taken.name, reason)
            choices[running], keys[running] = choice, key
    return placed, choices, keys


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


def _exchange(draft: Program, node: fx.Node, kernel: Kernel) -> None:
    """Have another kernel run a node."""
    path, _, name = str(node.target).rpartition(".")
    owner = draft.owner(node.graph)
    (owner.get_submodule(path) if path else owner).add_module(name, kernel)
    draft.touch()  # the module that was made of it has the other one


def _share_tensors(copy: nn.Module, root: nn.Module) -> None:
    """Let a copy share the tensors of its source: weights need not be held twice."""
    for (_, to), (_, source) in zip(copy.named_modules(), root.named_modules(), strict=True):
        to._buffers.update(source._buffers)
        to._parameters.update(source._parameters)


def candidates(makers: list[Maker], call: Call, allow_float: bool) -> tuple[list[Placement], str]:
    """Kernels that support a call, and the reasons of those that do not."""
    if not call.inputs and isinstance(call["x"], Tensor):
        return [], "its activation is a constant"
    if call["rounding"] not in (None, "half-even") or call["saturate"] is False:
        return [], "kernels round half to even and saturate"
    found: list[Placement] = []
    reasons: list[str] = []
    for maker in makers:
        try:
            made = maker(call)
        except NoKernelError as refusal:
            reasons.append(str(refusal))
            continue
        placement = made if isinstance(made, Placement) else Placement(made, call.inputs)
        if allow_float or not placement.kernel.computes_in_float:
            found.append(placement)
    return found, "; ".join(dict.fromkeys(reasons)) or ("" if found else "there is no kernel for it")


def _put(draft: Program, graph: fx.Graph, call: Call, placement: Placement) -> fx.Node:
    name = f"{PREFIX}{call.node.name}"
    draft.owner(graph).add_module(name, placement.kernel)
    with graph.inserting_before(call.node):
        made = graph.call_module(name, placement.inputs)
    made.meta = {**call.node.meta, HIGHEST: highest_level(call.node)}
    call.node.replace_all_uses_with(made)
    before = call.node.all_input_nodes
    graph.erase_node(call.node)
    for node in before:
        is_kernel = node.op == "call_module" and isinstance(draft.owner(graph).get_submodule(str(node.target)), Kernel)
        if is_kernel and not node.users:  # dequantized a weight that the new kernel reads as stored
            graph.erase_node(node)
    draft.touch()
    return made
