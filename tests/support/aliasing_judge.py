"""Judges an aliasing program: every form that quantc makes of it beside the eager model, call after call."""

from __future__ import annotations

import copy
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.errors import PassError, PipelineError, VerifyError
from quantc.flows import tracing
from tests.support.aliasing_programs import COLUMNS, PLACES, ROWS, VIEWS, Net, drawn, quiet, write

EXACT, QUANTIZED, SEEN = 1e-4, 0.3, 0.6
"""How far, beside its norm, a result may be off in float, and quantized; how far it must be off if the write is lost."""
BACKENDS = ("x86", "qnnpack", "executorch", "onnx")
TRACED_BACKENDS = ("x86", "qnnpack")
METHODS = ("export", "fx")
FAULTS = (PassError, VerifyError, PipelineError)
"""Errors that are no refusals: quantc found a fault of its own."""
CALLS = 3
"""How often each form is called: what a module records at its first calls it must not get wrong at later ones."""
TRACED_CALLS = 10
"""How often a traced model is called, for the same reason."""


@dataclass(frozen=True)
class Case:
    """One program, the way it is captured and the backend it is made for."""

    write: str
    view: str
    place: str
    method: str
    backend: str

    def __str__(self) -> str:
        return f"{self.write} | {self.view} | {self.place} | {self.method} | {self.backend}"

    def net(self) -> Net:
        torch.manual_seed(7)
        return Net(self.place, VIEWS[self.view], write(self.write)).eval()

    def inputs(self, call: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(call)
        x = torch.randn(ROWS, COLUMNS, generator=generator)
        return (x, x) if self.place == "two inputs" and call else (x, torch.randn(ROWS, COLUMNS, generator=generator))


@dataclass
class Verdict:
    """What became of some programs: right in all forms, refused (why), or wrong (how)."""

    right: int = 0
    quantized: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)

    def add(self, case: Case) -> None:
        try:
            self.quantized += judge(case)
            self.right += 1
        except WrongError as error:
            self.wrong[str(case)] = str(error)
        except RefusedProgramError as error:
            self.refused[str(error)] += 1

    def __str__(self) -> str:
        rows = [
            f"{self.right} right ({self.quantized} with something quantized), {self.refused.total()} refused, {len(self.wrong)} wrong"
        ]
        rows += [f"  refused {count} times: {reason}" for reason, count in self.refused.most_common()]
        rows += [f"  {case}: {how}" for case, how in self.wrong.items()]
        return "\n".join(rows)


class WrongError(Exception):
    """A form that does not do what the eager model does."""


class RefusedProgramError(Exception):
    """A program that was refused, with a reason."""


def cases(seed: int, methods: Sequence[str] = METHODS, backends: Sequence[str] = BACKENDS) -> Iterator[Case]:
    """Programs without end, each of which eager PyTorch runs, and whose write shows in what it gives or leaves."""
    draw = random.Random(seed)
    while True:
        name = drawn(draw)
        if name is None:
            continue
        case = Case(
            name,
            draw.choice(list(VIEWS)),
            draw.choice(list(PLACES)),
            draw.choice(methods),
            draw.choice(backends),
        )
        if is_telling(case):
            yield case


def is_telling(case: Case) -> bool:
    """Whether eager PyTorch runs a program, its write shows, and a little noise changes little."""
    net = case.net()
    lost, noisy = copy.deepcopy(net), copy.deepcopy(net)
    lost.write = lambda v: None
    with torch.no_grad(), quiet():
        for parameter in noisy.parameters():
            parameter.add_(0.01 * parameter.abs().mean() * torch.randn_like(parameter))
        try:
            right, without = (observed(each, case.inputs()) for each in (copy.deepcopy(net), lost))
            pairs = [
                pair
                for call in range(CALLS)
                for pair in zip(observed(net, case.inputs(call)), observed(noisy, case.inputs(call)), strict=True)
            ]
        except Exception:  # noqa: BLE001 - whatever PyTorch refuses is no program
            return False
    if not all(value.numel() and float(value.abs().max()) < 200 for value in right):
        return False
    shows = any(_off(value, other) > SEEN for value, other in zip(right, without, strict=True))
    return shows and all(_off(value, shaken) < QUANTIZED / 4 for value, shaken in pairs)


