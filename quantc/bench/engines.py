"""Engines outside torch: ONNX Runtime and OpenVINO. Both are imported lazily."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from quantc.bench.contender_build import Built
from quantc.bench.models import Inputs, Task
from quantc.targets.onnx.sessions import OnnxRuntime, as_array, as_tensor


def onnxruntime(task: Task) -> Built:
    """Static quantization in Q/DQ form: activations uint8, weights int8 per channel."""
    with TemporaryDirectory() as folder:
        whole, ready, small = (Path(folder) / f"{name}.onnx" for name in ("float", "prepared", "int8"))
        torch.onnx.export(task.model, task.calibration[0], whole, dynamo=True, external_data=False)
        _quantize_onnx(whole, ready, small, task.calibration)
        content = small.read_bytes()
    session = OnnxRuntime(content, 1)
    return Built(lambda *inputs: _unflatten(session(inputs)), len(content))


def _quantize_onnx(whole: Path, ready: Path, small: Path, batches: Inputs) -> None:
    quantization: Any = import_module("onnxruntime.quantization")
    inference: Any = import_module("onnxruntime.quantization.shape_inference")
    runtime: Any = import_module("onnxruntime")
    inference.quant_pre_process(str(whole), str(ready), skip_symbolic_shape=True)  # shapes are fixed
    names = [each.name for each in runtime.InferenceSession(str(ready)).get_inputs()]

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        """Hands out batches one by one, then None."""

        def __init__(self) -> None:
            self.batches: Iterator[dict[str, Any]] = (_by_name(names, batch) for batch in batches)

        def get_next(self) -> dict[str, Any] | None:
            return next(self.batches, None)

    quantization.quantize_static(
        str(ready),
        str(small),
        Reader(),
        quant_format=quantization.QuantFormat.QDQ,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        per_channel=True,
    )


def openvino(task: Task) -> Built:
    """NNCF's post-training quantization, with its defaults, on OpenVINO on the CPU."""
    vino: Any = import_module("openvino")
    nncf: Any = import_module("nncf")
    converted = vino.convert_model(task.model, example_input=task.calibration[0])
    quantized = nncf.quantize(converted, nncf.Dataset([_arrays(batch) for batch in task.calibration]))
    size = sum(node.data.nbytes for node in quantized.get_ops() if node.get_type_name() == "Constant")
    program = vino.compile_model(quantized, "CPU", {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"})

    def run(*inputs: Any) -> Any:
        found = program(_arrays(inputs))
        return _unflatten([as_tensor(found[index]) for index in range(len(program.outputs))])

    return Built(run, size)


def _arrays(inputs: Sequence[Any]) -> list[Any]:
    return [as_array(value) for value in inputs]


def _by_name(names: Sequence[str], inputs: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(names, _arrays(inputs), strict=True))


def _unflatten(tensors: Sequence[Tensor]) -> Any:
    """Results of these engines in a model's output structure: they return lists only."""
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
