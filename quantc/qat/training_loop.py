"""A small training loop that detects common mistakes. Any other loop works as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from quantc.errors import TrainingError
from quantc.ir.program import Program, check_program
from quantc.qat.schedule import Schedule

FEW = 4
NEVER = Schedule()


@dataclass(frozen=True)
class TrainingReport:
    """Result of a training."""

    losses: tuple[float, ...]
    """One a step."""
    without_gradient: tuple[str, ...] = field(default=())
    """Parameters that no step has given a gradient."""

    def __str__(self) -> str:
        text = f"{len(self.losses)} steps, loss {self.losses[0]:.4g} -> {self.losses[-1]:.4g}"
        if self.without_gradient:
            text += f"; no gradient for {_list_names(self.without_gradient)}"
        return text


def train(
    prepared: Program,
    batches: Iterable[tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    optimizer: Optimizer,
    *,
    schedule: Schedule = NEVER,
    first_step: int = 1,
) -> TrainingReport:
    """Train a program prepared with `qat=True`, one step per batch.

    `batches` yields pairs of inputs and targets; several inputs go in a tuple. `loss` gets the output and the target.
    `schedule` says after which steps to freeze; a resumed training passes `first_step`.

    TrainingError, naming the step, if the loss is NaN or infinite, if no gradient reaches the program, if the optimizer
    trains other tensors than the program's, or if there are no batches. The program is as the last whole step left it.
    """
    check_program(prepared, "qat.train", "prepared = qc.prepare(program, backend, qat=True)")
    _check_live(prepared)
    _check_optimizer(prepared, optimizer)
    prepared.train()
    losses: list[float] = []
    silent: set[str] | None = None
    for step, (inputs, target) in enumerate(batches, start=first_step):
        optimizer.zero_grad()
        value = loss(prepared(*inputs) if isinstance(inputs, tuple) else prepared(inputs), target)
        _check_loss(prepared, value, step)
        value.backward()  # type: ignore[no-untyped-call]
        missing = _without_gradient(prepared, step)
        silent = missing if silent is None else silent & missing
        optimizer.step()
        losses.append(float(value.detach()))
        schedule.apply(prepared, step)
    if not losses:
        raise TrainingError(
            f"{prepared.name} was not trained: there were no batches",
            where="batches",
            advice="give at least one pair of inputs and targets; an iterator that was gone through gives none",
        )
    return TrainingReport(tuple(losses), tuple(sorted(silent or ())))


def _check_live(prepared: Program) -> None:
    if not prepared.is_live:
        raise TrainingError(
            f"{prepared.name} was not prepared for training",
            where=f"its stage is {prepared.stage.label}",
            advice="start from the program that qc.capture gave: qc.prepare(program, backend, qat=True)",
        )


def _check_optimizer(prepared: Program, optimizer: Optimizer) -> None:
    own = {id(parameter) for parameter in prepared.parameters()}
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if own.isdisjoint(given):
        raise TrainingError(
            "the optimizer trains other tensors than those of the program",
            where=f"none of its {len(given)} tensors is a parameter of {prepared.name}",
            advice="make it with prepared.parameters(): a program has copies of the model's parameters",
        )


def _check_loss(prepared: Program, value: Tensor, step: int) -> None:
    number = float(value.detach())
    if not math.isfinite(number):
        raise TrainingError(
            f"the loss is {number}",
            where=f"step {step} of {prepared.name}",
            advice="lower the learning rate, clip the gradients, or look for NaN in the data; then go on from the last "
            "state that was saved",
        )
    if not value.requires_grad:
        raise TrainingError(
            "the loss depends on no parameter, so there are no gradients",
            where=f"step {step} of {prepared.name}",
            advice="compute it from what the program gives, without .detach() or .item(), outside torch.no_grad()",
        )


def _without_gradient(prepared: Program, step: int) -> set[str]:
    """The parameters that a step has given no gradient. TrainingError if it is all of them, or if one is NaN."""
    wanted = {name: parameter.grad for name, parameter in prepared.named_parameters() if parameter.requires_grad}
    missing = {name for name, grad in wanted.items() if grad is None}
    if len(missing) == len(wanted):
        raise TrainingError(
            "no parameter was given a gradient",
            where=f"step {step} of {prepared.name}: {_list_names(sorted(missing))}",
            advice="compute the loss from what the program gives; it may come from somewhere else",
        )
    bad = [name for name, grad in wanted.items() if grad is not None and not math.isfinite(float(grad.sum()))]
    if bad:
        raise TrainingError(
            "gradients are NaN or infinite",
            where=f"step {step} of {prepared.name}: {_list_names(bad)}",
            advice="lower the learning rate, or clip the gradients; then go on from the last state that was saved",
        )
    return missing


def _list_names(names: Iterable[str]) -> str:
    given = list(names)
    more = f" and {len(given) - FEW} more" if len(given) > FEW else ""
    return f"{', '.join(given[:FEW])}{more}"
