"""Safe loading of exported programs from `.pt2` files: nothing in them is executed.

`torch.export.load` trusts a file: it unpickles, evaluates and compiles parts of it. `load_exported` checks all of that
first (see `archive_members`, `document_checks`, `archive_payloads`), then passes torch only plain data that was
checked.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch._export.serde import schema
from torch._export.serde.serialize import ExportedProgramDeserializer, _dict_to_dataclass

from quantc.capture.pt2.archive_formats import why_not_archive
from quantc.capture.pt2.archive_members import Members, check_byte_order, check_plain, inside, model_name, open_archive
from quantc.capture.pt2.archive_payloads import sample_inputs, tensors
from quantc.capture.pt2.document_checks import vet
from quantc.errors import LoadError


def load_exported(path: str | os.PathLike[str]) -> torch.export.ExportedProgram:
    """Load a program written by `torch.export.save`.

    Same result as `torch.export.load`, but safe on untrusted files: whatever the file holds, none of it is executed.
    Files of any other kind, damaged ones, and programs that hold more than operators, tensors and plain values raise
    `LoadError`.
    """
    with inside(os.fspath(path)):
        return _load(Path(path))


def _load(file: Path) -> torch.export.ExportedProgram:
    if file.is_dir():
        raise LoadError("this is a directory, not a file", advice="name the .pt2 file inside it")
    if file.exists() and not file.is_file():
        raise LoadError("this is a device or a pipe, not a file", advice="save the program to a file first")
    try:
        with file.open("rb") as stream:
            if (problem := why_not_archive(stream)) is not None:
                raise problem
            size = os.fstat(stream.fileno()).st_size
            with open_archive(stream) as archive:
                return _rebuild(Members(archive, size))
    except OSError as error:
        raise LoadError(
            f"the file cannot be read: {error.strerror or error}", advice="check its name and rights"
        ) from error


def _rebuild(members: Members) -> torch.export.ExportedProgram:
    check_plain(members.names)
    check_byte_order(members)
    model = model_name(members.names)
    member = f"models/{model}.json"
    document = members.document(member)
    _check_version(document, member)
    vet(document, schema.ExportedProgram, member)
    weights = tensors(members, model, "weights")
    constants = tensors(members, model, "constants")
    inputs = sample_inputs(members, model)
    try:
        program: schema.ExportedProgram = _dict_to_dataclass(schema.ExportedProgram, document)  # type: ignore[no-untyped-call]
        # Tensors and inputs go in as objects, never as bytes: given bytes, torch would unpickle them itself.
        return ExportedProgramDeserializer().deserialize(program, weights, constants, inputs or b"")
    except Exception as error:
        # torch raises many kinds here (its asserts, sympy's errors, KeyError); for the user all mean the same.
        raise LoadError(
            f"torch {torch.__version__} cannot rebuild the program: {_last_line(error)}",
            where=member,
            advice="export the model again with this version of torch; if torch.export.load fails on that file too, pass "
            "the model itself to quantc.capture",
        ) from error


def _check_version(document: object, member: str) -> None:
    match document:
        case {"schema_version": {"major": int(major)}, "torch_version": str(writer)} if (
            major != schema.SCHEMA_VERSION[0]
        ):
            raise LoadError(
                f"the program was written in format {major}, by torch {writer[:40]}; torch {torch.__version__} reads format "
                f"{schema.SCHEMA_VERSION[0]}",
                where=member,
                advice="export the model again with this version of torch",
            )
        case _:
            return


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
