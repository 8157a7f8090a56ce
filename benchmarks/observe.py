"""Cost of observation: nanoseconds per element, beside torch's own observers, and the time of a range search.

    python -m benchmarks.observe [--json FILE] [--quick]

The contenders take turns on the same tensors in one process, so that a busy machine slows them alike; the best of
all rounds counts. One thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.ao.quantization.observer import HistogramObserver, MinMaxObserver

from quantc.observe import Histogram, MinMax, start
from quantc.spec.formats import PerChannel
from quantc.spec.spec import INT8

Action = Callable[[Tensor], object]


def tensors(quick: bool) -> dict[str, Tensor]:
    """A flat normal tensor, and activations as a ResNet has them, half of them zero."""
    generator = torch.Generator().manual_seed(0)
    batch = 2 if quick else 8
    flat = torch.randn(batch << 17, generator=generator)
    image = torch.randn(batch, 64, 56, 56, generator=generator).relu()
    return {"normal": flat, "relu": image, "relu, channels last": image.to(memory_format=torch.channels_last)}


def contenders() -> dict[str, Action]:
    """The contenders, each ready to observe tensor after tensor."""
    minmax, histogram = MinMax(), Histogram()
    channels = start(INT8.but(observe="minmax", granularity=PerChannel(axis=0)))
    torch_minmax, torch_histogram = MinMaxObserver(), HistogramObserver()
    return {
        "minmax": minmax.update,
        "minmax per channel": channels.update,
        "histogram": histogram.update,
        "torch.aminmax": torch.aminmax,
        "torch.histc": lambda x: torch.histc(x, 2048),
        "torch.ao MinMaxObserver": torch_minmax,
        "torch.ao HistogramObserver": torch_histogram,
    }


def updates(x: Tensor, rounds: int) -> dict[str, float]:
    """Nanoseconds an element for each contender: the best of interleaved rounds."""
    actions = contenders()
    if x.dim() == 1:
        del actions["minmax per channel"]
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(rounds):
        for name, action in actions.items():
            begin = time.process_time()
            action(x)
            best[name] = min(best[name], time.process_time() - begin)
    return {name: seconds / x.numel() * 1e9 for name, seconds in best.items()}


def searches(x: Tensor) -> dict[str, float]:
    """Milliseconds to find a range from statistics, without the data."""
    histogram, theirs = Histogram(), HistogramObserver()
    histogram.update(x)
    theirs(x)
    found = {}
    for method in ("minmax", "percentile", "mse", "entropy"):
        spec = INT8.but(observe=method)
        found[method] = _best(lambda spec=spec: histogram.qparams(spec))  # type: ignore[misc]
    found["torch.ao HistogramObserver"] = _best(theirs.calculate_qparams)
    return found


def _best(action: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        begin = time.process_time()
        action()
        times.append(time.process_time() - begin)
    return min(times) * 1e3


def table(title: str, columns: dict[str, dict[str, float]]) -> Table:
    view = Table(title=title)
    view.add_column("")
    for heading in columns:
        view.add_column(heading, justify="right")
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    for name in names:
        cells = (column.get(name) for column in columns.values())
        view.add_row(name, *("" if cell is None else f"{cell:.2f}" for cell in cells))
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements to a file")
    parser.add_argument("--quick", action="store_true", help="smaller tensors, fewer rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = tensors(options.quick)
    cost = {name: updates(x, 5 if options.quick else 20) for name, x in data.items()}
    ranges = {name: searches(x) for name, x in data.items()}
    console = Console()
    console.print(table("update, nanoseconds an element", cost))
    console.print(table("finding a range, milliseconds", ranges))
    if options.json is not None:
        options.json.write_text(json.dumps({"nanoseconds an element": cost, "milliseconds": ranges}, indent=2) + "\n")


if __name__ == "__main__":
    main()
