"""Whole models in ONNX, run by ONNX Runtime, held against the Q/DQ form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import quantc as qc
from quantc.bench.models import task_of
from quantc.cli.example import digits_cnn, digits_data
from quantc.targets.onnx.op_writers import NoOnnxFormError
from tests import zoo
from tests.support.architectures import CASES as ARCHITECTURES
from tests.support.onnx_models import MARGIN, close, of_case, quantized, same_arrangement, seeded
from tests.zoo.recurrent import Tagger

CASES = {case.name: case for case in (*zoo.CASES, *ARCHITECTURES)}
INTEGER_KERNELS = 0.95

WITHOUT_FORM = frozenset(
    {
        "batch_norm_no_stats",
        "cache",
        "counter",
        "dlrm",
        "embedding_bags",
        "inplace_index_put",
        "inplace_maybe_copy",
        "inplace_saved_before",
        "inplace_set_items",
        "inplace_view",
        "inplace_writes_input",
        "inplace_zeroed",
        "instance_norm_tracking",
        "max_unpool",
        "moving_average",
        "pools",
        "projected_lstm",
        "spell_arithmetic",
        "spell_moves",
        "spell_products",
        "spell_reductions",
        "spell_slices",
    }
)
"""Models with an op that has no ONNX form: writes in place, running statistics, pools of cells of several sizes."""
NOT_TRIED = {"cond": "a branch that no batch enters", "spell_dtypes": "it yields bfloat16, which numpy does not have"}
CHAOTIC = {"resnet18": 6.0}
"""Deep models with random weights, in which one rounding that goes the other way grows: how far, in dB, less than."""
LARGE = {case.name for case in ARCHITECTURES} | {"dense_block", "encoder", "decoder_layer", "mbconv", "resnet18", "vit"}


def cases() -> Iterator[Any]:
    for name in CASES:
        if name not in NOT_TRIED:
            yield pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else [])


@pytest.mark.parametrize("name", list(cases()))
def test_the_zoo_is_written_and_runs_or_says_what_has_no_form(name: str) -> None:
    program, args, kwargs = of_case(CASES[name])
    if name in WITHOUT_FORM:
        with pytest.raises(NoOnnxFormError, match="have no ONNX form"):
            qc.lower(program, "onnx")
        return
    model = qc.lower(program, "onnx")
    wanted, found = program(*args, **kwargs), model(*args, **kwargs)
    assert same_arrangement(wanted, found)
    before = close(CASES[name].model()(*args, **kwargs), wanted)
    least = min(before + MARGIN, 100.0) - CHAOTIC.get(name, 0.0)
    assert close(wanted, found) >= least, f"{before:.1f} dB from float, {close(wanted, found):.1f} dB in ONNX"


# -- the models that count -----------------------------------------------------------------------------------------


def test_digits_cnn() -> None:
    model, inputs = digits_cnn()
    batches, held_out = digits_data()
    prepared = qc.prepare(qc.capture(model, inputs, dynamic_shapes=({0: Dim("batch")},)), "onnx")
    qc.calibrate(prepared, batches, progress="silent")
    program = qc.convert(prepared)
    written = qc.lower(program, "onnx")
    with torch.no_grad():
        floats = model(held_out.images)
    wanted, found = program(held_out.images), written(held_out.images)
    assert close(wanted, found) >= close(floats, wanted) + MARGIN
    assert (wanted.argmax(1) == found.argmax(1)).double().mean() >= 0.99
    assert (found.argmax(1) == held_out.labels).double().mean() >= 0.99
    assert written.fusions().fraction >= INTEGER_KERNELS
    assert written.proto.ByteSize() <= 0.3 * sum(value.numel() * 4 for value in model.state_dict().values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2"])
def test_networks_for_images(name: str) -> None:
    task = task_of(name)
    program = quantized(task.model, task.calibration)
    written = qc.lower(program, "onnx")
    wanted = [program(*inputs) for inputs in task.unseen]
    found = [written(*inputs) for inputs in task.unseen]
    with torch.no_grad():
        floats = [task.model(*inputs) for inputs in task.unseen]
    assert close(wanted, found) >= close(floats, wanted) + MARGIN
    assert all(torch.equal(left.argmax(1), right.argmax(1)) for left, right in zip(wanted, found, strict=True))
    assert written.fusions().fraction >= INTEGER_KERNELS
    size = sum(value.numel() * value.element_size() for value in task.model.state_dict().values())
    assert written.proto.ByteSize() <= 0.3 * size


@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_transformers_compute_their_products_on_integers(name: str) -> None:
    program, args, kwargs = of_case(CASES[name])
    model = qc.lower(program, "onnx")
    assert model.fusions().fraction == 1.0
    wanted, found = program(*args, **kwargs), model(*args, **kwargs)
    left, right = (value[0] if isinstance(value, tuple) else value for value in (wanted, found))
    assert (left.argmax(-1) == right.argmax(-1)).double().mean() >= 0.99


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_lstm_tagger(mode: Any) -> None:
    model = seeded(lambda: Tagger(nn.LSTM(12, 64, num_layers=2, batch_first=True, bidirectional=True), 128)).eval()
    words = [(seeded(lambda: torch.randint(0, 32, (2, 10)), seed),) for seed in range(3)]
    result = qc.quantize(model, words[0], words if mode == "static" else None, backend="onnx", mode=mode)
    written = qc.lower(result.program, "onnx")
    wanted, found = result.program(*words[0]), written(*words[0])
    assert close(wanted, found) >= close(model(*words[0]), wanted) + MARGIN
    assert (wanted.argmax(-1) == found.argmax(-1)).double().mean() >= 0.99
    if mode == "static":
        assert written.proto.ByteSize() <= 0.3 * sum(value.numel() * 4 for value in model.state_dict().values())


def test_a_weight_is_stored_once() -> None:
    """Whichever op reads it, and however often its layer is called."""
    layer = seeded(lambda: nn.Linear(128, 128))
    rows = seeded(lambda: torch.randn(4, 128))
    model = nn.Sequential(layer, nn.ReLU(), layer).eval()
    for mode, data in (("static", [rows]), ("dynamic", None), ("weight-only", None)):
        written = qc.lower(qc.quantize(model, (rows,), data, backend="onnx", mode=mode).program, "onnx")  # type: ignore[arg-type]
        large = [tensor for tensor in written.proto.graph.initializer if len(tensor.raw_data) >= 128 * 128]
        assert len(large) == 1, mode
