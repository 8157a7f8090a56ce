"""Dynamic modules of `quantc.nn` beside torch.ao's, in one run: layers alone, and whole models with their layers swapped.

    python -m benchmarks.eager_dynamic [--only Linear LSTM] [--dtype int8 half] [--rounds 15] [--json FILE]

Each pair is made of one float model with the same weights and scales, and runs in turns with the other on one thread. Times
are seconds of the processor, the best of all rounds; how many times as fast is the median over the rounds. The last column
is the largest difference between the two results.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic

from quantc.bench.race import quietly_on_one_thread, speed, take_turns
from quantc.nn import DYNAMIC_MODULES
from quantc.nn.qconfig import QConfig, default_dynamic_qconfig, float16_dynamic_qconfig
from quantc.targets.kernels.packing import engine

QCONFIGS: dict[str, tuple[QConfig, torch.dtype]] = {
    "int8": (default_dynamic_qconfig, torch.qint8),
    "half": (float16_dynamic_qconfig, torch.float16),
}
CELLS = {nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell}


class Encoder(nn.Module):
    """Layers of a transformer, with projections apart."""

    def __init__(self, width: int = 256, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.heads = heads
        names = {"query": width, "key": width, "value": width, "out": width}
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    **{name: nn.Linear(width, size) for name, size in names.items()},
                    "wide": nn.Linear(width, 4 * width),
                    "narrow": nn.Linear(4 * width, width),
                    "first": nn.LayerNorm(width),
                    "second": nn.LayerNorm(width),
                }
            )
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        for layer in self.layers:
            part: Any = layer
            three = [part[name](x).reshape(batch, tokens, self.heads, -1).transpose(1, 2) for name in PARTS]
            seen = nn.functional.scaled_dot_product_attention(*three).transpose(1, 2).reshape(batch, tokens, width)
            x = part["first"](x + part["out"](seen))
            x = part["second"](x + part["narrow"](nn.functional.gelu(part["wide"](x))))
        return x


PARTS = ("query", "key", "value")


class Tagger(nn.Module):
    """Words, an LSTM in both directions, and a label for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.LSTM(128, 256, 2, batch_first=True, bidirectional=True)
        self.labels = nn.Linear(512, 40)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.labels(self.words(x)[0])
        return made


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear 512, 1 row": (lambda: nn.Linear(512, 512), (1, 512)),
    "Linear 512, 16 rows": (lambda: nn.Linear(512, 512), (16, 512)),
    "Linear 768 to 3072, 128 rows": (lambda: nn.Linear(768, 3072), (1, 128, 768)),
    "Linear 4096, 1 row": (lambda: nn.Linear(4096, 4096), (1, 4096)),
    "LSTM 128 to 256, 2 layers": (lambda: nn.LSTM(128, 256, 2), (20, 1, 128)),
    "LSTM 512, both ways": (lambda: nn.LSTM(512, 512, bidirectional=True), (20, 4, 512)),
    "LSTM 1024, batch 1": (lambda: nn.LSTM(1024, 1024), (20, 1, 1024)),
    "GRU 256": (lambda: nn.GRU(256, 256), (20, 1, 256)),
    "LSTMCell 512": (lambda: nn.LSTMCell(512, 512), (4, 512)),
    "GRUCell 512": (lambda: nn.GRUCell(512, 512), (4, 512)),
    "transformer, 4 layers": (Encoder, (1, 32, 256)),
    "LSTM tagger": (Tagger, (1, 30, 128)),
}


@dataclass(frozen=True)
class Row:
    """Microseconds of each, the best of all rounds, and their ratio."""

    model: str
    dtype: str
    fp32: float
    torch_ao: float
    quantc: float
    speed: float
    """Speedup over torch.ao, the median over the rounds."""
    difference: float


def swapped(model: nn.Module, qconfig: QConfig) -> nn.Module:
    """A copy with dynamic modules in the place of float ones."""
    made = copy.deepcopy(model)

    def converted(module: nn.Module) -> nn.Module:
        kind: Any = DYNAMIC_MODULES.get(type(module))
        if kind is None or type(module) not in CELLS:
            for name, child in module.named_children():
                setattr(module, name, converted(child))
            return module
        module.qconfig = qconfig  # type: ignore[assignment]
        found: nn.Module = kind.from_float(module)
        return found

    return converted(made)


def measure(name: str, dtype: str, rounds: int) -> Row:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, x = build().eval(), torch.randn(shape)
    qconfig, theirs = QCONFIGS[dtype]
    with engine("fbgemm"):
        holder = nn.Sequential(copy.deepcopy(model))
        peer: Any = quantize_dynamic(holder, CELLS, dtype=theirs)[0]  # type: ignore[no-untyped-call]
    contenders: dict[str, Any] = {"fp32": model, "torch_ao": peer, "quantc": swapped(model, qconfig)}
    with torch.no_grad():
        spent = take_turns(contenders, (x,), rounds)
        ours, other = (_first(contenders[key](x)) for key in ("quantc", "torch_ao"))
    best = {key: min(times) * 1e6 for key, times in spent.items()}
    times = speed(spent["torch_ao"], spent["quantc"])
    return Row(name, dtype, **best, speed=times, difference=float((ours - other).abs().max()))


def _first(made: Any) -> Tensor:
    return made if isinstance(made, Tensor) else _first(made[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="models whose names begin so")
    parser.add_argument("--dtype", nargs="+", choices=list(QCONFIGS), default=list(QCONFIGS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    table = Table("model", "weights", "fp32, µs", "torch.ao, µs", "quantc, µs", "times torch.ao", "difference")
    rows: list[Row] = []
    with quietly_on_one_thread():
        for dtype in options.dtype:
            for name in (name for name in MODELS if name.startswith(tuple(options.only))):
                row = measure(name, dtype, options.rounds)
                rows.append(row)
                shown = (f"{spent:.0f}" for spent in (row.fp32, row.torch_ao, row.quantc))
                table.add_row(name, dtype, *shown, f"{row.speed:.2f}", f"{row.difference:.1e}")
            table.add_section()
    Console(width=120).print(table)
    if options.json is not None:
        found = [asdict(row) for row in rows]
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
