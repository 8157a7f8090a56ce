"""Calibration checkpoints: statistics in a file, with the identity of program and plan.

A file records the digests of its program and plan, so that statistics of another are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from quantc.calibration.accumulator import Whole
from quantc.calibration.observed_tensors import data_groups, observed_sites
from quantc.errors import CalibrationError, LoadError
from quantc.ir.decisions import OUTCOMES
from quantc.ir.program import Program, attribute
from quantc.observe.module import behind, observer_nodes
from quantc.observe.store import Statistics
from quantc.text.digests import digest, state_digest
from quantc.text.literals import format_value
from quantc.text.target_names import callee_name

SIZE = 12
"""Bytes of a digest."""


def program_digest(program: Program) -> str:
    """Digest of a program's computation: ops, connections and constants. Observers do not count."""
    total = blake2b(digest_size=SIZE)
    observers = observer_nodes(program)
    for path, graph in program.graphs():
        owner = program.owner(graph)
        for node in graph.nodes:
            if node not in observers:
                text = format_value((node.args, node.kwargs), lambda operand: str(behind(operand, observers)))
                total.update(f"{path}/{node.name} {_what(node, owner)} {text}\n".encode())
    return total.hexdigest()


def _what(node: fx.Node, owner: nn.Module) -> str:
    if node.op == "call_function":
        return callee_name(node.target)
    value = attribute(owner, str(node.target)) if node.op in ("get_attr", "call_module") else None
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {digest(value)}"
    if isinstance(value, nn.Module) and not isinstance(value, fx.GraphModule):
        return f"{type(value).__qualname__} {state_digest(value)}"
    return f"{node.op} {node.target}"


def plan_digest(program: Program) -> str:
    """Digest of the calibrated groups and their specs."""
    total = blake2b(digest_size=SIZE)
    for group, _ in data_groups(program):
        members = " ".join(str(site) for site in group.values)
        total.update(f"{group.name}: {members} ".encode() + OUTCOMES.dump_json(group.outcome) + b"\n")
    return total.hexdigest()


def notes_for(program: Program, batches: int, samples: int | None) -> dict[str, Any]:
    """Notes saved with the statistics of a program."""
    return {
        "program": program_digest(program),
        "plan": plan_digest(program),
        "groups": observed_sites(program),
        "batches": batches,
        "samples": samples,
        "threads": torch.get_num_threads(),
    }


@dataclass(frozen=True)
class Checkpoint:
    """A file that is written every few batches, and read when the same calibration starts again."""

    path: Path
    every: int
    identity: Mapping[str, Any]
    """Identity of the statistics: program, plan, number of earlier batches, share of the data."""

    def read(self) -> tuple[Whole, int] | None:
        """State that an earlier run left, and its number of threads; None if there was none. A file of another
        calibration is refused.
        """
        if not self.path.exists():
            return None
        found = Statistics.load(self.path)
        for what, expected in self.identity.items():
            if found.notes.get(what) != expected:
                raise CalibrationError(
                    f"the checkpoint {self.path} is of another calibration: its {what} is "
                    f"{found.notes.get(what, 'missing')}, and here it is {expected}",
                    where=str(self.path),
                    advice="give the path of another file, or delete this one to start again",
                )
        whole = Whole(found.sites, _count(found, "batches"), _samples(found), found.collected)
        return whole, _count(found, "threads")

    def write(self, whole: Whole) -> None:
        notes = {"batches": whole.batches, "samples": whole.samples, "threads": torch.get_num_threads()}
        known = {what: value for what, value in self.identity.items() if value is not None}
        Statistics(whole.totals, {**known, **notes}, whole.collected).write(self.path)

    def is_due(self, batches: int) -> bool:
        return batches % self.every == 0


def _count(found: Statistics, name: str) -> int:
    value = found.notes.get(name)
    if type(value) is not int or value < 0:
        raise LoadError(f"the note {name!r} is {value!r}, not a count", advice="give a file that qc.calibrate wrote")
    return value


def _samples(found: Statistics) -> int | None:
    return None if found.notes.get("samples") is None else _count(found, "samples")
