"""Cost of the integer form: its forward beside that of the float and of the Q/DQ program, in one run.

    python -m benchmarks.integer [--batch 1 8] [--size 224] [--backend qnnpack x86] [--rounds 9] [--json FILE]

The model is ResNet-18 in plain torch. The float program is the captured model. All contenders take turns in one
process, one thread, on the same batch; the ratio to the float program is taken round by round, and its median counts,
since a shared machine slows all of a round alike. The aim for the integer program is a ratio of at most 3.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import quantc as qc
from benchmarks.calibrate import Forward, measure
from quantc.bench.networks import resnet18

FLOAT = "float program"
AIM = 3.0


def contenders(model: nn.Module, x: Tensor, backend: str) -> dict[str, Forward]:
    """The programs to compare, all of one model."""
    captured = qc.capture(model, (x,))
    prepared = qc.prepare(captured, backend)
    qc.calibrate(prepared, [(x,)])
    return {
        FLOAT: captured.module,
        "Q/DQ program": qc.convert(prepared).module,
        "integer program": qc.convert(prepared, to="integer").module,
        "integer program, fixed": qc.convert(prepared, to="integer", multiplier="fixed").module,
    }


def ratios(spent: dict[str, list[float]]) -> dict[str, float]:
    """The time of each contender over that of the float program, the median over the rounds."""
    return {
        name: median(own / base for own, base in zip(times, spent[FLOAT], strict=True)) for name, times in spent.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--backend", nargs="+", default=["qnnpack", "x86"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = resnet18()
    table = Table("ResNet-18", "backend", "batch", "ms, best", "ms, median", "times float, median")
    report: dict[str, dict[str, Any]] = {}
    for backend in options.backend:
        for batch in options.batch:
            x = torch.randn(batch, 3, options.size, options.size)
            spent = measure(contenders(model, x, backend), x, options.rounds)
            found = ratios(spent)
            report[f"{backend}, batch {batch}"] = {"ratios": found, "seconds": spent}
            for name, times in spent.items():
                row = (f"{min(times) * 1e3:.0f}", f"{median(times) * 1e3:.0f}", f"{found[name]:.2f}")
                table.add_row(name, backend, str(batch), *row)
            table.add_section()
    console = Console(width=120)
    console.print(table)
    worst = max(found["ratios"]["integer program"] for found in report.values())
    console.print(f"The integer program takes at most {worst:.2f} times the float program's time; the aim is {AIM:g}.")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
