"""A user's model as a benchmark task, for `quantc bench SOURCE`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch.utils import _pytree as pytree

from quantc.bench.models import CALIBRATION_SEED, COUNT, UNSEEN_SEED, Inputs, Task
from quantc.cli.data_source import Data, batches_of
from quantc.cli.model_source import load_all
from quantc.cli.noise_inputs import noise_like
from quantc.errors import DataError, LoadError, ModeError
from quantc.ir.program import Program, Stage
from quantc.verbs.capture import Method

MAX_BATCHES = 16
HELD_OUT = 4
"""Every fourth batch is not calibrated with."""


def own_task(source: str, data: str | None, method: Method) -> tuple[Task, tuple[str, ...]]:
    """Task of a SOURCE and a --data, and notes on it."""
    own = None if data is None else Data.read(data)
    loaded = load_all(source, method, None if own is None else own.examples)
    program = loaded.program
    _check_float(program, source)
    given: Iterable[Any] | None = None
    notes: list[str] = []
    if own is not None:
        read = own.batches(program)
        given, notes = read.values, list(read.notes)
    elif loaded.batches is not None:
        given = batches_of(source, loaded.batches)
    if given is None:
        calibration, unseen = (_noise(program, source, seed) for seed in (CALIBRATION_SEED, UNSEEN_SEED))
        notes.append(
            "there are no batches, so inputs are noise like the example inputs: SQNR says little about real ones"
        )
    else:
        calibration, unseen = _split_batches(given, source)
        if unseen is calibration:
            notes.append("there is one batch: SQNR is of what was calibrated with")
    is_module = loaded.model is not None
    model = loaded.model if loaded.model is not None else program.module
    return Task(program.name, model, calibration, unseen, None if is_module else program), tuple(notes)


def _check_float(program: Program, source: str) -> None:
    if program.stage >= Stage.ANNOTATED:
        raise LoadError(
            f"{program.name} is quantized, or about to be",
            where=f"{source}: its stage is {program.stage.label}",
            advice="give the float model: every contender quantizes it in its own way",
        )
    if program.training:
        raise ModeError(f"{program.name} is in training mode", where=source, advice="call model.eval() first")


def _split_batches(given: Iterable[Any], source: str) -> tuple[Inputs, Inputs]:
    """Batches to calibrate with, and batches that were held out; the same one where there is no other."""
    batches = [_positional(batch, source) for batch in islice(given, MAX_BATCHES)]
    if not batches:
        raise DataError("no batches", where=source, advice="give at least two: one of them is held out")
    held = max(1, len(batches) // HELD_OUT)
    return (batches[:-held], batches[-held:]) if len(batches) > 1 else (batches, batches)


def _positional(batch: Any, source: str) -> tuple[Any, ...]:
    if isinstance(batch, dict):
        raise LoadError(
            "a batch has names for its inputs, and not all contenders can be called with names",
            where=source,
            advice="give tuples of inputs, in the order of the model's arguments",
        )
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _noise(program: Program, source: str, seed: int) -> Inputs:
    """Noise like the example inputs, in the order of the model's arguments."""
    batches: Inputs = []
    for leaves in noise_like(program, source, seed, COUNT):
        args, kwargs = pytree.tree_unflatten(leaves, program.signature.in_spec)
        if kwargs:
            _positional(kwargs, source)
        batches.append(tuple(args))
    return batches
