"""Models of the zoo at every stage that they reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import quantc as qc
from quantc.errors import AnnotationError, CalibrationError, CaptureError
from quantc.ir.program import Program
from tests.zoo import Case, detached

Method = Literal["export", "fx"]
METHODS: tuple[Method, ...] = ("export", "fx")
FEW = [
    "resnet_downsample",
    "mbconv",
    "gpt_sdpa",
    "lstm_tagger",
    "audio_conv1d",
    "dict_in_and_out",
    "dataclass_out",
    "namedtuple_out",
    "keyword_inputs",
    "constant_inputs",
    "tied_weights",
    "inplace_residual",
    "constants",
    "cond",
]
"""One of each kind; the others are slow tests."""


def stages(case: Case, method: Method) -> Iterator[Program]:
    """The program of a model at every stage that it reaches."""
    args, keywords = case.example()
    try:
        program = qc.capture(case.model(), args, method=method, example_kwargs=keywords)
    except CaptureError:
        return
    yield program
    try:
        prepared = qc.prepare(program, "x86")
    except AnnotationError:
        return  # nothing that x86 quantizes
    yield prepared
    calibrated = prepared.clone()
    try:
        qc.calibrate(calibrated, [_batch(program, args, keywords)])
        quantized = qc.convert(calibrated)
    except CalibrationError:
        return  # one branch of a cond is never entered
    yield calibrated
    yield quantized


def _batch(program: Program, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """All arguments by name if some are."""
    names = program.signature.parameters
    return detached({**dict(zip(names, args, strict=False)), **keywords} if keywords else args)
