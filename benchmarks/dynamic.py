"""Dynamic quantization on kernels, beside torch.ao's `quantize_dynamic`, in one run.

    python -m benchmarks.dynamic [--model bert lstm] [--rounds 15] [--json FILE]

`quantc bench --contender quantc-dynamic --contender torch-dynamic` has the same contest with one scale for a tensor; here
one scale for a token is there too, attention with projections apart, and eight rows of the MLP. SQNR is against the float
model, on inputs that nobody has seen.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic

import quantc as qc
from quantc.backends.x86 import X86
from quantc.bench.models import CALIBRATION_SEED, MODELS, UNSEEN_SEED, Model, initialise, noise
from quantc.bench.networks import mlp
from quantc.bench.race import EAGER, Forward, Row, quietly_on_one_thread, race
from quantc.config.config import QuantConfig
from quantc.spec.formats import PerToken
from quantc.support.sqnr import format_sqnr
from quantc.targets.kernels.packing import engine

PEER, WHOLE, TOKEN = "torch.ao dynamic", "quantc, per tensor", "quantc, per token"


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


CHOSEN: dict[str, Model] = {
    "bert": MODELS["bert"],
    "attention": Model("6 layers, projections apart", lambda: initialise(Apart()), noise(128, 768)),
    "vit-tiny": MODELS["vit-tiny"],
    "mlp": MODELS["mlp"],
    "mlp, 8 rows": Model("the same, eight rows", mlp, noise(4096), batch=8),
    "lstm": MODELS["lstm"],
}


def contenders(model: nn.Module, example: tuple[Any, ...]) -> dict[str, Forward]:
    by_token = QuantConfig().set_all(X86.modes["dynamic"].but(granularity=PerToken()))
    whole, token = (
        qc.quantize(model, example, mode="dynamic", backend="x86", config=config).program for config in (None, by_token)
    )
    with engine("fbgemm"):
        peer = quantize_dynamic(copy.deepcopy(model))  # type: ignore[no-untyped-call]
    return {EAGER: model, PEER: peer, WHOLE: qc.lower(whole, "x86"), TOKEN: qc.lower(token, "x86")}


def measure(name: str, rounds: int) -> list[Row]:
    """Run all contenders of a model in turns."""
    torch.manual_seed(0)
    entry = CHOSEN[name]
    model = entry.build().eval()
    steps = contenders(model, entry.data(CALIBRATION_SEED, entry.batch)[0])
    return race(name, steps, entry.data(UNSEEN_SEED, entry.batch), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(CHOSEN), default=list(CHOSEN))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table("model", "contender", "ms, best", "times eager fp32", "SQNR, dB")
    rows: list[Row] = []
    with quietly_on_one_thread():
        for name in options.model:
            found = measure(name, options.rounds)
            rows += found
            for row in found:
                decibels = "" if row.contender == EAGER else format_sqnr(row.sqnr)
                table.add_row(name, row.contender, f"{row.milliseconds:.2f}", f"{row.speed:.2f}", decibels)
            table.add_section()
    Console(width=120).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([row.to_data() for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
