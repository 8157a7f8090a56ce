"""What `quantc quantize` does: finds a model and its batches, quantizes it, and measures what it can measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer
from torch.export import Dim

from quantc.api import Form, Method, capture
from quantc.batches import Data, batches_of
from quantc.config import QuantConfig
from quantc.errors import CalibrationError
from quantc.example import Digits, digits_cnn, digits_data
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.one_call import Mode, Result, Steps, quantize_program
from quantc.program import Program
from quantc.progress import Style
from quantc.source import load_all
from quantc.spec import QuantSpec
from quantc.terminal import Screen


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The share of held-out images that are recognised."""

    before: float
    after: float
    images: int

    def __str__(self) -> str:
        return f"float {self.before:.2%}, quantized {self.after:.2%} of {self.images} held-out images"


@dataclass(frozen=True)
class Job:
    """A float program, batches if there are any, and the images to measure it on if there are any."""

    program: Program
    batches: Iterable[Any] | None
    notes: tuple[str, ...] = ()
    held_out: Digits | None = None


@dataclass(frozen=True)
class Done:
    """What came of a job."""

    result: Result
    accuracy: Accuracy | None

    def to_data(self) -> dict[str, Any]:
        return {
            **self.result.report.to_data(),
            "accuracy": asdict(self.accuracy) if self.accuracy is not None else None,
        }

    @property
    def extra(self) -> dict[str, str]:
        """What the report says besides."""
        return {"accuracy": str(self.accuracy)} if self.accuracy is not None else {}

    def show(self, screen: Screen) -> None:
        """Print it."""
        self.result.report.show(screen, self.extra)

    def to_html(self) -> str:
        """The report as a page."""
        return self.result.report.to_html(self.extra)


def find(source: str | None, data: str | None, method: Method) -> Job:
    """The job of a SOURCE and a --data; without SOURCE, the embedded example with its own data."""
    if source is None:
        return _example(data, method)
    given = None if data is None else Data.read(data)
    loaded = load_all(source, method, None if given is None else given.examples)
    if given is not None:
        batches = given.batches(loaded.program)
        return Job(loaded.program, batches.values, batches.notes)
    return Job(loaded.program, None if loaded.batches is None else batches_of(source, loaded.batches))


def _example(data: str | None, method: Method) -> Job:
    model, inputs = digits_cnn()
    batches, held_out = digits_data()
    program = capture(model, inputs, method, dynamic_shapes=({0: Dim("batch")},))
    if data is None:
        return Job(program, batches, held_out=held_out)
    given = Data.read(data).batches(program)
    return Job(program, given.values, given.notes, held_out)


@dataclass(frozen=True)
class Wanted:
    """How a model is to be quantized, as the command line has it."""

    backend: Any
    mode: Mode = "static"
    specs: tuple[QuantSpec, ...] = ()
    """For everything, on top of what the mode asks for."""
    config: QuantConfig | None = None
    """The last word."""
    to: Form = "qdq"
    reduce_range: RangeReduction = "auto"
    held_out: int | None = None
    """How many of the last batches to measure on, and not to calibrate with."""

    @property
    def whole_config(self) -> QuantConfig:
        """The specs and the config as one."""
        everywhere = QuantConfig()
        for spec in self.specs:
            everywhere = everywhere.set_all(spec)
        return everywhere + (self.config or QuantConfig())


def carry_out(
    source: str | None,
    data: str | None,
    wanted: Wanted,
    method: Method,
    say: Callable[[str], None],
    progress: Style,
) -> Done:
    """Quantize, and measure on held-out images where there are some; `say` is told what is going on."""
    steps = Steps(lambda name: say(f"{name} ..."))
    with steps("capture"):
        job = find(source, data, method)
    for note in job.notes:
        say(f"note: {note}")
    try:
        result = quantize_program(
            job.program,
            job.batches,
            wanted.backend,
            steps=steps,
            config=wanted.whole_config,
            mode=wanted.mode,
            to=wanted.to,
            reduce_range=wanted.reduce_range,
            held_out=wanted.held_out,
            progress=progress,
        )
    except CalibrationError as error:
        if job.batches is not None:
            raise
        raise typer.BadParameter(
            f"{error.what}. Give FILE.npz, FILE.safetensors or package.module:factory, or let the model's factory return "
            "(model, example_inputs, batches); --mode dynamic and --mode weight-only need no data.",
            param_hint="--data",
        ) from error
    if job.held_out is None:
        return Done(result, None)
    say("measure ...")
    before, after = (_recognised(program, job.held_out) for program in (job.program, result.program))
    return Done(result, Accuracy(before, after, len(job.held_out.labels)))


@torch.inference_mode()
def _recognised(program: Program, held_out: Digits) -> float:
    return float((program(held_out.images).argmax(1) == held_out.labels).double().mean())