def observed(call: Callable[..., Any], inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
    """What a call gives, and what it leaves in its inputs."""
    given = as_given(inputs)
    results = [value for value in pytree.tree_leaves(call(*given)) if isinstance(value, Tensor)]
    return [*(value.clone() for value in results), *given]


def as_given(inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Inputs in memory of their own; one tensor given twice stays one."""
    first = inputs[0].clone()
    return first, first if inputs[1] is inputs[0] else inputs[1].clone()


def judge(case: Case, *, lower_all: bool = False) -> bool:
    """Raises WrongError or RefusedProgramError; gives whether anything was quantized."""
    if case.method == "tracing":
        return judge_traced(case)
    net = case.net()
    with torch.no_grad(), quiet():
        program = _made("capture", lambda: qc.capture(net, case.inputs(), case.method))  # type: ignore[arg-type]
        _compare("captured", program.clone(), case, EXACT)
        prepared = _made("prepare", lambda: qc.prepare(program, case.backend))
        _compare("prepared", prepared.clone(), case, EXACT)
        batches = [case.inputs(call) for call in range(CALLS)]
        try:
            _made("calibrate", lambda: qc.calibrate(prepared, batches))
        except RefusedProgramError as error:
            if "nothing" in str(error):
                return False
            raise
        _compare("calibrated", prepared.clone(), case, EXACT)
        program = _made("convert", lambda: qc.convert(prepared))
        _compare("converted", program.clone(), case, QUANTIZED)
        integer = _made("to integer", lambda: qc.convert(prepared, to="integer"))
        _compare("integer", integer.clone(), case, QUANTIZED)
        if case.backend != "executorch" or lower_all:
            lowered = _made("lower", lambda: qc.lower(program, case.backend))
            _compare("lowered", lowered, case, QUANTIZED)
    return True


def judge_traced(case: Case) -> bool:
    """The same of the tracing flow."""
    net = case.net()
    with torch.no_grad(), quiet():
        prepared = _made("prepare", lambda: tracing.prepare(net, case.inputs(), case.backend))
        _compare("prepared", copy.deepcopy(prepared), case, EXACT)
        for call in range(CALLS):
            _reset(prepared, net)
            _made("calibrate", partial(prepared, *as_given(case.inputs(call))))
        converted = _made("convert", lambda: tracing.convert(prepared))
        _reset(converted, net)
        _compare("converted", converted, case, QUANTIZED, TRACED_CALLS)
        return bool(tracing.coverage(converted).rows_for("quantized"))


def _reset(model: Any, net: Net) -> None:
    """Let the buffer be again what it was at first; a write may have given it another shape."""
    if model.kept.shape == net.kept.shape:
        model.kept.copy_(net.kept)
    else:
        model.kept = net.kept.clone()


def _made(step: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except FAULTS as error:
        raise WrongError(f"{step}: {type(error).__name__}: {first(error)}") from error
    except qc.QuantcError as error:
        raise RefusedProgramError(f"{step}: {type(error).__name__}: {plain(first(error))}") from error
    except Exception as error:
        raise WrongError(f"{step}: bare {type(error).__name__}: {first(error)}") from error


def first(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]


def plain(text: str) -> str:
    """A reason without the names of this one program."""
    return re.sub(r"aten\S+|[a-z_]+_\d+|\d+", "…", text)


def _compare(form: str, made: Callable[..., Any], case: Case, allowed: float, calls: int = CALLS) -> None:
    eager = case.net()
    # ranges are found with buffers as they are at the first call
    first_only = allowed == QUANTIZED and case.place.startswith("buffer")
    for call in range(1 if first_only else calls):
        inputs = case.inputs(call % CALLS)  # which calibration saw
        expected = observed(eager, inputs)
        try:
            found = observed(made, inputs)
        except qc.QuantcError as error:
            raise WrongError(f"{form}: refused when it was called: {first(error)}") from error
        except Exception as error:
            raise WrongError(f"{form}: bare {type(error).__name__} when called: {first(error)}") from error
        if len(expected) != len(found):
            raise WrongError(f"{form}: {len(found)} values, not {len(expected)}")
        for index, (right, value) in enumerate(zip(expected, found, strict=True)):
            if right.shape != value.shape or right.dtype != value.dtype:
                raise WrongError(f"{form}: value {index} of call {call} is {value.dtype} {tuple(value.shape)}")
            if (off := _off(right, value)) > allowed:
                what = "an input" if index >= len(expected) - 2 else f"output {index}"
                raise WrongError(f"{form}: {what} of call {call} is off by {off:.3g} of its norm")


def _off(right: Tensor, value: Tensor) -> float:
    if right.shape != value.shape:
        return float("inf")
    difference = float((right.double() - value.double()).norm())
    return difference / max(float(right.double().norm()), 1e-6)


def search(seed: int, count: int, methods: Sequence[str] = METHODS, backends: Sequence[str] = BACKENDS) -> Verdict:
    """Judge so many programs."""
    verdict = Verdict()
    for case in islice(cases(seed, methods, backends), count):
        verdict.add(case)
    return verdict


def search_traced(seed: int, count: int) -> Verdict:
    """Judge so many programs in the tracing flow."""
    return search(seed, count, ("tracing",), TRACED_BACKENDS)


if (
    __name__ == "__main__"
):  # python -m tests.support.aliasing_judge SEED COUNT [traced]: counts, and why programs are refused
    judged = search_traced if "traced" in sys.argv else search
    sys.stdout.write(f"{judged(int(sys.argv[1]), int(sys.argv[2]))}\n")
