"""Archives for the tests: honest ones, and the same with a few members swapped for something else."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export, save

from quantc.capture.pt2.archive import load_exported
from quantc.errors import LoadError

Edit = Callable[[Any], None]
ROOT = "archive"
MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
SAMPLES = "data/sample_inputs/model.pt"


class Small(nn.Module):
    """A linear layer, a buffer, a constant, a keyword with a fixed string, and one dynamic size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("shift", torch.arange(3.0))
        self.scale = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x: torch.Tensor, extra: dict[str, torch.Tensor], *, mode: str) -> dict[str, torch.Tensor]:
        y = self.linear(x) * self.scale + self.shift
        return {"y": torch.relu(y) if mode == "relu" else y, "z": extra["k"] + 1}


def small_program() -> torch.export.ExportedProgram:
    batch = Dim("batch", min=2, max=64)
    return export(
        Small().eval(),
        (torch.randn(5, 4), {"k": torch.randn(2)}),
        {"mode": "relu"},
        dynamic_shapes={"x": {0: batch}, "extra": {"k": None}, "mode": None},
    )


def saved(program: torch.export.ExportedProgram) -> bytes:
    buffer = io.BytesIO()
    save(program, buffer)
    return buffer.getvalue()


def members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def zipped(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(f"{ROOT}/{name}", content)
    return buffer.getvalue()


def edited(data: bytes, edits: Mapping[str, Edit], extra: Mapping[str, bytes] | None = None) -> bytes:
    """The archive with some JSON members changed in place and other members added."""
    members = members_of(data)
    for name, edit in edits.items():
        document = json.loads(members[name])
        edit(document)
        members[name] = json.dumps(document).encode()
    return zipped({**members, **(extra or {})})


def leaves(document: Any, path: tuple[str | int, ...] = ()) -> Iterable[tuple[str | int, ...]]:
    """The way to every plain value of a JSON document."""
    if isinstance(document, dict):
        pairs: Iterable[tuple[str | int, Any]] = document.items()
    elif isinstance(document, list):
        pairs = enumerate(document)
    else:
        yield path
        return
    for key, value in pairs:
        yield from leaves(value, (*path, key))


def put(document: Any, path: tuple[str | int, ...], value: object) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


class Touch:
    """Pickles into a call that makes a file, as a hostile pickle would call `os.system`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def refused(data: bytes, folder: Path) -> LoadError:
    """The error with which a file of these bytes is refused."""
    file = folder / "model.pt2"
    file.write_bytes(data)
    with pytest.raises(LoadError) as caught:
        load_exported(file)
    return caught.value


def refusal(data: bytes, folder: Path) -> str:
    """The text of that error."""
    return str(refused(data, folder))
