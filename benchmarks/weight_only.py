"""Cost of weight-only quantization: time, closeness and size on disk beside the float model, in one run.

    python -m benchmarks.weight_only [--rows 1 8 128] [--threads 1] [--rounds 15] [--only 4096x4096] [--torch] [--json FILE]

Single linear layers, a stack of them, a convolution and a table of embeddings. The float model and every format take turns
in one process on the same input. On one thread it is CPU time that counts, since the machine may be shared; the ratio is
that of the best rounds. The aim is a ratio of at most 1.2 for linear layers and convolutions. The timed module is the
result of `qc.lower`, with its argument checks: 10 to 20 µs a call. `--torch` adds torch's own kernels for packed weights to
the single layers; those on float32 are very slow.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import quantc as qc
from quantc import QuantConfig, QuantSpec

FORMATS: dict[str, QuantSpec] = {
    "int8": qc.INT8_WEIGHT_ONLY,
    "int4 group": qc.INT4_GROUP,
    "int4 group, 24-bit scales": qc.INT4_GROUP_SYMMETRIC,
    "int2 group": qc.INT2_GROUP,
    "fp16": qc.FP16_WEIGHT,
    "fp8 e4m3": qc.FP8_E4M3_WEIGHT,
    "fp8 e5m2": qc.FP8_E5M2_WEIGHT,
}
LAYERS = {"768x768": (768, 768), "768x3072": (768, 3072), "3072x768": (3072, 768), "4096x4096": (4096, 4096)}
"""Inputs and outputs."""
AIM = 1.2
SHORTEST = 2e-3
"""A round lasts at least so many seconds: short calls are repeated."""

Forward = Callable[[Tensor], Any]


@dataclass
class Model:
    """A model to try, with inputs by name, and whether the aim is for it."""

    module: nn.Module
    inputs: dict[str, Tensor]
    has_aim: bool = True


@dataclass
class Row:
    """One format of one model on one input."""

    model: str
    inputs: str
    format: str
    kernel: str
    ms: float
    ratio: float
    sqnr: float
    file_ratio: float


def stack(width: int = 768, layers: int = 6) -> nn.Module:
    """Linear layers as those of an encoder."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return nn.Sequential(*parts)


def models(rows: list[int]) -> dict[str, Model]:
    made: dict[str, Model] = {}
    for name, (inputs, outputs) in LAYERS.items():
        made[name] = Model(nn.Linear(inputs, outputs), {f"{n} rows": torch.randn(n, inputs) for n in rows})
    made["stack of 12"] = Model(stack(), {f"{n} rows": torch.randn(n, 768) for n in rows})
    images = {"56 x 56": torch.randn(1, 64, 56, 56), "14 x 14": torch.randn(1, 64, 14, 14)}
    made["conv 3x3"] = Model(nn.Conv2d(64, 64, 3, padding=1), images)
    indices = {f"{n} rows": torch.randint(0, 30000, (n,)) for n in rows}
    made["embedding"] = Model(nn.Embedding(30000, 768), indices, has_aim=False)
    return made


def take_turns(contenders: dict[str, Forward], x: Tensor, rounds: int) -> dict[str, list[float]]:
    """The seconds per call of each contender, in every round."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    repeats: dict[str, int] = {}
    for name, forward in contenders.items():
        forward(x)
        start = clock()
        forward(x)
        repeats[name] = max(1, math.ceil(SHORTEST / (clock() - start)))
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, forward in contenders.items():
            start = clock()
            for _ in range(repeats[name]):
                forward(x)
            spent[name].append((clock() - start) / repeats[name])
    return spent


def sqnr(expected: Tensor, found: Tensor) -> float:
    noise = (expected - found).double().square().sum()
    return math.inf if not noise else float(10 * torch.log10(expected.double().square().sum() / noise))


def saved_size(program: qc.Program, folder: Path) -> int:
    program.save(folder / "model.qc")
    return (folder / "model.qc").stat().st_size


def torch_kernels(layer: nn.Linear) -> dict[str, Forward]:
    """torch's own kernels for packed weights, to be timed: what they compute is of no concern here."""
    ops: Any = torch.ops.aten
    weight = layer.weight.detach()
    scale = weight.abs().amax(1) / 127
    levels = torch.round(weight / scale[:, None]).to(torch.int8)
    packed = ops._convert_weight_to_int4pack_for_cpu((levels.int() >> 4) + 8, 1)
    groups = torch.rand(weight.shape[1] // 32, weight.shape[0], 2)
    half = scale.bfloat16()
    return {
        "torch int8pack, bfloat16": lambda x: ops._weight_int8pack_mm(x.bfloat16(), levels, half),
        "torch int8pack": lambda x: ops._weight_int8pack_mm(x, levels, scale),
        "torch int4pack": lambda x: ops._weight_int4pack_mm_for_cpu(x, packed, 32, groups),
    }


def run(name: str, model: Model, rounds: int, with_torch: bool) -> list[Row]:
    module, found = model.module.eval(), []
    with tempfile.TemporaryDirectory() as folder:
        for label, x in model.inputs.items():
            captured = qc.capture(module, (x,))
            whole = saved_size(captured, Path(folder))
            contenders: dict[str, Forward] = {"float": module}
            kernels, sizes = {"float": "eager"}, {"float": 1.0}
            for kind, spec in FORMATS.items():
                program = qc.convert(qc.prepare(captured, "x86", config=QuantConfig().set_all(spec)))
                lowered = qc.lower(program, "x86")
                contenders[kind] = lowered
                kernels[kind] = ", ".join(dict.fromkeys(row.kernel or "as written" for row in lowered.placed))
                sizes[kind] = saved_size(program, Path(folder)) / whole
            if with_torch and isinstance(module, nn.Linear):
                contenders |= torch_kernels(module)
            spent, expected = take_turns(contenders, x, rounds), module(x)
            for kind, times in spent.items():
                ratio = min(times) / min(spent["float"])
                close = sqnr(expected, contenders[kind](x)) if kind in sizes else math.nan
                row = (kernels.get(kind, "torch"), min(times) * 1e3, ratio, close, sizes.get(kind, math.nan))
                found.append(Row(name, label, kind, *row))
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 128])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", metavar="MODEL")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    table = Table("model", "input", "format", "runs on", "ms, best", "times float", "SQNR, dB", "file")
    report: list[Row] = []
    worst = 0.0
    known = models(options.rows)
    chosen = options.only or list(known)
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"unknown model {unknown[0]!r}: {', '.join(known)}")
    for name in chosen:
        model = known[name]
        rows = run(name, model, options.rounds, options.torch)
        report += rows
        worst = max([worst, *(row.ratio for row in rows if model.has_aim and row.format in FORMATS)])
        for row in rows:
            numbers = (f"{row.ms:.3f}", f"{row.ratio:.2f}", f"{row.sqnr:.1f}", f"{row.file_ratio:.3f}")
            table.add_row(row.model, row.inputs, row.format, row.kernel, *numbers)
        table.add_section()
    console = Console(width=150)
    console.print(table)
    console.print(
        f"Linear layers and convolutions take at most {worst:.2f} times the float model's time; the aim is {AIM:g}."
    )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in report], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
