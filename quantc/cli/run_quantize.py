"""Implementation of `quantc quantize`: finds a model and its batches, quantizes it, and measures the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer
from torch.export import Dim

from quantc.capture.cast_model import as_dtype
from quantc.cli.data_source import Data, batches_of
from quantc.cli.example import Digits, digits_cnn, digits_data
from quantc.cli.model_source import load_all
from quantc.config.config import QuantConfig
from quantc.errors import AnnotationError, CalibrationError
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.ir.batch_inputs import select_inputs
from quantc.ir.program import Program
from quantc.spec.spec import QuantSpec
from quantc.support.progress import Style
from quantc.support.terminal import Screen
from quantc.verbs.capture import Method, capture
from quantc.verbs.convert import Form
from quantc.verbs.quantize_model import Mode, Result, Steps, quantize_program


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Fraction of held-out images classified correctly."""

    before: float
    after: float
    images: int

    def __str__(self) -> str:
        return f"float {self.before:.2%}, quantized {self.after:.2%} of {self.images} held-out images"


@dataclass(frozen=True)
class Job:
    """A float program, its batches if any, and its held-out images if any."""

    program: Program
    batches: Iterable[Any] | None
    notes: tuple[str, ...] = ()
    held_out: Digits | None = None


@dataclass(frozen=True)
class Done:
    """Result of a job."""

    result: Result
    accuracy: Accuracy | None

    def to_data(self) -> dict[str, Any]:
        return {
            **self.result.report.to_data(),
            "accuracy": asdict(self.accuracy) if self.accuracy is not None else None,
        }

    @property
    def extra(self) -> dict[str, str]:
        """Additional report lines."""
        return {"accuracy": str(self.accuracy)} if self.accuracy is not None else {}

    def show(self, screen: Screen) -> None:
        """Print it."""
        self.result.report.show(screen, self.extra)

    def to_html(self) -> str:
        """The report as an HTML page."""
        return self.result.report.to_html(self.extra)


@dataclass(frozen=True)
class Taken:
    """Selection of the model's inputs from each batch, and the dtype to cast both to; empty and None for everything unchanged."""

    inputs: tuple[int | str, ...] = ()
    dtype: str | None = None

    @staticmethod
    def parse(inputs: str | None, dtype: str | None) -> Taken:
        """Parse `0`, `image` or `ids,mask`."""
        keys = [] if inputs is None else [key.strip() for key in inputs.split(",")]
        if not all(keys):
            raise typer.BadParameter("give a place or a name, or several: 0, image, ids,mask", param_hint="--inputs")
        if dtype is not None:
            as_dtype(dtype)
        return Taken(tuple(int(key) if key.lstrip("-").isdigit() else key for key in keys), dtype)

    def of(self, batches: Iterable[Any], program: Program, *, is_picked: bool = False) -> Iterable[Any]:
        """Batches for a program; with `is_picked` they hold the selected inputs only."""
        keys = None if is_picked or not self.inputs else self.inputs
        return select_inputs(batches, keys, program, None if self.dtype is None else as_dtype(self.dtype))


def find(source: str | None, data: str | None, method: Method, taken: Taken) -> Job:
    """Job of a SOURCE and a --data; without SOURCE, the embedded example with its own data."""
    if source is None:
        return _example(data, method, taken)
    given = None if data is None else Data.read(data, taken.inputs)
    loaded = load_all(source, method, None if given is None else given.examples, taken.dtype)
    program = loaded.program
    if given is not None:
        batches = given.batches(program)
        return Job(program, taken.of(batches.values, program, is_picked=given.arrays is not None), batches.notes)
    return Job(program, None if loaded.batches is None else taken.of(batches_of(source, loaded.batches), program))


def _example(data: str | None, method: Method, taken: Taken) -> Job:
    model, inputs = digits_cnn()
    batches, held_out = digits_data()
    program = capture(model, inputs, method, dynamic_shapes=({0: Dim("batch")},))
    if data is None:
        return Job(program, batches, held_out=held_out)
    read = Data.read(data, taken.inputs)
    given = read.batches(program)
    return Job(program, taken.of(given.values, program, is_picked=read.arrays is not None), given.notes, held_out)


@dataclass(frozen=True)
class Wanted:
    """Quantization options of the command line."""

    backend: Any
    mode: Mode = "static"
    specs: tuple[QuantSpec, ...] = ()
    """For all tensors, on top of the mode's."""
    config: QuantConfig | None = None
    """The last word."""
    to: Form = "qdq"
    reduce_range: RangeReduction = "auto"
    held_out: int | None = None
    """Number of last batches kept from calibration to measure on."""
    taken: Taken = Taken()
    recover: bool | str = False
    """True to fit weights to the data; or the passes that do, as pipeline text."""

    @property
    def whole_config(self) -> QuantConfig:
        """Specs and config combined."""
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
    """Quantize, and measure on held-out images if there are any; `say` gets progress messages."""
    steps = Steps(lambda name: say(f"{name} ..."))
    with steps("capture"):
        job = find(source, data, method, wanted.taken)
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
            recover=wanted.recover,
            progress=progress,
        )
    except AnnotationError as error:
        if job.program.example_inputs is None and "capture with example inputs" in (error.where or ""):
            error.advice = (
                "give --data FILE.npz or --data package.module:name, whose first batch is then the example inputs; or let "
                f"{source} be a function that returns (model, example_inputs)"
            )
        raise
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
    before, after = (_accuracy(program, job.held_out) for program in (job.program, result.program))
    return Done(result, Accuracy(before, after, len(job.held_out.labels)))


@torch.inference_mode()
def _accuracy(program: Program, held_out: Digits) -> float:
    return float((program(held_out.images).argmax(1) == held_out.labels).double().mean())
