"""Engines outside torch, built as their own documentation says."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from quantc.bench import engines
from quantc.bench.contenders import CONTENDERS, weights_of
from quantc.bench.race import closeness
from tests.support.bench_tasks import tiny_task


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_model_is_quantized_and_close_to_the_float_one(name: str) -> None:
    if missing := CONTENDERS[name].missing():
        pytest.skip(f"{', '.join(missing)} is not installed")
    task = tiny_task()
    built = getattr(engines, name)(task)
    assert closeness(task.model, built.run, task.unseen) > 20
    assert built.weight_bytes is not None
    assert built.weight_bytes < weights_of(task.model)


@pytest.mark.skipif(find_spec("onnxruntime") is None or find_spec("onnx") is None, reason="needs ONNX Runtime")
def test_batches_are_handed_out_by_the_names_of_the_inputs_and_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """What the quantizer of ONNX Runtime is given, without running it."""
    seen: dict[str, Any] = {}

    class Session:
        def __init__(self, path: str) -> None:
            seen["read"] = path

        def get_inputs(self) -> list[Any]:
            return [type("Input", (), {"name": name})() for name in ("left", "right")]

    def quantize_static(source: str, target: str, reader: Any, **options: Any) -> None:
        seen.update(source=source, target=target, options=options)
        seen["batches"] = list(iter(reader.get_next, None))

    import onnxruntime
    import onnxruntime.quantization as quantization
    import onnxruntime.quantization.shape_inference as inference

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(quantization, "quantize_static", quantize_static)
    monkeypatch.setattr(inference, "quant_pre_process", lambda *paths, **_: seen.update(prepared=paths))
    batches = [(torch.full((1,), float(n)), torch.full((1,), -float(n))) for n in range(2)]
    whole, ready, small = (tmp_path / f"{name}.onnx" for name in ("whole", "ready", "small"))
    engines._quantize_onnx(whole, ready, small, batches)
    assert seen["prepared"] == (str(whole), str(ready))
    assert (seen["source"], seen["target"]) == (str(ready), str(small))
    assert [{name: array.tolist() for name, array in batch.items()} for batch in seen["batches"]] == [
        {"left": [0.0], "right": [-0.0]},
        {"left": [1.0], "right": [-1.0]},
    ]
    assert seen["options"]["per_channel"] is True
    assert seen["options"]["activation_type"] is quantization.QuantType.QUInt8


def test_one_result_is_alone_and_several_are_a_tuple() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    assert engines._unflatten([x]) is x
    assert engines._unflatten([x, y]) == (x, y)
    assert engines._by_name(["a", "b"], (x, y)) == {
        "a": np.ones(1, dtype=np.float32),
        "b": np.zeros(1, dtype=np.float32),
    }
    with pytest.raises(ValueError, match="zip"):
        engines._by_name(["a"], (x, y))
