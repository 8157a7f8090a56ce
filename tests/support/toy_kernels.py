"""A target with three kernels for one op: a slow one, a quick one, and one that computes in float."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.targets.kernels import kernel_table
from quantc.targets.kernels.kernel import Kernel, Work
from quantc.targets.kernels.kernel_table import Call


@torch.library.custom_op("quantc_tests::wait", mutates_args=())
def wait(x: Tensor, seconds: float) -> Tensor:
    """A tensor after a while. It is an op, since Python between ops does not run where these are recorded."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return x.clone()


class AsWritten(Kernel):
    """Runs an op of the integer form as it is, after a while."""

    name: ClassVar[str] = "quick"
    family: ClassVar[str] = "torch"
    seconds: ClassVar[float] = 0.0

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.target: Any = call.node.target
        self.rest = tuple(list(call.arguments.values())[1:])
        self.outputs = call.tensor("w").shape[0]

    def pack(self) -> Any:
        return ()

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return self.target(wait(inputs[0], self.seconds), *self.rest)

    def work(self, *inputs: Tensor) -> Work:
        x = inputs[0]
        return Work("linear", x.numel() // x.shape[-1], (x.shape[-1], self.outputs))


class Slow(AsWritten):
    name: ClassVar[str] = "slow"
    family: ClassVar[str] = "onednn"
    seconds: ClassVar[float] = 0.003


class InFloat(AsWritten):
    name: ClassVar[str] = "in float"
    family: ClassVar[str] = "float32"
    computes_in_float: ClassVar[bool] = True


def program(dynamic: bool = False) -> qc.Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).eval()
    x = torch.randn(5, 8)
    shapes = ({0: torch.export.Dim("rows")},) if dynamic else None
    return qc.quantize(model, (x,), [(x,)], dynamic_shapes=shapes).program


def chosen(lowered: qc.Lowered) -> list[tuple[str, str]]:
    return [(row.kernel, row.chosen) for row in lowered.placed if row.op == "linear"]


def offer_toys(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """The target, which offers the slowest kernel first, with a cache of times in a folder of its own."""
    monkeypatch.setenv("QUANTC_CACHE", str(folder))
    monkeypatch.setitem(kernel_table.KERNELS, "toy", {"linear": [Slow, AsWritten, InFloat]})
    return "toy"
