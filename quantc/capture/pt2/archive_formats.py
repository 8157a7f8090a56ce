"""Format detection for files that are not `.pt2` archives, from their bytes alone, with advice."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from quantc.capture.pt2.archive_members import open_archive
from quantc.errors import LoadError

HEAD = 4096
PICKLE_PREFIX = 1 << 20
EXPORT_IT = "export the model and save that: torch.export.save(torch.export.export(model, inputs), path)"
UNSAFE = "loading it runs code from it; if you trust it, load it yourself, then pass the model to quantc.capture"
# First bytes (and where they start) of formats people mistake for one another.
SIGNATURES: tuple[tuple[int, bytes, str, str], ...] = (
    (4, b"ET1", "an ExecuTorch program", EXPORT_IT),
    (0, b"\x7fELF", "compiled code (a shared library or a program)", EXPORT_IT),
    (0, b"\x93NUMPY", "a NumPy array", EXPORT_IT),
    (0, b"\x89HDF", "an HDF5 file", EXPORT_IT),
    (0, b"\x1f\x8b", "a gzip file", "unpack it first"),
    (0, b"GGUF", "a GGUF model", EXPORT_IT),
)
TENSORS_ONLY = frozenset(
    {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"}
)


def why_not_archive(stream: BinaryIO) -> LoadError | None:
    """LoadError if an open file is not an archive with an exported program; None if it is one."""
    head = stream.read(HEAD)
    stream.seek(0)
    if not head:
        return LoadError("the file is empty", advice="save or download it again")
    if head.startswith(b"PK"):
        with open_archive(stream) as archive:
            return _why_not_zip(archive)
    kind, advice = _plain_kind(head)
    return LoadError(f"this is {kind}, not a .pt2 archive", advice=advice)


def _plain_kind(head: bytes) -> tuple[str, str]:
    for start, mark, kind, advice in SIGNATURES:
        if head[start:].startswith(mark):
            return kind, advice
    if head[0] == 0x80:
        return "a pickle (or a file of torch.save from before torch 1.6)", UNSAFE
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return (
            "a safetensors file, which holds weights only",
            "build the model, load the weights, pass it to quantc.capture",
        )
    if _is_text(head):
        return "a text file", EXPORT_IT
    return "a file of a kind quantc does not know", EXPORT_IT


def _is_text(head: bytes) -> bool:
    text = head.decode("utf-8", errors="ignore")
    return len(text.encode()) >= len(head) - 3 and all(mark.isprintable() or mark.isspace() for mark in text)


def _why_not_zip(archive: zipfile.ZipFile) -> LoadError | None:
    names = archive.namelist()
    inner = {name.partition("/")[2] for name in names}
    if "archive_format" in inner:
        return None
    if "serialized_exported_program.json" in names:
        return LoadError(
            "this is an exported program in the format of torch 2.7 and older",
            advice="export the model again with this version of torch",
        )
    if "constants.pkl" in inner:
        return LoadError(
            "this is a TorchScript file",
            advice="TorchScript cannot be captured; pass the original model to quantc.capture",
        )
    if "data.pkl" in inner:
        kind, advice = _pickled_kind(archive)
        return LoadError(f"this is {kind} written by torch.save, not a .pt2 archive", advice=advice)
    return LoadError(
        f"this is a zip file without an exported program (it holds {', '.join(names[:3])[:100]})", advice=EXPORT_IT
    )


def _pickled_kind(archive: zipfile.ZipFile) -> tuple[str, str]:
    entry = next(entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
    try:
        with archive.open(entry) as stream:
            wanted = set(_globals(stream.read(PICKLE_PREFIX)))
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError):
        return "a damaged file", "save or download it again"
    if all(name in TENSORS_ONLY or name.startswith("torch ") for name in wanted):
        return (
            "a state dict (tensors by name)",
            "build the model, load_state_dict it, and pass the model to quantc.capture",
        )
    classes = ", ".join(sorted(wanted - TENSORS_ONLY)[:3]).replace(" ", ".")
    return f"a pickled Python object ({classes[:120]})", UNSAFE


def _globals(data: bytes) -> Iterator[str]:
    """The classes and functions a pickle names, found by reading its instructions, not by running them."""
    strings: list[str] = []
    for opcode, argument, _ in _instructions(data):
        if opcode.name == "GLOBAL" and isinstance(argument, str):
            yield argument
        elif opcode.name == "STACK_GLOBAL" and len(strings) >= 2:
            yield " ".join(strings[-2:])
        elif isinstance(argument, str):
            strings.append(argument)


def _instructions(data: bytes) -> Iterable[tuple[pickletools.OpcodeInfo, object, int | None]]:
    return pickletools.genops(data)
