"""Recurrent layers as loops.

ExecuTorch's exporter unrolls a recurrent layer step by step, which takes minutes for a few dozen steps. Here the input
GEMMs of all steps are one linear layer, which a delegate takes like any other, and the steps are one `scan`, whose body
is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

Step = Callable[[Sequence[Tensor], Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""From the state, the product with the input, that with the state's weight, and its bias to the next state."""


def _lstm_step(state: Sequence[Tensor], given: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    hidden, cell = state
    gates = given + torch.mm(hidden, weight)
    enter, forget, candidate, leave = gates.chunk(4, -1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru_step(state: Sequence[Tensor], given: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    (hidden,) = state
    reset, update, candidate = given.chunk(3, -1)
    of_reset, of_update, of_candidate = (torch.mm(hidden, weight) + bias).chunk(3, -1)
    kept = (update + of_update).sigmoid()
    new = (candidate + (reset + of_reset).sigmoid() * of_candidate).tanh()
    return (new + kept * (hidden - new),)


def _rnn_step(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(state: Sequence[Tensor], given: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return (activation(given + torch.mm(state[0], weight)),)

    return step


STEPS: dict[str, Step] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": _rnn_step(torch.tanh),
    "rnn_relu": _rnn_step(torch.relu),
}
"""By the name of the op."""
ONE_BIAS = ("lstm", "rnn_tanh", "rnn_relu")
"""Ops that add both biases in one place: the products with the inputs take them along."""


def unrolled_loop(op: str) -> Callable[..., tuple[Tensor, ...]]:
    """Function with the semantics and signature of ATen's op of that name, for inference."""

    def run(
        x: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        states = list(hx) if isinstance(hx, list | tuple) else [hx]
        each = 4 if has_biases else 2
        y, directions = x, 2 if bidirectional else 1
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(num_layers):
            made = []
            for direction in range(directions):
                place = layer * directions + direction
                own = params[place * each : (place + 1) * each]
                start = tuple(state[place] for state in states)
                # input GEMMs come first: they read the quantized tensors directly
                given = _given(op, y, own)
                given = given.transpose(0, 1) if batch_first and layer == 0 else given
                out, end = _one_direction(op, given.flip(0) if direction else given, start, own)
                made.append(out.flip(0) if direction else out)
                ends.append(end)
            y = torch.cat(made, -1) if directions > 1 else made[0]
        last = [torch.stack(parts) for parts in zip(*ends, strict=True)]
        return (y.transpose(0, 1) if batch_first else y, *last)

    return run


def _given(op: str, x: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Input GEMMs with their biases, for all steps."""
    product = nn.functional.linear(x, params[0])
    if len(params) == 2:
        return product
    return product + (params[2] + params[3] if op in ONE_BIAS else params[2])


def _one_direction(
    op: str, given: Tensor, start: tuple[Tensor, ...], params: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    across = params[1]
    bias = params[3] if len(params) > 2 else torch.zeros(across.shape[0])
    weight = across.t().contiguous()  # once, and not in each step

    def step(state: tuple[Tensor, ...], row: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        new = STEPS[op](state, row, weight, bias)
        return new, new[0].clone()

    end, made = scan(step, start, given)
    return made, end
