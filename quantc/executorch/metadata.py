"""What a `.pte` file says of itself: who wrote it, from what, and how it is called. It is a method of the file's own,
so that any ExecuTorch runtime can ask for it."""

from __future__ import annotations

import json
from hashlib import sha256
from importlib.metadata import version

from pydantic import BaseModel, ConfigDict, ValidationError

from quantc.digests import state_digest
from quantc.errors import LoadError
from quantc.frozen import faults_of
from quantc.program import Program

METHOD = "quantc"
"""The name of the method."""


class InputData(BaseModel):
    """A tensor that the program takes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    dtype: str
    shape: list[int | str]


class Metadata(BaseModel):
    """Of a `.pte` file that quantc wrote."""

    model_config = ConfigDict(extra="forbid", strict=True)

    quantc: str
    """The version that wrote it."""
    torch: str
    executorch: str
    program: str
    backend: str
    """What it was quantized for."""
    config: str
    """A digest of what the user asked for."""
    source: str
    """A digest of the quantized program: its text, and the digests of its tensors."""
    inputs: list[InputData]
    ranges: dict[str, tuple[int, int]]
    """The sizes that a dimension may have, by its symbol."""

    def to_text(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)


def metadata_of(program: Program, ranges: dict[str, tuple[int, int]]) -> Metadata:
    plan = program.plan
    config = plan.config.model_dump_json() if plan.config is not None else ""
    return Metadata(
        quantc=version("quantc"),
        torch=version("torch"),
        executorch=version("executorch"),
        program=program.name,
        backend=plan.quantizer.name if plan.quantizer is not None else "",
        config=_digest(config),
        source=_digest(program.dump(), state_digest(program.root) or ""),
        inputs=[
            InputData(name=item.name, dtype=str(item.type.dtype).removeprefix("torch."), shape=[*item.type.shape])
            for item in program.signature.inputs
            if not item.is_constant and item.type is not None
        ],
        ranges=ranges,
    )


def read_metadata(text: str, where: str) -> Metadata:
    """What a file says; LoadError if that is not what quantc writes."""
    try:
        return Metadata.model_validate_json(text)
    except ValidationError as error:
        raise LoadError(
            f"what the file says of itself does not read: {faults_of(error)[0]}",
            where=where,
            advice="write it again with qc.lower(program, 'executorch').save(path)",
        ) from error


def _digest(*texts: str) -> str:
    total = sha256()
    for text in texts:
        total.update(text.encode())
        total.update(b"\0")
    return total.hexdigest()
