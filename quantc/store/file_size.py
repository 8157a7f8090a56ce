"""How large the file of a program is, without writing it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from quantc.errors import SaveError
from quantc.program import Program
from quantc.store.container import LENGTH, metadata
from quantc.store.programs import CONSTANTS, contents

DTYPES: dict[torch.dtype, str] = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What a safetensors header calls them, in the order in which they lie in the file."""


@dataclass(frozen=True, slots=True)
class FileSize:
    """Bytes in a file."""

    constants: int
    """Of the parameters and buffers, in the form they are stored in."""
    whole: int
    """Of the file: text, plan and example inputs as well."""


def file_size(program: Program) -> FileSize | None:
    """What `program.save` would write; None if the program cannot be saved."""
    try:
        tensors, digests = contents(program)
    except SaveError:
        return None
    stored = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(CONSTANTS))
    data = sum(tensor.nbytes for tensor in tensors.values())
    return FileSize(stored, LENGTH + _header_size(tensors, metadata(tensors, digests)) + data)


def _header_size(tensors: Mapping[str, Tensor], fields: Mapping[str, str]) -> int:
    """The bytes of a safetensors header: JSON without spaces, filled up to a multiple of 8."""
    places = {dtype: place for place, dtype in enumerate(DTYPES)}
    rows = sorted(tensors.items(), key=lambda row: (places[row[1].dtype], row[0]))
    ends = pairwise(accumulate((tensor.nbytes for _, tensor in rows), initial=0))
    header = {
        name: {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": end}
        for (name, tensor), end in zip(rows, ends, strict=True)
    }
    text = json.dumps({"__metadata__": dict(fields), **header}, separators=(",", ":"), ensure_ascii=False)
    length = len(text.encode())
    return length + -length % 8
