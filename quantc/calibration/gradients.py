"""Gradients of layers' outputs for the Fisher information, without labels.

The label of each row of the output is drawn from the model's own distribution, as the information is defined. Its mean
square gradient weighs the errors of a layer by what they change of that distribution: KL(p ‖ p + δ) ≈ ½ δᵀFδ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from quantc.calibration.collect import Tap
from quantc.errors import CalibrationError
from quantc.ir.dialect import row_of
from quantc.ir.program import Program
from quantc.observe.module import observers_off


class _Tracked(fx.Interpreter):
    """Runs a graph with gradients, and keeps the values of some nodes."""

    def __init__(self, program: Program, nodes: set[fx.Node]) -> None:
        super().__init__(program.root, graph=program.graph)
        self.nodes = nodes
        self.kept: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self.nodes and isinstance(value, Tensor) and value.is_floating_point():
            if not value.requires_grad:
                value.requires_grad_()
            self.kept[n] = value
        return value


class Gradients:
    """The backward pass of a batch."""

    def __init__(self, program: Program, taps: Sequence[Tap]) -> None:
        self.program = program
        # nested graphs are run by ops of which autograd may know nothing
        self.taps = {tap.value: tap for tap in taps if tap.value.graph is program.graph}

    def of(self, leaves: Sequence[Any], batch: int) -> list[tuple[Tap, Tensor]]:
        """Gradients of each layer's output, as rows of its channels."""
        run = _Tracked(self.program, set(self.taps))
        with torch.enable_grad(), observers_off(self.program.root):
            outputs = run.run(*leaves)
            axis = next((int(tap.options["axis"]) for tap in self.taps.values() if "axis" in tap.options), -1)
            loss = self._loss(outputs, axis, batch)
            nodes = list(run.kept)
            found: tuple[Tensor | None, ...] = torch.autograd.grad(
                loss, [run.kept[node] for node in nodes], allow_unused=True
            )
        return [
            (self.taps[node], _rows(self.taps[node], gradient))
            for node, gradient in zip(nodes, found, strict=True)
            if gradient is not None
        ]

    def _loss(self, outputs: Any, axis: int, batch: int) -> Tensor:
        flat, _ = pytree.tree_flatten(outputs)
        floats = [x for x in flat if isinstance(x, Tensor) and x.is_floating_point() and x.dim() and x.requires_grad]
        if not floats:
            raise CalibrationError(
                "the Fisher information is that of logits, and no output has a gradient",
                where=self.program.name,
                advice="leave out fisher",
            )
        generator = torch.Generator().manual_seed(batch)
        return torch.stack([_log_likelihood(x.movedim(axis, -1), generator) for x in floats]).sum()


def _log_likelihood(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Log-likelihood of labels that are drawn from the distribution."""
    rows = torch.log_softmax(logits.reshape(-1, logits.shape[-1]).float(), dim=-1)
    labels = torch.multinomial(rows.detach().exp(), 1, generator=generator)
    return rows.gather(1, labels).sum()


def _rows(tap: Tap, gradient: Tensor) -> Tensor:
    """The channels of a convolution come before its spatial axes."""
    row = row_of(tap.value)
    axis = -1 - ((row.spatial if row is not None else None) or 0)
    return gradient.detach().float().movedim(axis, -1).reshape(1, -1, gradient.shape[axis]).clone()
