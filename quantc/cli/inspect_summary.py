"""Summary of a program's contents: the data behind `quantc inspect`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from quantc.calibration.underflow import coarse_groups
from quantc.integer.library import op_of
from quantc.ir.dialect import BY_TARGET, is_opaque, op_name
from quantc.ir.program import LogEntry, Program


@dataclass(frozen=True, slots=True)
class OpCount:
    """Number of occurrences of an op. `kind` is "canonical", "aten" (no short name), "integer" (of `torch.ops.quantc`),
    "higher-order", "python" or "opaque".
    """

    op: str
    count: int
    kind: str


@dataclass(frozen=True, slots=True)
class Summary:
    name: str
    method: str
    stage: str
    mode: str
    nodes: int
    parameters: int
    """Number of elements of its parameters; a tied one counts once."""
    bytes: int
    """The size of parameters and buffers."""
    opaque: tuple[str, ...]
    graphs: tuple[str, ...]
    """The nested graphs of higher-order ops."""
    ops: tuple[OpCount, ...]
    log: tuple[LogEntry, ...]
    warnings: tuple[str, ...] = ()
    """Tensors that are too small for the smallest scale."""

    @property
    def why(self) -> str:
        """Notes of the capture."""
        captured = next((entry for entry in self.log if entry.name.startswith("capture")), None)
        return "; ".join(captured.notes) if captured is not None else ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "why": self.why}


def summarize(program: Program) -> Summary:
    """Summarize a program in one walk."""
    calls: Counter[tuple[str, str]] = Counter()
    nodes = 0
    for node in program.nodes():
        nodes += 1
        if node.op.startswith("call_"):
            calls[op_name(node), _kind(node)] += 1
    parameters = list(program.root.parameters())
    tensors: list[torch.Tensor] = [*parameters, *program.root.buffers()]
    return Summary(
        name=program.name,
        method=program.method,
        stage=program.stage.label,
        mode="train" if program.training else "eval",
        nodes=nodes,
        parameters=sum(parameter.numel() for parameter in parameters),
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        opaque=tuple(f"{program.describe(node)}: {op_name(node)}" for node in program.opaque()),
        graphs=tuple(path for path, _ in program.graphs() if path),
        ops=tuple(
            OpCount(op, count, kind)
            for (op, kind), count in sorted(calls.items(), key=lambda item: (-item[1], item[0]))
        ),
        log=tuple(program.log),
        warnings=tuple(map(str, coarse_groups(program))),
    )


def _kind(node: fx.Node) -> str:
    if is_opaque(node):
        return "opaque"
    if isinstance(node.target, HigherOrderOperator):
        return "higher-order"
    if op_of(node.target) is not None:
        return "integer"
    if isinstance(node.target, OpOverload):
        return "canonical" if node.target in BY_TARGET else "aten"
    return "python"
