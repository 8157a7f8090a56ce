"""The command `quantc quantize`. Its dependencies are imported lazily, so that other commands start without them."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantc.cli.options import (
    CaptureMethod,
    Json,
    MethodOption,
    ModeOption,
    Narrowed,
    QuantizedForm,
    Source,
    Technique,
    print_json,
)
from quantc.support.terminal import Screen

if TYPE_CHECKING:
    from quantc.support.progress import Style


def quantize(
    source: Source = None,
    backend: Annotated[str, typer.Option(help="What to quantize for; `quantc backends` lists them.")] = "x86",
    config: Annotated[
        Path | None, typer.Option(help="A .toml or .json file with what is to be done otherwise.")
    ] = None,
    mode: ModeOption = Technique.static,
    spec: Annotated[
        list[str] | None,
        typer.Option(
            help="How to quantize everything, by name or as text: INT4_GROUP, UINT8_TOKEN, int4{role=weight ...}; may be "
            "repeated, and --config has the last word.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="What to calibrate with, and to measure on: a .npz or .safetensors file with one array for each input, "
            "or package.module:factory. Modes dynamic and weight-only need none.",
            metavar="FILE|MODULE:NAME",
        ),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            help="What the model takes of each batch: the place or the name of an item, or several: 0, image, ids,mask.",
            metavar="KEY[,KEY...]",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Cast a copy of the model, and the batches, to this: float32.", metavar="float32"),
    ] = None,
    held_out: Annotated[
        int | None,
        typer.Option(
            help="How many of the last batches to keep from calibration, and to measure on; by default the first are measured on.",
            min=1,
            metavar="COUNT",
        ),
    ] = None,
    recover: Annotated[
        bool, typer.Option("--recover", help="Win back accuracy: fit weights to what their layers read.")
    ] = False,
    recover_passes: Annotated[
        str | None,
        typer.Option(help="Do it by these passes, as in rescale,round,correct-bias.", metavar="PASSES"),
    ] = None,
    reduce_range: Annotated[
        Narrowed,
        typer.Option(
            help="What to make narrower where pairs of products could overflow; auto: what the backend needs."
        ),
    ] = Narrowed.auto,
    to: Annotated[QuantizedForm, typer.Option(help="The form of the quantized program.")] = QuantizedForm.qdq,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the quantized program to this file, and beside it what it was lowered to and a report: model.qc, "
            "model.x86.qc and model.html; .onnx is for ONNX runtimes, .pte for ExecuTorch."
        ),
    ] = None,
    method: MethodOption = CaptureMethod.auto,
    as_json: Json = False,
) -> None:
    """Quantize a model, and report coverage, accuracy, size and speed.

    Without SOURCE it runs the built-in example: a small CNN on digit images, with its accuracy on held-out images.
    """
    from quantc.cli.quantize_outputs import check_out, deliver
    from quantc.cli.run_quantize import Taken, Wanted, carry_out
    from quantc.config.config import QuantConfig
    from quantc.pipeline.registry import BACKENDS
    from quantc.spec.spec import QuantSpec

    settings = QuantConfig.load(config) if config is not None else None
    specs = tuple(QuantSpec.parse(text) for text in spec or ())
    taken = Taken.parse(inputs, dtype)
    wanted = Wanted(
        BACKENDS[backend],
        mode.value,
        specs,
        settings,
        to.value,
        reduce_range.value,
        held_out,
        taken,
        recover if recover_passes is None else recover_passes,
    )
    progress: Style = "bar" if sys.stderr.isatty() else "lines"
    say = partial(typer.echo, err=True)
    check_out(out, wanted.backend, to.value, say)
    made = deliver(carry_out(source, data, wanted, method.value, say, progress), out, say)
    if as_json:
        print_json({**made.to_data(), "out": str(out) if out is not None else None})
        return
    screen = Screen()
    made.done.show(screen)
    made.show_artifact(screen)
    if made.why_not:
        typer.echo(f"note: {made.why_not}", err=True)
    for what, path in made.files:
        typer.echo(f"{what} written to {path}", err=True)
