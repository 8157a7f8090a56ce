"""Saved programs taken apart and put together again, with digests that agree: what an attacker could write."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

import quantc as qc
from quantc.ir.program import Program
from quantc.store import file_versions
from quantc.store.programs import DOCUMENT


class Small(nn.Module):
    """A conv, a batch norm and two linears that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        pooled = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.second(torch.relu(self.first(pooled)))


def images(seed: int = 0) -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def small_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Small().eval()


def calibrated() -> Program:
    prepared = qc.prepare(qc.capture(small_model(), (images(),)), "x86")
    qc.calibrate(prepared, [images(1), images(2)])
    return prepared


def taken_apart(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The document of a file and its other tensors."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is not a dict
    return json.loads(tensors.pop(DOCUMENT).numpy().tobytes()), tensors


def put_together(path: Path, document: object, tensors: dict[str, Tensor]) -> None:
    """A file with this document and these tensors, and digests that fit them."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    file_versions.write(path, {DOCUMENT: torch.tensor(list(text), dtype=torch.uint8), **tensors})


class Parts:
    """A file taken apart. Without a long repr: hypothesis prints what a failing test was given."""

    def __init__(self, path: Path) -> None:
        self._parts = taken_apart(path)

    def copy(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return copy.deepcopy(self._parts)
