"""Freezing in the last part of a training: norm statistics, and activation ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

from torch import nn

from quantc.errors import TrainingError
from quantc.ir.program import Program
from quantc.qat.fake import FakeQuantizer
from quantc.qat.freezing import Freezable
from quantc.qat.modes import ModeFlag
from quantc.qat.norms import FoldNorm, LiveNorm

Trained = Program | nn.Module
"""A program that was prepared with `qat=True`, its module, or that module distributed or compiled."""


def freeze_norms(trained: Trained) -> int:
    """Freeze the statistics of batch norms, in training too, and fold them as the converted program will. Scale and
    shift keep learning. Returns the number of changed modules.
    """
    return _freeze(trained, is_norm_part)


def freeze_ranges(trained: Trained) -> int:
    """Freeze the scales of activations, and learned scales. Weights, whose scales follow them, keep learning. Returns
    the number of changed modules.
    """
    return _freeze(trained, lambda module: isinstance(module, FakeQuantizer))


def is_norm_part(module: nn.Module) -> TypeGuard[Freezable]:
    """True if a module of a training program stems from a batch norm."""
    is_flag = isinstance(module, ModeFlag) and module.op == "batch_norm"
    return is_flag or isinstance(module, FoldNorm | LiveNorm)


def _freeze(trained: Trained, chosen: Callable[[nn.Module], bool]) -> int:
    found = list(_freezable(trained))
    if not any(isinstance(module, FakeQuantizer) for module in found):
        raise TrainingError(
            "there is nothing in it that is trained quantized",
            where=type(trained).__name__,
            advice="give the program that qc.prepare(program, backend, qat=True) gave, or its module",
        )
    changed = [module for module in found if chosen(module) and not module.frozen]
    for module in changed:
        module.frozen = True
    return len(changed)


def _freezable(trained: Trained) -> Iterator[Freezable]:
    root = trained.root if isinstance(trained, Program) else trained
    return (module for module in root.modules() if isinstance(module, Freezable))


@dataclass(frozen=True)
class Schedule:
    """Steps after which to freeze, counted from 1; None is never."""

    freeze_norms: int | None = None
    freeze_ranges: int | None = None

    def __post_init__(self) -> None:
        for name, step in vars(self).items():
            if step is not None and step < 1:
                raise TrainingError(
                    f"{name}: steps are counted from 1 (given: {step})",
                    where=str(self),
                    advice="freeze after the first step at the earliest: before it there is nothing to keep",
                )

    def apply(self, trained: Trained, step: int) -> None:
        """Freeze what is due after a step. Idempotent, as needed when training is resumed."""
        if self.freeze_norms is not None and step >= self.freeze_norms:
            freeze_norms(trained)
        if self.freeze_ranges is not None and step >= self.freeze_ranges:
            freeze_ranges(trained)
