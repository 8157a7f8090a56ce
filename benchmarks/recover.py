"""Accuracy recovered and its cost: `python -m benchmarks.recover [int8|four|cost]`.

EfficientNet-Lite0 has its real weights, calibrated on 32 photos and measured on 120 others: the signal-to-noise ratio of its
outputs, and the share of photos for which it has the float network's first choice. `four` has weights of 4 bits, but for
the first and the last layer. Times are processor seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.backends.executorch import EXECUTORCH
from quantc.backends.qnnpack import QNNPACK
from quantc.backends.x86 import X86
from quantc.bench.networks import TextEncoder, resnet18
from quantc.config.config import QuantConfig
from quantc.ir.program import Program
from quantc.spec.formats import DType
from tests.support import efficientnet
from tests.support.oracles import quiet, sqnr
from tests.support.recovery import TAKES

BACKENDS = (X86, QNNPACK, EXECUTORCH)
PASSES = ("correct-bias", "round", "rescale,round,correct-bias")


class Clock:
    seconds = 0.0


@contextmanager
def clock() -> Any:
    found, start = Clock(), time.process_time()
    yield found
    found.seconds = time.process_time() - start


class Photos:
    """The network, its data, and its outputs in float."""

    def __init__(self) -> None:
        self.model = efficientnet.trained()
        self.calibration = efficientnet.calibration_batches()
        self.photos = efficientnet.evaluation_batches()
        self.reference = self.outputs(self.model)

    @torch.no_grad()
    def outputs(self, network: Callable[..., Any]) -> Tensor:
        return torch.cat([network(*batch) for batch in self.photos])

    def score(self, program: Program) -> str:
        found = self.outputs(program)
        same = float((found.argmax(1) == self.reference.argmax(1)).double().mean())
        return f"{sqnr(self.reference, found):6.2f} dB, top-1 {same:.3f}"

    def show(self, title: str, backend: Backend, config: QuantConfig | None, passes: Sequence[str]) -> None:
        prepared = qc.prepare(qc.capture(self.model, self.calibration[0]), backend, config=config)
        with clock() as plain:
            qc.calibrate(prepared, self.calibration, progress="silent")
        print(f"{title}: rounded to nearest {self.score(qc.convert(prepared))}, calibrated in {plain.seconds:.1f} s")
        for text in passes:
            collect = "moments" if text == "correct-bias" else "recover"
            program = qc.prepare(qc.capture(self.model, self.calibration[0]), backend, config=config)
            with clock() as seen:
                qc.calibrate(program, self.calibration, collect=collect, progress="silent")
            with clock() as fitted:
                better = qc.recover(program, text, progress="silent")
            times = f"calibrated in {seen.seconds:.1f} s, fitted in {fitted.seconds:.1f} s"
            print(f"  {text:28} {self.score(qc.convert(better))}, {times}", flush=True)


def int8() -> None:
    photos = Photos()
    for backend in BACKENDS:
        photos.show(f"int8, {backend.name}", backend, None, PASSES)


def four() -> None:
    photos = Photos()
    backend = replace(X86, takes=(*TAKES, *X86.takes), roles={**X86.roles, "weight": _of_bits(X86, 4)})
    ends = QuantConfig()
    for name in ("stem*", "fc"):
        ends = ends.set(name, _of_bits(X86, 8), role="weight")
    photos.show("W4A8, x86", backend, ends, PASSES)


def _of_bits(backend: Backend, bits: int) -> Any:
    spec: Any = backend.roles["weight"]
    return spec.but(dtype=DType(f"int{bits}"))


def cost() -> None:
    """Calibration with and without what recovery needs, in turns."""
    images: list[tuple[Tensor, ...]] = [(torch.randn(8, 3, 224, 224),) for _ in range(2)]
    tokens: list[tuple[Tensor, ...]] = [(torch.randint(0, 1000, (4, 128)),) for _ in range(2)]
    nets: list[tuple[str, nn.Module, list[tuple[Tensor, ...]]]] = [("ResNet-18", resnet18().eval(), images)]
    nets.append(("encoder", TextEncoder().eval(), tokens))
    for name, model, batches in nets:
        captured = qc.capture(model, batches[0])
        best: dict[str | None, float] = {}
        for _ in range(3):
            for collect in (None, "moments", "gram"):
                program = qc.prepare(captured, "x86")
                with clock() as seen:
                    qc.calibrate(program, batches, collect=collect, progress="silent")
                best[collect] = min(best.get(collect, 1e9), seen.seconds)
        plain = best[None]
        found = ", ".join(f"{collect} x {best[collect] / plain:.2f}" for collect in ("moments", "gram"))
        print(f"{name}: ranges alone {plain:.1f} s; with {found}", flush=True)


PARTS: dict[str, Callable[[], None]] = {"int8": int8, "four": four, "cost": cost}

if __name__ == "__main__":
    torch.set_num_threads(1)
    quiet()
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
