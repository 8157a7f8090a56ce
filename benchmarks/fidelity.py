"""Fidelity beside torch.ao and torchao, all on the same data: `python -m benchmarks.fidelity [encoders|photos]`.

Each tool has its own defaults. Everything is simulated in float (Q/DQ), theirs too: kernels that saturate are not
part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from quantc.backends.x86 import X86
from tests.inspect.test_fidelity import FULL, quantized
from tests.support.oracles import int8_share, pt2e_x86, quiet, whole_sqnr


def encoders() -> None:
    print(f"{'':18} {'x86':>8} {'int8':>6} {'PT2E':>8} {'PT2E + matmul':>14}   (SQNR in dB on unseen inputs)")
    for encoder in FULL:
        model, calibration, unseen = encoder.build(), encoder.data(8, 1), encoder.data(4, 2)
        program = quantized(model, calibration, X86)
        share, _ = int8_share(program.module, unseen[0])
        ours = whole_sqnr(model, program, unseen)
        theirs, more = (
            whole_sqnr(model, pt2e_x86(model, calibration, with_matmul=flag), unseen) for flag in (False, True)
        )
        print(f"{encoder.name:18} {ours:8.2f} {share:6.1%} {theirs:8.2f} {more:14.2f}", flush=True)


def photos() -> None:
    from tests.models.test_efficientnet import BACKENDS, Bench

    bench = Bench()
    for name in BACKENDS:
        print(f"quantc {name:12} {bench.ours(name)}", flush=True)
    print(f"quantc x86, weights per tensor {bench.ours('x86', 'per-tensor')}", flush=True)
    for tool in ("PT2E x86", "FX x86", "FX qnnpack"):
        print(f"{tool:19} {bench.theirs(tool)}", flush=True)


PARTS: dict[str, Callable[[], None]] = {"encoders": encoders, "photos": photos}

if __name__ == "__main__":
    torch.set_num_threads(1)
    quiet()
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
