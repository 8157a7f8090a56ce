"""Metadata of a `.pte` file: its writer, source and calling convention. It is a method of the file itself, so that any
ExecuTorch runtime can read it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from quantc.errors import LoadError
from quantc.ir.finite_inputs import Watch
from quantc.ir.program import Program
from quantc.ir.signature import Input
from quantc.ir.types import TensorType
from quantc.support.validated import faults_of
from quantc.targets.executorch.call_signature import ADVICE, CallData, Convention, call_data, convention_of
from quantc.targets.provenance import Provenance

METHOD = "quantc"
"""The name of the method."""


class InputData(BaseModel):
    """A tensor input of the program."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    dtype: str
    shape: list[int | str]
    is_rounded: bool = False
    """True if it must be finite: no grid has a level for NaN."""
    is_mask: bool = False
    """True if it may be infinite nevertheless."""
    masks_rows: bool = False
    """True if no row of it may be minus infinity throughout; absent from files of earlier versions."""


class Metadata(BaseModel):
    """Metadata of a `.pte` file that quantc wrote."""

    model_config = ConfigDict(extra="forbid", strict=True)

    quantc: str
    """The version that wrote it."""
    torch: str
    executorch: str
    program: str
    backend: str
    """The backend it was quantized for."""
    config: str
    """A digest of what the user asked for."""
    source: str
    """A digest of the quantized program: its text, and the digests of its tensors."""
    inputs: list[InputData]
    ranges: dict[str, tuple[int, int]]
    """The sizes that a dimension may have, by its symbol."""
    has_state: bool = False
    """True if it keeps state between calls."""
    call: CallData | None = None
    """The structure of inputs and outputs; None in files of earlier versions."""

    def to_text(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)


def metadata_of(
    program: Program, ranges: dict[str, tuple[int, int]], *, has_state: bool = False, source: Program | None = None
) -> Metadata:
    """Metadata of a program's file; `source` is the given program, before it was legalized."""
    given = program if source is None else source
    watched = {item.place: item for item in Watch.of(given.graph, given.signature).inputs}
    return Metadata(
        **asdict(Provenance.of(given)),
        torch=version("torch"),
        executorch=version("executorch"),
        inputs=[
            InputData(
                name=item.name,
                dtype=str(item.type.dtype).removeprefix("torch."),
                shape=[*item.type.shape],
                is_rounded=place in watched,
                is_mask=place in watched and watched[place].may_be_infinite,
                masks_rows=place in watched and watched[place].masks_rows,
            )
            for place, item in enumerate(program.signature.inputs)
            if not item.is_constant and item.type is not None
        ],
        ranges=ranges,
        has_state=has_state,
        call=call_data(program),
    )


def read_metadata(text: str, where: str) -> Metadata:
    """Metadata of a file; LoadError if it is not what quantc writes."""
    try:
        return Metadata.model_validate_json(text)
    except ValidationError as error:
        raise LoadError(
            f"what the file says of itself does not read: {faults_of(error)[0]}",
            where=where,
            advice=ADVICE,
        ) from error


def convention_in(metadata: Metadata | None, where: str) -> Convention:
    """Calling convention in a file's metadata."""
    if metadata is None:
        return Convention(why_flat="quantc did not write it")
    tensors = [_input(item, where) for item in metadata.inputs]
    return convention_of(metadata.call, tensors, dict(metadata.ranges), where)


def _input(item: InputData, where: str) -> Input:
    dtype = getattr(torch, item.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f"input {item.name!r} is of an unknown type, {item.dtype!r}", where=where, advice=ADVICE)
    return Input(item.name, TensorType(dtype, tuple(item.shape)))
