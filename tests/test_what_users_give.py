"""Models, batches and calls as people have them: loaders with labels, short last batches, other floats, NumPy arrays, dicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import quantc as qc
from quantc.errors import AnnotationError, CaptureError, InputError
from tests.agree import fingerprint
from tests.edge_models import module

X = torch.randn(10, 6)
Y = torch.arange(10)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def loader() -> DataLoader[Any]:
    """Batches of 4, 4 and 2 pairs."""
    return DataLoader(TensorDataset(X, Y), batch_size=4)


PICKS: dict[str, tuple[Any, Any]] = {
    "a place": (0, loader),
    "places": ([0], loader),
    "a name": ("image", lambda: ({"image": x, "label": y} for x, y in loader())),
    "its own name": ("input", lambda: ({"input": x, "label": y} for x, y in loader())),
    "a function": (lambda batch: batch[0], loader),
}


@pytest.mark.parametrize(("inputs", "batches"), PICKS.values(), ids=PICKS)
def test_inputs_says_what_the_model_takes_of_each_batch(inputs: Any, batches: Any) -> None:
    wanted = qc.quantize(network(), (X[:4],), list(torch.split(X, 4)))
    found = qc.quantize(network(), (X[:4],), batches(), inputs=inputs)
    assert found.report.calibration is not None
    assert found.report.calibration.batches == 3
    assert torch.equal(found(X), wanted(X))
    prepared = qc.prepare(qc.capture(network(), (X[:1],)), "x86")
    qc.calibrate(prepared, batches(), inputs=inputs)
    assert torch.equal(qc.convert(prepared)(X), wanted(X))


def test_several_inputs_by_name_and_by_place() -> None:
    model = module(lambda s, ids, *, mask: s.fc(ids) * mask, fc=lambda: nn.Linear(6, 6))().eval()
    rows = [{"label": Y[:2], "mask": X[2:4], "ids": X[:2]}]
    example: dict[str, Any] = {"example_inputs": (X[:2],), "example_kwargs": {"mask": X[2:4]}}
    by_name = qc.quantize(model, batches=rows, inputs=("ids", "mask"), **example)
    by_place = qc.quantize(model, batches=[(Y[:2], X[:2], X[2:4])], inputs=(1, 2), **example)
    assert torch.equal(by_name(X, mask=X), by_place(X, mask=X))


def test_a_batch_with_labels_shows_the_line_to_write() -> None:
    prepared = qc.prepare(qc.capture(network(), (X[:4],)), "x86")
    with pytest.raises(InputError, match=r"qc\.calibrate\(prepared, batches, inputs=0\)"):
        qc.calibrate(prepared, loader())
    with pytest.raises(InputError, match=r"inputs='image'"):
        qc.calibrate(prepared, [{"image": X, "label": Y}])
    with pytest.raises(InputError, match=r"inputs='input_1'|inputs='input'"):
        qc.quantize(network(), (X,), [{"input": X, "label": Y}])
    for inputs in (7, "label", (0, "x")):
        with pytest.raises(InputError, match=r"batch 0 has no .*: it holds 2 items"):
            qc.calibrate(prepared, loader(), inputs=inputs)
    with pytest.raises(InputError, match="inputs is a float"):
        qc.calibrate(prepared, loader(), inputs=1.5)  # type: ignore[arg-type]


def test_a_short_last_batch_works() -> None:
    batches = list(torch.split(X, 4))
    assert len(batches[-1]) == 2
    result = qc.quantize(network(), (X[:4],), batches)
    prepared = qc.prepare(qc.capture(network(), (X[:4],)), "x86")
    assert qc.calibrate(prepared, batches).batches == 3
    assert torch.equal(qc.convert(prepared)(X), result(X))


FLOATS = [torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS)
def test_other_floats_are_cast_on_request(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    before = fingerprint(model)
    x = X.to(dtype)
    result = qc.quantize(model, (x[:4],), [x], dtype="float32")
    wanted = qc.quantize(network().to(dtype).float(), (x[:4].float(),), [x.float()])
    assert torch.equal(result(x.float()), wanted(x.float()))
    assert fingerprint(model) == before
    assert f"cast from {str(dtype).removeprefix('torch.')} to float32" in str(result.captured.log[0])
    captured = qc.capture(model, (x,), dtype=torch.float32)
    assert torch.equal(captured(x.float()), network().to(dtype).float()(x.float()))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_error_for_other_floats_leads_with_the_dtype_and_the_line(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    model, x = network().to(dtype), X.to(dtype)
    with pytest.raises(AnnotationError, match=f"Sequential is in {name}, and only float32 is quantized") as error:
        qc.quantize(model, (x,), [x])
    assert (error.value.advice or "").startswith('write qc.quantize(model, example_inputs, batches, dtype="float32")')
    with pytest.raises(CaptureError, match=f"Sequential is in {name} and does not run on the example inputs") as failed:
        qc.capture(model, (X,))
    assert (failed.value.advice or "").startswith('give dtype="float32"')
    assert qc.capture(model, (X,), dtype="float32")(X).dtype is torch.float32


def test_no_other_dtype_is_cast_to() -> None:
    for dtype in ("float16", torch.bfloat16, "int8"):
        with pytest.raises(CaptureError, match="cast to float32 or not at all"):
            qc.capture(network(), (X,), dtype=dtype)
    with pytest.raises(InputError, match="dtype is for models"):
        qc.quantize(qc.capture(network(), (X,)), None, [X], dtype="float32")


def test_arrays_are_taken_for_tensors() -> None:
    wanted = qc.quantize(network(), (X,), [X])
    array = X.numpy()
    frozen = array[::-1]
    frozen.flags.writeable = False
    result = qc.quantize(network(), (array,), [array[:4], (array[4:],)])
    tensor = qc.quantize(network(), (X,), [X[:4], (X[4:],)])
    for made in (result, qc.lower(result.program, "x86")):
        for _ in range(3):
            assert torch.equal(made(array), made(X))
        assert torch.equal(made(frozen), made(X.flip(0)))
    assert torch.equal(result(X), tensor(X))
    assert torch.equal(wanted.captured(array), wanted.captured(X))
    with pytest.raises(InputError, match="is f64"):
        result(array.astype(np.float64))
    with pytest.raises(InputError, match="is a ndarray, not a tensor"):
        result(np.array(["a", "b"]))


@pytest.mark.parametrize("method", ["export", "fx"])
def test_dict_arguments_keep_the_name_of_their_parameter(method: Any) -> None:
    model = module(lambda s, features, y: features["x"] * 2 + features["pair"][1] + y)().eval()
    given = {"x": X, "pair": [X, X]}
    program = qc.capture(model, (given, X), method)
    assert program.signature.parameters == ["features", "y"]
    with pytest.raises(InputError, match=r"features is arranged as \{x: \*\}"):
        program({"x": X}, X)
    with pytest.raises(InputError, match=r"call it with \(features, y\)"):
        program(given, X, X)
    prepared = qc.prepare(program, "x86", allow_empty=True)
    qc.calibrate(prepared, [{"y": X, "features": given}])


def test_errors_about_keywords_show_the_call() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
            return x * mask

    with pytest.raises(CaptureError, match=r"qc\.capture\(model, \(x,\), example_kwargs=\{'mask': mask\}\)"):
        qc.capture(Masked(), (X, X))
    program = qc.capture(Masked(), (X,), example_kwargs={"mask": X})
    for args, kwargs in (((X, X), {}), ((X,), {}), ((), {"x": X, "mask": X}), ((X,), {"mask": X, "y": X})):
        with pytest.raises(InputError, match=r"call it with \(x, mask=mask\)"):
            program(*args, **kwargs)
