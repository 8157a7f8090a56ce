"""Time of prepare and convert, beside torch.ao's FX graph mode and torchao's PT2E, in one run.

    python -m benchmarks.prepare [--blocks 50 200 800] [--rounds 1] [--json FILE]

The model is a chain of conv → batch norm → relu, each block added to its input. Times are CPU seconds of one thread,
without capturing and without running the calibration batch.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import quantc as qc
from tests.support.growth import exponent

CHANNELS = 8


class Block(nn.Module):
    """A convolution with batch norm and relu, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(CHANNELS)
        nn.init.constant_(self.norm.weight, 0.05)  # so that hundreds of blocks stay in range

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


def model_of(blocks: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(blocks)]).eval(), (torch.randn(1, CHANNELS, 4, 4),)


def ours(model: nn.Module, example: tuple[Tensor, ...]) -> float:
    program = qc.capture(model, example, method="fx")
    start = time.process_time()
    prepared = qc.prepare(program, "x86")
    spent = time.process_time() - start
    qc.calibrate(prepared, [example])
    start = time.process_time()
    qc.convert(prepared)
    return spent + time.process_time() - start


def fx_graph_mode(model: nn.Module, example: tuple[Tensor, ...]) -> float:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    model = copy.deepcopy(model)
    start = time.process_time()
    prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), example)
    spent = time.process_time() - start
    prepared(*example)
    start = time.process_time()
    convert_fx(prepared)
    return spent + time.process_time() - start


def pt2e(model: nn.Module, example: tuple[Tensor, ...]) -> float:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    exported = torch.export.export(model, example).module()
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    start = time.process_time()
    prepared = prepare_pt2e(exported, quantizer)
    spent = time.process_time() - start
    prepared(*example)
    start = time.process_time()
    convert_pt2e(prepared)
    return spent + time.process_time() - start


TOOLS: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], float]] = {
    "quantc x86": ours,
    "torch.ao FX x86": fx_graph_mode,
    "torchao PT2E x86": pt2e,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[50, 200, 800])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    spent: dict[str, dict[int, list[float]]] = {name: {} for name in TOOLS}
    for blocks in options.blocks:
        for _ in range(options.rounds):
            for name, tool in TOOLS.items():
                spent[name].setdefault(blocks, []).append(tool(*model_of(blocks)))
    middle = {name: {blocks: median(times) for blocks, times in rows.items()} for name, rows in spent.items()}
    _show(middle, options.blocks)
    if options.json is not None:
        data: dict[str, Any] = {
            name: {str(blocks): value for blocks, value in rows.items()} for name, rows in middle.items()
        }
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _show(middle: dict[str, dict[int, float]], sizes: list[int]) -> None:
    table = Table("tool", *(f"{blocks} blocks, s" for blocks in sizes), "exponent", "times ours at the largest")
    own = middle["quantc x86"][sizes[-1]]
    for name, rows in middle.items():
        grows = f"{exponent(rows):.2f}" if len(rows) > 1 else "-"
        table.add_row(name, *(f"{rows[blocks]:.2f}" for blocks in sizes), grows, f"{rows[sizes[-1]] / own:.1f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
