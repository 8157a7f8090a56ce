"""The module that runs on kernels: a pipeline places them, and of several choices among them the fastest whole is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen

from quantc.ir.placements import KernelChoice, Placed, StandIn
from quantc.ir.program import LogEntry, Program, Stage
from quantc.pipeline.pipeline import Hook, Pipeline
from quantc.support.progress import Style
from quantc.targets.kernels.codegen import straight_line, why_not_repeated
from quantc.targets.kernels.program_race import fastest, race
from quantc.targets.kernels.replay import Replayed
from quantc.targets.kernels.tuning import Times, check_inputs
from quantc.targets.target_table import placing_pipeline

PLACING = "place-kernels"
"""The pass whose options a lowering sets."""


@dataclass(frozen=True, slots=True)
class Choosing:
    """Options of kernel selection."""

    tune: bool | tuple[Any, ...] = False
    """True to time kernels here, or the inputs to time them on."""
    allow_float: bool = False
    """True to allow products of bytes in float where that is faster."""
    progress: Style = "auto"
    saved: Mapping[str, str] = field(default_factory=dict)
    """The kernels that were chosen before, by op: `branch/conv2d` for one in a nested graph."""
    pipeline: Pipeline | None = None
    """The pipeline from the integer form onto kernels; None for the target's own."""
    hooks: tuple[Hook, ...] = ()
    """The hooks of that pipeline."""


@dataclass(frozen=True, slots=True)
class RunningForm:
    """A lowered program: module, placements and selected kernels."""

    module: fx.GraphModule
    """Takes the flat inputs and gives the flat outputs: trees take as long as a small layer."""
    placed: tuple[Placed, ...]
    choices: dict[str, str]
    """The kernel that was taken for each op, as `Choosing.saved` has it."""
    stand_ins: dict[str, StandIn]
    """The nodes of the program that nodes of the module stand for, by names; `branch/conv2d` in a nested graph."""
    log: tuple[LogEntry, ...]
    """The passes that made it of the integer form."""


def split(pipeline: Pipeline) -> tuple[Pipeline, Pipeline]:
    """Split a pipeline into the part up to the integer form, which stays beside the kernels, and the part onto
    kernels."""
    at = next(
        (index for index, step in enumerate(pipeline) if (step.gives or step.needs) > Stage.LOWERED), len(pipeline)
    )
    return Pipeline(pipeline.passes[:at]), Pipeline(pipeline.passes[at:])


def run_on_kernels(program: Program, target: str, choosing: Choosing) -> RunningForm:
    """Bring a program in integer form onto kernels; the program itself is not modified."""
    is_timed = choosing.tune is not False and not choosing.saved
    inputs = check_inputs(_inputs(program, choosing)) if is_timed else None
    made = _place_kernels(program, target, choosing, inputs)
    form = _form(made)
    others = _of_whole(made.placements.choices) if inputs is not None else {}
    if not others or why_not_repeated(form.module) is not None:
        return form
    saved = [replace(choosing, tune=False, saved=choices) for choices in others.values()]
    forms = {"measured": form, **{
        name: _form(_place_kernels(program, target, each, None)) for name, each in zip(others, saved, strict=True)
    }}  # fmt: skip
    taken = forms[fastest(_times_of_wholes(forms, inputs or ()))]
    alone = {row.node: row for row in form.placed}
    return replace(taken, placed=tuple(_with_times(row, alone.get(row.node)) for row in taken.placed))


def _place_kernels(program: Program, target: str, choosing: Choosing, inputs: Sequence[Any] | None) -> Program:
    """A copy of the program on kernels, which shares its tensors."""
    draft = program.draft()
    _share_tensors(draft.root, program.root)
    draft.log = []
    if inputs is not None:
        draft.example_inputs = tuple(inputs)
    pipeline = Pipeline.parse(placing_pipeline(target)) if choosing.pipeline is None else choosing.pipeline
    asked: dict[str, Any] = {"choices": dict(choosing.saved)} if choosing.saved else {}
    if choosing.allow_float:
        asked["allow_float"] = True
    if inputs is not None:
        asked |= {"tune": True, "progress": choosing.progress}
    steps = [step.model_copy(update=asked) if step.name == PLACING else step for step in pipeline]
    return Pipeline(tuple(steps)).run(draft, choosing.hooks)


def _form(placed: Program) -> RunningForm:
    rows = placed.placements
    module = placed.module
    module.graph.set_codegen(CodeGen())
    module.recompile()
    stand_ins = {
        f"{path}/{node.name}" if path else node.name: found
        for path, graph in placed.graphs()
        for node in graph.nodes
        if (found := rows.stand_ins.get(node)) is not None
    }
    choices = {key: choice.taken for key, choice in rows.choices.items()}
    return RunningForm(module, rows.placed, choices, stand_ins, tuple(placed.log))


def _with_times(row: Placed, alone: Placed | None) -> Placed:
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


def _inputs(program: Program, choosing: Choosing) -> Sequence[Any] | None:
    """Inputs for timing."""
    if isinstance(choosing.tune, bool):
        return program.example_inputs
    leaves, spec = program.signature.flatten(choosing.tune, {})
    program.signature.check(leaves, spec)
    return leaves


def _of_whole(choices: Mapping[str, KernelChoice]) -> dict[str, dict[str, str]]:
    """Other choices for all ops: as the table has them, and of one family each."""
    measured = {key: choice.taken for key, choice in choices.items()}
    found = {"table": {key: choice.families[0][0] for key, choice in choices.items()}}
    for family in sorted({family for choice in choices.values() for _, family in choice.families}, reverse=True):
        own = {
            key: next((name for name, of in choice.families if of == family), choice.taken)
            for key, choice in choices.items()
        }
        found[family] = own
    seen = [measured]
    for name, each in list(found.items()):
        if each in seen:
            del found[name]
        seen.append(each)
    return found


def _share_tensors(copy: nn.Module, root: nn.Module) -> None:
    """Let a copy share the tensors of its source: weights need not be held twice."""
    for (_, to), (_, source) in zip(copy.named_modules(), root.named_modules(), strict=True):
        to._buffers.update(source._buffers)
        to._parameters.update(source._parameters)
