"""What the commands can be given: choices, and options that several of them have."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Format(StrEnum):
    """How to write a program out."""

    text = "text"
    table = "table"
    json = "json"
    dot = "dot"
    graphml = "graphml"


class CaptureMethod(StrEnum):
    """How to capture a model."""

    auto = "auto"
    export = "export"
    export_strict = "export-strict"
    fx = "fx"


class QuantizedForm(StrEnum):
    """What a quantized program is made of: quantize and dequantize ops around float ones, or integer ops."""

    qdq = "qdq"
    integer = "integer"


class Technique(StrEnum):
    """When scales are found: from data, as the program runs, or for weights alone, which then compute in float."""

    static = "static"
    dynamic = "dynamic"
    weight_only = "weight-only"


class Guarding(StrEnum):
    """When to compare the numbers before and after each pass: for small programs, always, or never."""

    auto = "auto"
    always = "always"
    never = "never"


class Narrowed(StrEnum):
    """What range reduction makes narrower; auto is what the instruction set of the backend needs."""

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
