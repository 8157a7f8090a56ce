"""Times of every kernel that could run a product, shape by shape: the table that `qc.lower` chooses by.

    python -m benchmarks.costs [--target x86] [--only "conv2d depthwise" linear …] [--seconds 0.5] [--write]

Each shape is a small model, quantized as usual; its first product is given to every maker of kernels that takes it. All
kernels take turns, call by call, each with what follows it in a network: for convolutions a small one on the kernel that
is offered first, for linear layers a norm. Alone in a loop a kernel finds its code in the cache, which other kernels
would have to make room for; on MobileNetV2 that makes 60 µs a call of fbgemm between those of onednn. One thread, images channels last, seconds of the processor; of all times the one that a tenth
of them are below, since others on the machine only ever add to them. `--write` puts the rows into the table of the
target, in the place of those of the same shape.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

import quantc as qc
from quantc.pipeline.pipeline import Pipeline
from quantc.targets.kernels import costs
from quantc.targets.kernels.kernel import Kernel, Work
from quantc.targets.kernels.kernel_table import Call, NoKernelError, Placement, kernels_for
from quantc.targets.kernels.tuning import processor
from quantc.targets.target_table import KERNEL_FORM

PRODUCTS = ("conv", "conv_transpose", "linear", "matmul", "linear_weight_only")
"""The ops of the integer form that are timed."""
MIN_ROUNDS = 15
ELSEWHERE = torch.zeros(2**20)
"""Read before each call: in a network, other layers have had the cache in the meantime."""
Step = Callable[[], Any]
WARM_UP = 3
ALONE = "what follows, alone"
CONVS: tuple[type[Any], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Case:
    """A model whose first matmul or convolution is timed, and the shape of its input."""

    kind: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    spec: qc.QuantSpec | None = None
    """That of the weights, if they alone are quantized."""


def conv(
    channels: tuple[int, int], sizes: Sequence[int], taps: int, stride: int = 1, groups: int = 1, **more: int
) -> Case:
    """A convolution with a relu, and another behind it that makes its result one of bytes."""
    axes, (inputs, outputs) = len(sizes), channels
    grouped = "" if groups == 1 else "depthwise " if groups == inputs else "grouped "
    kind = f"conv{axes}d {grouped}{'x'.join([str(taps)] * axes)} s{stride}"

    def build() -> nn.Module:
        first = CONVS[axes - 1](inputs, outputs, taps, stride, taps // 2, groups=groups)
        return nn.Sequential(first, nn.ReLU(), CONVS[axes - 1](outputs, 1, 1))

    return Case(kind, build, (more.get("batch", 1), inputs, *sizes))


def spread(channels: tuple[int, int], size: int, taps: int, stride: int, padding: int, groups: int = 1) -> Case:
    """A transposed convolution over two axes."""
    inputs, outputs = channels
    grouped = "" if groups == 1 else "depthwise " if groups == inputs else "grouped "

    def build() -> nn.Module:
        first = nn.ConvTranspose2d(inputs, outputs, taps, stride, padding, groups=groups)
        return nn.Sequential(first, nn.ReLU(), nn.Conv2d(outputs, 1, 1))

    return Case(f"conv_transpose2d {grouped}{taps}x{taps} s{stride}", build, (1, inputs, size, size))


def linear(rows: int, inputs: int, outputs: int) -> Case:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, 1))

    return Case("linear", build, (rows, inputs))


def weights(spec: qc.QuantSpec, rows: int, inputs: int, outputs: int) -> Case:
    return Case("linear_weight_only", lambda: nn.Linear(inputs, outputs), (rows, inputs), spec)


def square(size: int) -> tuple[int, int]:
    return size, size


POINTWISE = (
    (32, 16, 112), (16, 96, 112), (96, 24, 56), (24, 144, 56), (144, 24, 56), (144, 32, 28), (32, 192, 28),
    (192, 32, 28), (192, 64, 14), (64, 384, 14), (384, 64, 14), (384, 96, 14), (96, 576, 14), (576, 96, 14),
    (576, 160, 7), (160, 960, 7), (960, 160, 7), (960, 320, 7), (320, 1280, 7), (64, 64, 56), (64, 256, 56),
    (256, 64, 56), (512, 128, 28), (128, 512, 28), (1024, 256, 14), (256, 1024, 14), (2048, 512, 7), (512, 2048, 7),
    (64, 64, 1), (1280, 1000, 1),
)  # fmt: skip
"""1×1 convolutions of MobileNetV2 and ResNet-50: channels read, channels made, size of the image."""
DEPTHWISE = ((32, 112), (64, 112), (96, 56), (144, 56), (192, 28), (240, 28), (384, 14), (576, 14), (960, 7), (1152, 7))
WIDE = ((16, 56), (32, 56), (64, 56), (128, 28), (256, 14), (512, 7), (64, 28), (64, 14), (128, 14), (256, 7), (64, 7))
CASES: tuple[Case, ...] = (
    *(conv((a, b), square(n), 1) for a, b, n in POINTWISE),
    *(conv((a, b), square(n), 1, batch=8) for a, b, n in ((64, 64, 28), (256, 256, 14), (512, 512, 7))),
    *(conv((a, 2 * a), square(n), 1, 2) for a, n in ((64, 56), (128, 28), (256, 14), (256, 56), (512, 28), (1024, 14))),
    *(conv((c, c), square(n), 3, 1, c) for c, n in DEPTHWISE),
    *(conv((c, c), square(n), 3, 2, c) for c, n in ((64, 112), (96, 112), (144, 56), (192, 28), (384, 14), (576, 14))),
    *(conv((c, c), square(n), 5, 1, c) for c, n in ((72, 28), (120, 28), (240, 14), (480, 14), (672, 14), (960, 7))),
    *(conv((c, c), square(n), 5, 2, c) for c, n in ((72, 56), (144, 56), (240, 28), (672, 14))),
    *(conv((c, c), square(n), 3) for c, n in WIDE),
    *(conv((c, c), square(n), 3, batch=8) for c, n in ((64, 56), (128, 28), (256, 14), (512, 7))),
    *(conv((a, 2 * a), square(n), 3, 2) for a, n in ((32, 56), (64, 56), (128, 28), (256, 14))),
    *(conv((3, b), square(n), 3, s) for b, n, s in ((16, 224, 2), (32, 224, 2), (64, 224, 2), (16, 32, 1), (64, 32, 1))),
    *(conv((a, b), square(n), 5) for a, b, n in ((3, 32, 32), (16, 32, 28), (32, 64, 28), (64, 64, 14))),
    *(conv((3, b), square(n), 7, 2) for b, n in ((64, 224), (32, 224), (64, 112))),
    *(conv((c, c), square(n), 3, s, 32) for c, n, s in ((128, 56, 1), (256, 28, 1), (512, 14, 1), (1024, 7, 1), (256, 56, 2), (512, 28, 2))),
    *(conv((c, c), (n,), k) for k in (1, 3, 5) for c, n in ((32, 2048), (64, 512), (128, 256), (256, 128), (512, 64))),
    *(conv((c, c), (n, n, n), k) for k in (1, 3) for c, n in ((8, 16), (16, 16), (32, 8), (64, 8))),
    *(spread((2 * c, c), n, 2, 2, 0) for c, n in ((32, 56), (64, 28), (128, 14), (256, 7))),
    *(spread((2 * c, c), n, 4, 2, 1) for c, n in ((32, 32), (64, 16), (128, 8), (256, 4))),
    *(spread((2 * c, c), n, 3, 2, 1) for c, n in ((32, 56), (64, 28), (128, 14))),
    *(spread((c, c), n, 4, 2, 1, g) for c, n, g in ((64, 28, 8), (64, 28, 64), (21, 28, 21))),
    *(
        linear(rows, inputs, outputs)
        for rows in (1, 4, 8, 16, 32, 64, 128, 256)
        for inputs, outputs in ((128, 128), (192, 576), (512, 1000), (768, 768), (768, 3072), (3072, 768), (4096, 4096))
        if rows * inputs * outputs < 2**31
    ),
    *(
        weights(spec, rows, inputs, outputs)
        for spec in (qc.INT8_WEIGHT_ONLY, qc.INT4_GROUP)
        for rows in (1, 4, 16, 64, 256)
        for inputs, outputs in ((768, 768), (768, 3072), (2048, 2048), (4096, 4096))
        if rows * inputs * outputs < 2**31
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """The time of each kernel family for one shape; families that refuse it are left out."""

    work: Work
    microseconds: dict[str, float]

    def to_data(self) -> dict[str, Any]:
        times = {family: round(value, 1) for family, value in sorted(self.microseconds.items())}
        return {
            "kind": self.work.kind, "size": self.work.size, "channels": list(self.work.channels), "microseconds": times
        }  # fmt: skip


def candidates(case: Case, target: str) -> tuple[list[Kernel], tuple[fx.Node, ...]]:
    """All kernels for the first product of a case."""
    torch.manual_seed(0)
    x = torch.randn(case.shape)
    config = None if case.spec is None else qc.QuantConfig().set_all(case.spec)
    prepared = qc.prepare(qc.capture(case.build().eval(), (x,), dynamic_shapes=None), target, config=config)
    qc.calibrate(prepared, [(x,)], progress="silent")
    program = Pipeline.parse(KERNEL_FORM).run_on_copy(qc.convert(prepared, reduce_range="weights"))
    calls = (Call(program, node) for node in program.nodes() if node.op == "call_function")
    call = next(call for call in calls if call.op in PRODUCTS)
    found: list[Kernel] = []
    for maker in kernels_for(target)[call.op]:
        try:
            made = maker(call)
        except NoKernelError:
            continue
        found.append(made.kernel if isinstance(made, Placement) else made)
    return found, call.inputs


def inputs_like(nodes: Sequence[fx.Node]) -> list[Tensor]:
    """Bytes of the shapes that nodes yield, images channels last; floats where these are read."""
    made = []
    for node in nodes:
        kind: Any = node.meta["val"]
        if kind.dtype.is_floating_point:
            made.append(torch.randn(tuple(kind.shape)))
            continue
        levels = torch.randint(0, 128, tuple(kind.shape), dtype=torch.uint8).to(kind.dtype)
        made.append(levels.contiguous(memory_format=torch.channels_last) if levels.dim() == 4 else levels)
    return made


def neighbour(target: str, kind: str) -> Step:
    """A step to run after the timed one, as in a network: a layer norm, or a small convolution."""
    if not kind.startswith("conv"):
        return partial(nn.LayerNorm(64).eval(), torch.randn(16, 64))
    kernels, nodes = candidates(conv((16, 16), square(4), 3), target)
    return partial(kernels[0], *inputs_like(nodes))


def timed(kernels: Sequence[Kernel], inputs: Sequence[Tensor], after: Step, seconds: float) -> Timed | None:
    """All kernels in turns on the same inputs; None if they do not say what they do."""
    work = kernels[0].work(*inputs)
    if work is None:
        return None
    steps: dict[str, Step] = {kernel.family: partial(kernel, *inputs) for kernel in kernels}
    samples: dict[str, list[float]] = {name: [] for name in (*steps, ALONE)}
    start, rounds = time.process_time(), 0
    while rounds < MIN_ROUNDS or time.process_time() - start < seconds:
        for name, step in (*steps.items(), (ALONE, after)):
            ELSEWHERE.sum()
            before = time.process_time()
            step()
            after()
            if rounds >= WARM_UP:
                samples[name].append(time.process_time() - before)
        rounds += 1
    low = {name: 1e6 * sorted(times)[len(times) // 10] for name, times in samples.items()}
    follower = low.pop(ALONE) / 2
    return Timed(work, {family: max(1.0, value - follower) for family, value in low.items()})


def write(target: str, rows: Sequence[Timed]) -> Path:
    """Put rows into the table of a target, in the place of those of the same shape."""
    path = Path(costs.__file__).parent / costs.file_of(target)
    known = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    by_shape = {_shape(row): row for row in (*known, *(row.to_data() for row in rows))}
    lines = ",\n".join(f"  {json.dumps(by_shape[shape])}" for shape in sorted(by_shape))
    path.write_text(f'{{"processor": {json.dumps(processor())}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
    return path


def _shape(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["size"], tuple(row["channels"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=["x86", "qnnpack"], default="x86")
    parser.add_argument("--only", nargs="+", default=[""], help="what the kinds begin with")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each shape")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table = Table("kind", "size", "channels", "µs, the fastest first")
    rows: list[Timed] = []
    with torch.no_grad():
        followers = {kind: neighbour(options.target, kind) for kind in ("conv", "linear")}
        for case in (case for case in CASES if case.kind.startswith(tuple(options.only))):
            kernels, nodes = candidates(case, options.target)
            for kernel in kernels:
                kernel.in_order = False
            found = (
                timed(
                    kernels,
                    inputs_like(nodes),
                    followers["conv" if case.kind.startswith("conv") else "linear"],
                    options.seconds,
                )
                if kernels
                else None
            )
            if found is None:
                continue
            rows.append(found)
            times = sorted(found.microseconds.items(), key=lambda item: item[1])
            shown = "  ".join(f"{family} {value:.0f}" for family, value in times)
            table.add_row(found.work.kind, str(found.work.size), "→".join(map(str, found.work.channels)), shown)
    Console(width=120).print(table)
    if options.write:
        Console().print(f"{len(rows)} rows in {write(options.target, rows)}")


if __name__ == "__main__":
    main()
