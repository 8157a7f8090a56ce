"""ONNX sessions of an engine: arrays in, arrays out. Inputs are not copied, nor are ONNX Runtime's results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quantc.support.optional_dependency import extra

FLOAT_SUMS = ("session.qdq_matmulnbits_accuracy_level", "1")
"""Products with weights that alone are quantized are computed in float. By default ONNX Runtime rounds the other factor
to 8 bits for them."""


class Session(Protocol):
    """A loaded model."""

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run it."""
        ...


def as_array(tensor: Tensor) -> Any:
    """Numpy view of a tensor's memory; engines expect it contiguous."""
    return tensor.detach().resolve_neg().contiguous().numpy()


def as_tensor(array: Any) -> Tensor:
    """Torch view of an array's memory."""
    found = np.asarray(array)
    return torch.from_numpy(found if found.flags.writeable else found.copy())


class OnnxRuntime:
    """A model in ONNX Runtime, on the CPU."""

    def __init__(self, model: bytes | str, threads: int, optimized: Path | None = None) -> None:
        """`model` is a model, or the path of a file; only then can its weights be in a file beside it."""
        runtime = extra("onnxruntime", "onnx", "the engine onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3  # warnings go to stderr
        options.add_session_config_entry(*FLOAT_SUMS)
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
        self._session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.names = [given.name for given in self._session.get_inputs()]
        """The session's input names, in order."""

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        feeds = {name: as_array(value) for name, value in zip(self.names, inputs, strict=True)}
        return [as_tensor(array) for array in self._session.run(None, feeds)]

    @staticmethod
    def optimized(model: bytes) -> Any:
        """The model as optimized by ONNX Runtime, fused kernels included."""
        onnx = extra("onnx", "onnx", "the engine onnxruntime")
        with TemporaryDirectory() as folder:
            path = Path(folder) / "optimized.onnx"
            OnnxRuntime(model, 1, path)
            return onnx.load(str(path))


class OpenVino:
    """A model in OpenVINO, on the CPU."""

    def __init__(self, model: bytes, threads: int) -> None:
        vino = extra("openvino", "openvino", "the engine openvino")
        core = vino.Core()
        settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
        compiled = core.compile_model(core.read_model(model, b""), "CPU", settings)
        self._request = compiled.create_infer_request()
        self._count = len(compiled.outputs)
        self._lock = Lock()
        """A request is for one call at a time, and its results are overwritten by the next."""

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        arrays = [as_array(value) for value in inputs]
        with self._lock:
            found = self._request.infer(arrays, share_inputs=True)
            return [torch.from_numpy(np.array(found[index])) for index in range(self._count)]
