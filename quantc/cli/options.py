"""Shared choices and options of the commands, and the JSON document of `--json`."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer


class Format(StrEnum):
    """Output format of a program."""

    text = "text"
    table = "table"
    json = "json"
    dot = "dot"
    graphml = "graphml"


class CaptureMethod(StrEnum):
    """Capture method."""

    auto = "auto"
    export = "export"
    export_strict = "export-strict"
    fx = "fx"


class QuantizedForm(StrEnum):
    """Form of a quantized program: quantize and dequantize ops around float ones, or integer ops."""

    qdq = "qdq"
    integer = "integer"


class Technique(StrEnum):
    """Quantization technique: scales from data, at run time, or weights only, with float computation."""

    static = "static"
    dynamic = "dynamic"
    weight_only = "weight-only"


class Guarding(StrEnum):
    """The condition for comparing the numbers before and after each pass: small programs, always, or never."""

    auto = "auto"
    always = "always"
    never = "never"


class Narrowed(StrEnum):
    """Ranges that range reduction narrows; auto is what the backend's instruction set needs."""

    auto = "auto"
    no = "no"
    weights = "weights"
    activations = "activations"


Source = Annotated[
    str | None,
    typer.Argument(
        help="A .qc or .pt2 file, a .txt dump, or package.module:factory; without it, the built-in example."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
ModeOption = Annotated[
    Technique, typer.Option("--mode", help="What the backend does where nothing else is said: when scales are found.")
]
MethodOption = Annotated[CaptureMethod, typer.Option("--method", help="How to capture a model.")]


def print_json(value: Any) -> None:
    """Print a result as the JSON document of `--json`."""
    typer.echo(json.dumps(value, indent=2))
