"""ExecuTorch: programs of quantc, and of ExecuTorch's own quantizer for XNNPACK. Imported lazily."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

import quantc as qc
from quantc.annotate.quantizer import mode_config, quantizer_of
from quantc.bench.contender_build import Built
from quantc.bench.models import Task
from quantc.ir.program import Program
from quantc.targets.executorch.lazy_imports import XNNPACK, quiet, runtime

TARGET = "executorch"


def quantc_static(task: Task) -> Built:
    prepared = qc.prepare(_capture(task), TARGET)
    qc.calibrate(prepared, task.calibration, progress="silent")
    return _lower(qc.convert(prepared))


def quantc_dynamic(task: Task) -> Built:
    config = mode_config(quantizer_of(TARGET), "dynamic")
    return _lower(qc.convert(qc.prepare(_capture(task), TARGET, config=config)))


def _capture(task: Task) -> Program:
    return task.program if isinstance(task.program, Program) else qc.capture(task.model, task.calibration[0])


def _lower(program: Program) -> Built:
    made = qc.lower(program, "executorch")
    return Built(made, len(made.content))


def xnnpack(**settings: bool) -> Callable[[Task], Built]:
    """Builder: ExecuTorch's own flow, PT2E with its quantizer for XNNPACK, weights per channel."""

    def build(task: Task) -> Built:
        with quiet():
            quantizers: Any = import_module(f"{XNNPACK}.quantizer.xnnpack_quantizer")
            pt2e: Any = import_module("torchao.quantization.pt2e.quantize_pt2e")
            partitioner: Any = import_module(f"{XNNPACK}.partition.xnnpack_partitioner")
            exir: Any = import_module("executorch.exir")
            import_module("executorch.kernels.quantized")
            config = quantizers.get_symmetric_quantization_config(is_per_channel=True, **settings)
            inputs = task.calibration[0]
            prepared = pt2e.prepare_pt2e(
                torch.export.export(task.model, inputs).module(), quantizers.XNNPACKQuantizer().set_global(config)
            )
            for batch in task.calibration:
                prepared(*batch)
            exported = torch.export.export(pt2e.convert_pt2e(prepared), inputs)
            edge = exir.to_edge_transform_and_lower(exported, partitioner=[partitioner.XnnpackPartitioner()])
            content = bytes(edge.to_executorch().buffer)
            program = runtime().load_program(content)
            method = program.load_method("forward")

        def run(
            *given: Any, kept: Any = program
        ) -> Any:  # a method refers to its program's memory without keeping it alive
            made = method.execute(given)
            return made[0] if len(made) == 1 else tuple(made)

        return Built(run, len(content))

    return build
