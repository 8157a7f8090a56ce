"""Models, batches and calls as people have them: loaders with labels, short last batches, other floats, NumPy arrays, dicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

import quantc as qc
from quantc.errors import AnnotationError, CaptureError, ConfigError, DataError, InputError, LoadError, SaveError
from quantc.inspect.coverage import Verdict
from quantc.patterns import aten
from tests.support.agree import fingerprint
from tests.support.edge_models import module

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


# -- what a new user met -------------------------------------------------------------------------------------------


class Gate(nn.Module):
    """Decides by the data."""

    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.sum() > 0) else -x


class Gated(nn.Module):
    def __init__(self, *, copies: bool = False) -> None:
        super().__init__()
        self.before, self.gate, self.copies = nn.Linear(6, 6), Gate(), copies

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        gated: Tensor = self.gate(y.clone() if self.copies else y)
        return gated


class OfDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        y: Tensor = self.fc(batch["a"]) - batch["b"]
        return y


def test_quantize_takes_leaves() -> None:
    result = qc.quantize(Gated(copies=True).eval(), (X,), [X], leaf=Gate)
    assert [str(node.target) for node in result.captured.opaque()] == ["gate"]
    by_name = qc.quantize(Gated(copies=True).eval(), (X,), [X], leaf="gate")
    assert by_name(X).shape == X.shape
    with pytest.raises(InputError, match="leaf is for models, and a Program was given"):
        qc.quantize(result.captured, None, [X], leaf=Gate)


def test_a_leaf_may_write_and_a_copy_is_the_way_out() -> None:
    program = qc.capture(Gated().eval(), (X,), leaf=Gate)
    row = qc.prepare(program, "x86", allow_empty=True).coverage().row("linear")
    assert row is not None
    assert "gate is kept whole, and nothing is known of it: it may write to linear in place" in row.reason
    assert "let the model give it a copy, linear.clone()" in row.reason
    copied = qc.capture(Gated(copies=True).eval(), (X,), leaf=Gate)
    found = qc.prepare(copied, "x86").coverage().row("linear")
    assert found is not None
    assert found.verdict is Verdict.QUANTIZED


def test_an_input_that_no_one_writes_to_is_not_said_to_be_written_to() -> None:
    model = module(lambda s, x, ids: s.fc(x) + s.gate(ids), fc=lambda: nn.Linear(6, 6), gate=Gate)().eval()
    prepared = qc.prepare(qc.capture(model, (X, X.clone()), leaf=Gate), "x86", allow_empty=True)
    reasons = [row.reason for row in prepared.coverage().rows]
    assert not any("is written to in place" in reason for reason in reasons)
    assert any("gate is kept whole" in reason and "shares memory with x" in reason for reason in reasons)


def test_a_tensor_that_is_written_to_is_said_to_be() -> None:
    model = module(lambda s, x, y: (s.fc(x), y.add_(1))[0], fc=lambda: nn.Linear(6, 6))().eval()
    row = qc.prepare(qc.capture(model, (X, X.clone())), "x86", allow_empty=True).coverage().row("linear")
    assert row is not None
    assert "is written to in place" in row.reason


@pytest.mark.parametrize("method", ["export", "fx"])
def test_the_order_of_keys_does_not_matter(method: Any) -> None:
    model = OfDict().eval()
    a, b = X, X + 1
    result = qc.quantize(model, ({"a": a, "b": b},), [{"b": b, "a": a}], method=method)
    wanted = result({"a": a, "b": b})
    for made in (result, qc.lower(result.program, "x86")):
        for _ in range(3):
            torch.testing.assert_close(made({"b": b, "a": a}), wanted, rtol=0, atol=0.1)
    assert torch.equal(result.captured({"b": b, "a": a}), model({"a": a, "b": b}))
    with pytest.raises(InputError, match=r"batch is arranged as \{a: \*\}"):
        result({"a": a})


def test_the_order_of_keywords_does_not_matter() -> None:
    model = module(lambda s, *, a, b: s.fc(a) - b, fc=lambda: nn.Linear(6, 6))().eval()
    a, b = X, X + 1
    result = qc.quantize(model, None, [{"b": b, "a": a}], example_kwargs={"a": a, "b": b})
    assert torch.equal(result.captured(b=b, a=a), model(a=a, b=b))
    assert torch.equal(result(b=b, a=a), result(a=a, b=b))
    for target in ("x86", "onnx", "executorch"):
        lowered: Any = qc.lower(result.program, target)
        assert torch.equal(lowered(b=b, a=a), lowered(a=a, b=b))
    with pytest.raises(InputError, match=r"call it with \(a=a, b=b\)"):
        result(a=a, c=b)


def test_example_inputs_in_a_dict_are_keywords() -> None:
    with pytest.raises(CaptureError, match="example_inputs is a dict") as caught:
        qc.capture(network(), {"input": X})  # type: ignore[arg-type]
    assert "example_kwargs=" in str(caught.value.advice)


def test_nan_in_the_data_names_no_size_to_leave_float() -> None:
    model = module(lambda s, x: s.fc(x).view(x.shape[0], 2, 3), fc=lambda: nn.Linear(6, 6))().eval()
    broken = X.clone()
    broken[0, 0] = float("nan")
    with pytest.raises(DataError, match="1 of 60 values are NaN or infinite") as caught:
        qc.quantize(model, (X,), [broken])
    assert "sym_size" not in str(caught.value)
    assert "set_node('linear', FLOAT)" in str(caught.value.advice)


@pytest.mark.parametrize(("layer", "name"), [(0, "weight"), (0, "bias"), (1, "weight")])
def test_nan_in_a_weight_is_named_while_calibrating(layer: int, name: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4)).eval()
    with torch.no_grad():
        getattr(model[layer], name).view(-1)[0] = float("nan")
    with pytest.raises(DataError, match=rf"1 of \d+ values of {layer}\.{name}") as caught:
        qc.quantize(model, (X,), [X])
    assert str(caught.value.advice).startswith("correct the model")


def test_a_config_that_leaves_all_float_is_named_first() -> None:
    with pytest.raises(AnnotationError) as caught:
        qc.quantize(network(), (X,), [X], config=qc.QuantConfig().set_all(qc.FLOAT))
    assert caught.value.what.startswith("nothing was quantized: the config leaves Sequential float: everything")
    assert str(caught.value.advice).startswith("leave that out of the config")


def test_packed_sequences_are_told_once_with_the_flow_that_takes_them() -> None:
    class Packs(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False).data

    with pytest.raises(CaptureError) as caught:
        qc.capture(Packs(), (torch.ones(2, 3, 4), torch.tensor([3, 2])), "fx")
    assert caught.value.what.count("packed sequences have sizes") == 1
    assert "quantc.flows.tracing" in str(caught.value.advice)


def test_a_pattern_that_there_is_not_suggests_one() -> None:
    with pytest.raises(AttributeError, match=r"no 'lineer': did you mean linear\?"):
        getattr(aten, "lineer")  # noqa: B009
    assert not hasattr(aten, "__path__")


def test_held_out_data_far_from_what_calibration_saw_is_said_first() -> None:
    with pytest.warns(UserWarning, match="not like that calibrated with"):
        report = qc.quantize(network(), (X,), [X * 0.01], held_out=[X]).report
    first = report.warnings[0]
    assert first.startswith("the data measured on is not like that calibrated with: ")
    assert "of input input_1 over 1 held-out batch lies far outside of what calibration saw" in first
    assert str(report).startswith(f"warning: {first[:30]}")
    assert report.to_data()["outside"][0]["share"] > 0.5


def test_held_out_data_of_the_same_kind_is_not_outside() -> None:
    rows = torch.split(torch.randn(400, 6, generator=torch.Generator().manual_seed(1)), 40)
    assert not qc.quantize(network(), (X,), rows, held_out=3).report.outside
    assert not qc.quantize(network(), (X,), rows, held_out=3, mode="dynamic").report.outside


NO_PATHS: dict[str, Any] = {
    "None": None,
    "a number": 3,
    "bytes": b"model.qc",
    "a list": ["model.qc"],
    "a model": nn.Linear(2, 2),
}


@pytest.mark.parametrize("name", NO_PATHS)
def test_what_is_no_path_is_refused_by_every_reader_and_writer(name: str) -> None:
    given = NO_PATHS[name]
    result = qc.quantize(network(), (X[:4],), [X])
    with pytest.raises(LoadError, match="is no path"):
        qc.load(given)
    for made in (result, result.program, qc.lower(result.program, "x86"), qc.lower(result.program, "onnx")):
        with pytest.raises(SaveError, match="is no path"):
            made.save(given)
    for use in (qc.QuantConfig().save, qc.QuantConfig.load):
        with pytest.raises(ConfigError, match="is no path"):
            use(given)
