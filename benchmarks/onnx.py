"""Static Q/DQ models in ONNX, quantc's beside those of onnxruntime's own `quantize_static`, in one run.

    python -m benchmarks.onnx [MODEL ...]

Both are calibrated with the same batches and run by ONNX Runtime on one thread, in turns. SQNR is against the float model, on
inputs that neither has seen. `quantc, 8 bits` gives weights their whole range, as the peer does: for processors with VNNI.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import quantc as qc
from quantc.bench import engines
from quantc.bench.models import Task, task_of
from quantc.bench.race import EAGER, quietly_on_one_thread, race
from quantc.integer.proof.range_reduction import RangeReduction

MODELS = ("resnet18", "mobilenetv2", "vit-tiny", "bert", "mlp", "lstm")
ROUNDS = 20
PEER = "quantize_static"


def written(task: Task, reduce_range: RangeReduction) -> tuple[Callable[..., Any], int]:
    """quantc's model, and its bytes."""
    prepared = qc.prepare(qc.capture(task.model, task.calibration[0]), "onnx")
    qc.calibrate(prepared, task.calibration, progress="silent")
    model = qc.lower(qc.convert(prepared, reduce_range=reduce_range), "onnx")
    return model, model.proto.ByteSize()


def main(names: list[str]) -> None:
    print(f"{'model':12} {'contender':16} {'ms':>8} {'× eager':>8} {'SQNR':>6} {'bytes':>12}")
    with quietly_on_one_thread():
        for name in names or MODELS:
            task = task_of(name)
            peer = engines.onnxruntime(task)
            made = {"quantc": written(task, "auto"), "quantc, 8 bits": written(task, "no")}
            steps: dict[str, Callable[..., Any]] = {
                EAGER: task.model,
                PEER: peer.run,
                **{other: model for other, (model, _) in made.items()},
            }
            sizes = {PEER: peer.weight_bytes, **{other: size for other, (_, size) in made.items()}}
            for row in race(name, steps, task.unseen, ROUNDS):
                size = sizes.get(row.contender)
                print(
                    f"{name:12} {row.contender:16} {row.milliseconds:8.2f} {row.speed:8.2f} {row.sqnr:6.1f} "
                    f"{'' if size is None else f'{size:,}':>12}"
                )


if __name__ == "__main__":
    main(sys.argv[1:])
