"""What the tests of calibration have in common: small models, their data, and a digest of what came out.

`python -m tests.support.calibration OUT [--checkpoint FILE] [--hang-at BATCH]` calibrates the small model in a process of its
own, for tests that kill it or start several with torchrun; it writes the digest to OUT, or to OUT.<rank>.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.ir.program import Program
from quantc.spec.spec import UINT8
from tests.support.paths import ROOT
from tests.support.small_backend import SMALL

BATCHES = 9


class Small(nn.Module):
    """Convolutions with a residual and a head. No batch norm: eager activations are those of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv1(x))
        y = torch.relu(self.conv2(y) + y)
        out: Tensor = self.head(y.mean((2, 3)))
        return out


def torchrun(processes: int, out: Path, *options: str) -> list[str]:
    """What each process of a torchrun job wrote, in order of rank."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launch, "-m", "tests.support.calibration", str(out), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [out.with_name(f"{out.name}.{rank}").read_text(encoding="utf-8") for rank in range(processes)]


def small() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Small().eval()


def observing(observe: str) -> Backend:
    """A small backend with one way to observe activations."""
    return SMALL.but(act=UINT8.but(observe=observe))


@cache
def captured() -> Program:
    return qc.capture(small(), (batch(0),), method="fx")


def prepared(observe: str = "mse") -> Program:
    return qc.prepare(captured(), observing(observe))


def batch(index: int) -> Tensor:
    """Batches of different scale, so that each of them matters."""
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(2, 3, 8, 8, generator=generator) * (1 + index % 4)


def data(count: int = BATCHES) -> list[Tensor]:
    return [batch(index) for index in range(count)]


def eager_activations(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The tensors of the small model, by eager torch."""
    first = torch.relu(model.conv1(x))  # type: ignore[operator]
    second = model.conv2(first)  # type: ignore[operator]
    total = second + first
    mean = torch.relu(total).mean((2, 3))
    out = model.head(mean)  # type: ignore[operator]
    return {"x": x, "relu": first, "conv2d_1": second, "add": total, "mean": mean, "linear": out}


def digest(program: Program) -> str:
    """One digest of all qparams a calibrated program comes to."""
    return digest_of(qc.convert(program))


def digest_of(converted: Program) -> str:
    total = blake2b(digest_size=16)
    for name, found in sorted(converted.plan.qparams.items()):
        total.update(name.encode() + found.scale.numpy().tobytes() + found.zero_point.numpy().tobytes())
    return total.hexdigest()


def digest_of_collected(program: Program) -> str:
    """One digest of all that a calibration collected."""
    total = blake2b(digest_size=16)
    for name, halves in sorted(program.plan.collected.items()):
        state = halves.to_state()
        total.update(f"{name} {sorted(state.values.items())}".encode())
        for key, tensor in sorted(state.tensors.items()):
            total.update(key.encode() + tensor.numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--hang-at", type=int, default=-1)
    parser.add_argument("--observe", default="mse")
    parser.add_argument("--fail-on", type=int, default=-1)
    parser.add_argument("--collect")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))

    def batches() -> Iterator[Tensor]:
        for index in range(BATCHES):
            if index == options.hang_at:
                time.sleep(600)
            yield batch(index) * (float("nan") if index == options.fail_on else 1.0)

    program = prepared(options.observe)
    out = options.out.with_name(f"{options.out.name}.{rank}")
    try:
        qc.calibrate(program, batches(), checkpoint=options.checkpoint, every=1, collect=options.collect)
    except qc.QuantcError as error:
        out.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        return
    collected = f" {digest_of_collected(program)}" if options.collect else ""
    out.write_text(f"{program.plan.batches} {digest(program)}{collected}", encoding="utf-8")


if __name__ == "__main__":
    main()
