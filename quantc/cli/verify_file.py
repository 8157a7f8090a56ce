"""Checks of `quantc verify`, step by step. The first step that fails raises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quantc.errors import VerifyError
from quantc.ir.program import Program


@dataclass(frozen=True, slots=True)
class Finding:
    """One check and its result."""

    checked: str
    found: str


def check_up(program: Program) -> Iterator[Finding]:
    """Check the IR's invariants, then run the program once on its example inputs if it has any."""
    program.verify()
    graphs = list(program.graphs())
    nodes = sum(len(graph.nodes) for _, graph in graphs)
    yield Finding(
        "rules of the IR", f"no fault in {nodes:,} nodes, {len(graphs)} graph{'s' if len(graphs) > 1 else ''}"
    )
    plan = program.plan
    if not plan.is_empty:
        seen = f"{len(plan.statistics)} with statistics of {plan.batches} batches" if plan.batches else "not calibrated"
        yield Finding("plan", f"{len(plan.claims)} nodes claimed, {len(plan.groups)} groups of places, {seen}")
    yield Finding("run", _run(program))


@torch.no_grad()
def _run(program: Program) -> str:
    if program.example_inputs is None:
        return "not run: there are no example inputs"
    try:
        outputs = program.run_flat(program.example_inputs)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise VerifyError(
            f"{program.name} does not run on its example inputs",
            [reason],
            where=f"stage {program.stage.label}",
            advice="make the program again from the model",
        ) from error
    tensors = [value for value in outputs if isinstance(value, torch.Tensor)]
    bad = sum(int((~torch.isfinite(value)).sum()) for value in tensors)
    told = f", {bad:,} values of which are NaN or infinite" if bad else ""
    return f"{len(outputs)} output{'s' if len(outputs) != 1 else ''} from the example inputs{told}"
