"""Whole eager models, quantized in one call or by the static recipe, beside torch.ao's, in one run.

    python -m benchmarks.eager [--model lstm encoder] [--rounds 15] [--json FILE]

The libraries take turns, round by round, on one thread. Times are the best of all rounds, in seconds of the processor; how
many times faster quantc is, is the median over the rounds, since a shared machine slows all of a round alike. The largest
difference between the results, and the size of the saved state beside that of the floats, come too.
"""

from __future__ import annotations

import argparse
import io
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.ao.quantization as torch_flow
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import quantc as qc
from quantc.flows import eager


class Tagger(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self, cell: Callable[..., nn.Module], width: int, depth: int = 1) -> None:
        super().__init__()
        self.cells = cell(width, width, depth)
        self.head = nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.cells(x)[0])


class Block(nn.Module):
    """A transformer layer with a projection each for queries, keys and values, as most models have them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Any:
        batch, tokens, width = x.shape
        parts = [
            make(x).reshape(batch, tokens, self.heads, -1).transpose(1, 2)
            for make in (self.query, self.key, self.value)
        ]
        seen = nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(batch, tokens, width)
        x = self.first(x + self.out(seen))
        return self.second(x + self.down(nn.functional.gelu(self.up(x))))


class Convolutions(nn.Module):
    """A small image model between stubs."""

    def __init__(self, flow: Any) -> None:
        super().__init__()
        self.quant, self.dequant = flow.QuantStub(), flow.DeQuantStub()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 64), (64, 128)):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.head(self.body(self.quant(x)).mean([2, 3])))


def encoder() -> nn.Module:
    """Places first: otherwise what torch.ao gives fails in its first call. It leaves the attention in float."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048), 2, enable_nested_tensor=False)


def dynamic(build: Callable[[], nn.Module]) -> Callable[[Any], tuple[nn.Module, nn.Module]]:
    def both(flow: Any) -> tuple[nn.Module, nn.Module]:
        model = build().eval()
        return model, flow.quantize_dynamic(model)

    return both


def static(flow: Any, finish: Callable[[Any, nn.Module, Tensor], nn.Module]) -> tuple[nn.Module, nn.Module]:
    model: Any = Convolutions(flow).eval()
    fused = flow.fuse_modules(model, [[f"body.{index + part}" for part in range(3)] for index in range(0, 12, 3)])
    fused.qconfig = flow.get_default_qconfig("fbgemm")
    prepared = flow.prepare(fused)
    data = torch.randn(4, 3, 96, 96)
    prepared(data)
    return model, finish(flow, prepared, data[:1])


def converted(flow: Any, prepared: nn.Module, example: Tensor) -> nn.Module:
    made: nn.Module = flow.convert(prepared)
    return made


def lowered(flow: Any, prepared: nn.Module, example: Tensor) -> nn.Module:
    """On the kernels of the graph engine; torch.ao has modules alone."""
    if flow is not eager:
        return converted(flow, prepared, example)
    return qc.lower(qc.convert(eager.to_program(prepared, (example,))), "x86")


@dataclass(frozen=True)
class Contest:
    """A model and the shape of its input."""

    make: Callable[[Any], tuple[nn.Module, nn.Module]]
    shape: tuple[int, ...]


CONTESTS: dict[str, Contest] = {
    "lstm": Contest(dynamic(lambda: Tagger(nn.LSTM, 512, 2)), (32, 1, 512)),
    "lstm, batch 8": Contest(dynamic(lambda: Tagger(nn.LSTM, 512)), (32, 8, 512)),
    "gru": Contest(dynamic(lambda: Tagger(nn.GRU, 512)), (32, 1, 512)),
    "transformer": Contest(dynamic(lambda: nn.Sequential(*(Block(512, 8) for _ in range(2)))), (1, 64, 512)),
    "transformer, 1 token": Contest(dynamic(lambda: nn.Sequential(*(Block(512, 8) for _ in range(2)))), (1, 1, 512)),
    "nn.TransformerEncoder": Contest(dynamic(encoder), (64, 1, 512)),
    "mlp": Contest(dynamic(lambda: nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))), (1, 1024)),
    "convolutions": Contest(lambda flow: static(flow, converted), (1, 3, 96, 96)),
    "convolutions, lowered": Contest(lambda flow: static(flow, lowered), (1, 3, 96, 96)),
}


@dataclass(frozen=True)
class Row:
    """The results of a contest; times are in microseconds."""

    model: str
    float_us: float
    torch_us: float
    quantc_us: float
    times_faster: float
    """Than torch.ao."""
    largest_difference: float
    bytes_of_float: float


def saved(model: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.getbuffer().nbytes


def spent(models: dict[str, nn.Module], x: Tensor, rounds: int) -> dict[str, list[float]]:
    """The times of each in microseconds, taking turns."""
    found: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for model in models.values():
            model(x)
        calls = max(1, int(0.02 / max(1e-6, _time(models["torch"], x, 1))))
        for _ in range(rounds):
            for name, model in models.items():
                found[name].append(_time(model, x, calls) * 1e6)
    return found


def _time(model: nn.Module, x: Tensor, calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        model(x)
    return (time.process_time() - start) / calls


def run(name: str, rounds: int) -> Row:
    contest = CONTESTS[name]
    made: dict[str, nn.Module] = {}
    for label, flow in (("torch", torch_flow), ("quantc", eager)):
        torch.manual_seed(0)
        made["float"], made[label] = contest.make(flow)
    x = torch.randn(contest.shape)
    with torch.inference_mode():
        difference = float((made["torch"](x) - made["quantc"](x)).abs().max())
    times = spent(made, x, rounds)
    faster = median(theirs / ours for theirs, ours in zip(times["torch"], times["quantc"], strict=True))
    share = saved(made["quantc"]) / saved(made["float"])
    return Row(name, min(times["float"]), min(times["torch"]), min(times["quantc"]), faster, difference, share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=list(CONTESTS), choices=list(CONTESTS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [run(name, options.rounds) for name in options.model]
    table = Table(title="eager models, µs a call")
    for column in ("model", "float", "torch.ao", "quantc", "times faster", "difference", "bytes of float"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row.model, *(f"{value:.0f}" for value in (row.float_us, row.torch_us, row.quantc_us)), f"{row.times_faster:.2f}",
            f"{row.largest_difference:.2g}", f"{row.bytes_of_float:.3f}",
        )  # fmt: skip
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
