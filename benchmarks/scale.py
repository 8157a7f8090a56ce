"""Time of passes on large programs: chains of 1k, 10k and 100k nodes, and stars of 5k and 50k rays.

    python -m benchmarks.scale [--json FILE] [--quick]

For each step: seconds, microseconds a node, and the exponent of growth over the sizes of a shape (1 is linear).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import quantc as qc
from quantc.ir.program import Program
from quantc.patterns.fusions import FUSIONS
from tests.support.chains import blocks_for, chain, pretend_calibrated, star
from tests.support.growth import exponent, seconds
from tests.support.small_backend import SMALL

STEPS: dict[str, Callable[[Program], Any]] = {
    "canonicalize": lambda program: qc.Pipeline.parse("canonicalize").run(program),
    "verify": Program.verify,
    "match": FUSIONS.match,
    "dump": Program.dump,
    "fuse": lambda program: qc.Pipeline.parse("fuse").run(program),
    "eliminate-dead": lambda program: qc.Pipeline.parse("eliminate-dead").run(program),
    "annotate": lambda program: qc.Pipeline.parse(f"annotate{{backend={SMALL.name}}}").run(program),
    "share": lambda program: qc.Pipeline.parse("share").run(program),
    "calibrate (pretended)": pretend_calibrated,
    "quantize": lambda program: qc.Pipeline.parse("quantize").run(program),
    "dedup-qdq": lambda program: qc.Pipeline.parse("dedup-qdq").run(program),
    "fold": lambda program: qc.Pipeline.parse("fold").run(program),
}


@dataclass(frozen=True)
class Row:
    """One measurement."""

    shape: str
    nodes: int
    step: str
    seconds: float

    @property
    def microseconds_a_node(self) -> float:
        return self.seconds / self.nodes * 1e6


def measure(shape: str, build: Callable[[], Program]) -> list[Row]:
    """Take one program through all the steps."""
    start = time.process_time()
    program = build()
    nodes = len(program.graph.nodes)
    rows = [Row(shape, nodes, "build", time.process_time() - start)]
    rows += [Row(shape, nodes, name, seconds(partial(step, program))) for name, step in STEPS.items()]
    return rows


def exponents(rows: list[Row]) -> dict[tuple[str, str], float]:
    """The growth of each step over the sizes of each shape."""
    costs: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        costs[row.shape, row.step][row.nodes] = row.seconds
    return {key: exponent(cost) for key, cost in costs.items()}


def table(rows: list[Row], grown: dict[tuple[str, str], float]) -> Table:
    view = Table(title="growth with the size of the program")
    for heading in ("shape", "nodes", "step", "seconds", "µs/node", "exponent"):
        view.add_column(heading, justify="left" if heading in ("shape", "step") else "right")
    largest = {row.shape: row.nodes for row in rows}
    for row in rows:
        growth = f"{grown[row.shape, row.step]:.2f}" if row.nodes == largest[row.shape] else ""
        view.add_row(
            row.shape, f"{row.nodes:,}", row.step, f"{row.seconds:.3f}", f"{row.microseconds_a_node:.1f}", growth
        )
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements to a file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the sizes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    scale = 10 if options.quick else 1
    measure("warm-up", partial(chain, 10, spelling="raw"))
    rows: list[Row] = []
    for nodes in (1_000, 10_000, 100_000):
        blocks = blocks_for(nodes // scale, spelling="raw")
        rows += measure("chain", partial(chain, blocks, spelling="raw"))
    for width in (5_000, 50_000):
        rows += measure("star", partial(star, width // scale, spelling="raw"))
    grown = exponents(rows)
    Console().print(table(rows, grown))
    if options.json is not None:
        report = {
            "rows": [asdict(row) for row in rows],
            "exponents": {f"{shape}/{step}": value for (shape, step), value in grown.items()},
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
