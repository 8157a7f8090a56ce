"""Dynamic quantization on kernels, beside torch.ao's `quantize_dynamic`, in one run.

    python -m benchmarks.dynamic [--model "BERT-like" LSTM] [--rounds 15] [--json FILE]

Contenders: the float model, torch.ao's (fbgemm), and the lowered program with one scale for a tensor and with one for a
token. All take turns in one process, on one thread, on the same input. How many times faster than the float model each
is, is the median over the rounds: a shared machine slows all of a round alike. SQNR is against the float model, on
inputs that nobody has seen.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic

import quantc as qc
from quantc.backends.x86 import X86
from quantc.config import QuantConfig
from quantc.formats import PerToken
from tests.encoders import TextEncoder, ViT, images, initialised, texts

EAGER, PEER, WHOLE, TOKEN = "eager fp32", "torch.ao dynamic", "quantc, per tensor", "quantc, per token"
Inputs = list[tuple[Tensor, ...]]


class Apart(nn.Module):
    """Attention with a projection each for queries, keys and values, and torch's own product of them."""

    def __init__(self, width: int = 768, heads: int = 12, depth: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value", "out")})
            for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Any:
        batch, tokens, width = x.shape
        for layer, norm in zip(self.layers, self.norms, strict=True):
            parts = [
                layer[name](x).reshape(batch, tokens, self.heads, -1).transpose(1, 2)  # type: ignore[index]
                for name in ("query", "key", "value")
            ]
            seen = nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(batch, tokens, width)
            x = norm(x + layer["out"](seen))  # type: ignore[index]
        return x


class Sequences(nn.Module):
    """Two layers of LSTM and a classifier."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.lstm(x)[0])


def mlp() -> nn.Module:
    hidden = (layer for _ in range(3) for layer in (nn.Linear(4096, 4096), nn.ReLU()))
    return nn.Sequential(*hidden, nn.Linear(4096, 1000))


def noise(*shape: int) -> Callable[[int], Inputs]:
    def made(seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        return [(torch.randn(shape, generator=generator),) for _ in range(4)]

    return made


@dataclass(frozen=True)
class Model:
    """A model and its inputs."""

    build: Callable[[], nn.Module]
    data: Callable[[int], Inputs]


MODELS: dict[str, Model] = {
    "BERT-like": Model(lambda: initialised(TextEncoder()), lambda seed: texts(4, 1, 128, 30522, seed)),
    "attention": Model(lambda: initialised(Apart()), noise(1, 128, 768)),
    "ViT-Tiny": Model(lambda: initialised(ViT()), lambda seed: images(4, 1, 224, seed)),
    "MLP 4096": Model(mlp, noise(1, 4096)),
    "MLP 4096, 8 rows": Model(mlp, noise(8, 4096)),
    "LSTM": Model(Sequences, noise(1, 64, 512)),
}


@dataclass(frozen=True)
class Row:
    """One contender on one model."""

    model: str
    contender: str
    milliseconds: float
    """The best of all rounds."""
    speed: float
    """How many times faster than the float model, the median over the rounds."""
    sqnr: float


def contenders(model: nn.Module, example: tuple[Tensor, ...]) -> dict[str, Callable[..., Any]]:
    by_token = QuantConfig().set_all(X86.modes["dynamic"].but(granularity=PerToken()))
    whole, token = (
        qc.quantize(model, example, mode="dynamic", backend="x86", config=config).program for config in (None, by_token)
    )
    return {
        EAGER: model,
        PEER: quantize_dynamic(copy.deepcopy(model)),  # type: ignore[no-untyped-call]
        WHOLE: qc.lower(whole, "x86"),
        TOKEN: qc.lower(token, "x86"),
    }


def sqnr(expected: Tensor, found: Tensor) -> float:
    noise_power = (expected - found).double().square().sum().clamp(min=1e-300)
    return float(10 * torch.log10(expected.double().square().sum() / noise_power))


def measure(name: str, rounds: int) -> list[Row]:
    """Run all contenders of a model in turns."""
    torch.manual_seed(0)
    model = MODELS[name].build().eval()
    return race(name, contenders(model, MODELS[name].data(1)[0]), MODELS[name].data(2), rounds)


def race(name: str, steps: dict[str, Callable[..., Any]], unseen: Inputs, rounds: int) -> list[Row]:
    """Contenders in turns, on inputs that none of them has seen. The float model is among them."""
    expected = torch.cat([steps[EAGER](*x) for x in unseen])
    fidelity = {other: sqnr(expected, torch.cat([step(*x) for x in unseen])) for other, step in steps.items()}
    spent: dict[str, list[float]] = {other: [] for other in steps}
    for _ in range(rounds):
        for other, step in steps.items():
            begin = time.process_time()
            step(*unseen[0])
            spent[other].append(time.process_time() - begin)
    return [
        Row(
            name,
            other,
            min(times) * 1e3,
            median(base / own for base, own in zip(spent[EAGER], times, strict=True)),
            fidelity[other],
        )
        for other, times in spent.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.quantized.engine = "fbgemm"
    warnings.simplefilter("ignore")
    table = Table("model", "contender", "ms, best", "times eager fp32", "SQNR, dB")
    rows: list[Row] = []
    with torch.no_grad():
        for name in options.model:
            found = measure(name, options.rounds)
            rows += found
            for row in found:
                decibels = "" if row.contender == EAGER else f"{row.sqnr:.1f}"
                table.add_row(name, row.contender, f"{row.milliseconds:.2f}", f"{row.speed:.2f}", decibels)
            table.add_section()
    Console(width=120).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
