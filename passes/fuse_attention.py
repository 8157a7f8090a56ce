"""Fusion of float attention into torch's op for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from quantc.ir.dialect import is_op
from quantc.ir.program import Program, Stage
from quantc.ir.types import TensorType, tensor_type
from quantc.passes.eliminate_dead import EliminateDead
from quantc.pipeline.pipeline import Outcome, Pass, Preserves

SDPA: Any = torch.ops.aten.scaled_dot_product_attention.default
RANK = 4
"""Number of axes that torch's kernel reads: batch, head, token, channel."""


class FuseAttention(Pass):
    """Fuse float attention into `scaled_dot_product_attention`: matmul, scale, softmax, matmul.

    Backends take attention apart to quantize its products. Where none was quantized, as in dynamic mode, the fused op
    is faster and no less exact.
    """

    name: ClassVar[str] = "fuse-attention"
    needs: ClassVar[Stage] = Stage.PLACED
    preserves: ClassVar[Preserves] = Preserves.STEPWISE

    def run(self, program: Program) -> Outcome:
        found = [
            match
            for _, graph in program.graphs()
            for node in graph.nodes
            if is_op(node, "matmul") and (match := attention_at(node)) is not None
        ]
        for match in found:
            operands = (match.query, match.key, match.value)
            made = program.emit(SDPA, operands, {"scale": match.scale}, before=match.root, like=match.root)
            program.placements.stand_ins[made] = program.placements.stands_for(match.root)
            program.replace(match.root, made)
        if found:
            EliminateDead().run(program)
        return Outcome(bool(found), (f"fused {len(found)} attentions",) if found else ())


@dataclass(frozen=True)
class Attention:
    """Operands and root of an unmasked attention."""

    root: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    scale: float


def attention_at(root: fx.Node) -> Attention | None:
    """Attention whose second matmul is `root`; None if there is none."""
    weights: Any = root.args[0]
    value: Any = root.args[1]
    if not _is_only_read_by_one(weights, "softmax") or weights.args[1:] not in ((-1,), (RANK - 1,)) or weights.kwargs:
        return None
    scaled: Any = weights.args[0]
    scale = 1.0
    if _is_only_read_by_one(scaled, "mul", "div"):
        factor: Any = scaled.args[1]
        if not isinstance(factor, int | float) or not factor:
            return None
        scale = float(factor) if is_op(scaled, "mul") else 1.0 / factor
        scaled = scaled.args[0]
    if not _is_only_read_by_one(scaled, "matmul"):
        return None
    query, turned = scaled.args[:2]
    if not is_op(turned, "transpose") or {axis % RANK for axis in turned.args[1:3]} != {RANK - 2, RANK - 1}:
        return None
    key = turned.args[0]
    fits = _fit(*(tensor_type(operand) for operand in (query, key, value)))
    return Attention(root, query, key, value, scale) if fits else None


def _is_only_read_by_one(node: Any, *ops: str) -> bool:
    return isinstance(node, fx.Node) and is_op(node, *ops) and len(node.users) == 1


def _fit(query: TensorType | None, key: TensorType | None, value: TensorType | None) -> bool:
    """True if torch's SDPA kernel takes these operands: no broadcasting, and equal head sizes."""
    if query is None or key is None or value is None:
        return False
    kinds = (query, key, value)
    if any(kind.dtype is not torch.float32 or kind.rank != RANK for kind in kinds):
        return False
    alike = {(*kind.shape[:2], kind.shape[3]) for kind in kinds}
    return len(alike) == 1 and key.shape[2] == value.shape[2]
