"""Arguments of capture, refused before anything is traced, with the line that would be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from quantc.capture.argument_checks import check_examples, check_model
from quantc.errors import CaptureError


class Net(nn.Module):
    def forward(self, x: Tensor, mask: Tensor, *, scale: float, shift: float = 0.0) -> Tensor:
        return x * mask * scale + shift


X = torch.ones(2, 3)


def refusal(args: Any, kwargs: Any) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        check_examples(Net(), args, kwargs)
    return caught.value


@pytest.mark.parametrize("model", [torch.relu, "model.onnx", None, nn.ReLU])
def test_what_is_not_a_module_is_refused_by_its_type(model: Any) -> None:
    with pytest.raises(CaptureError, match=type(model).__name__):
        check_model(model)


def test_scripted_models_have_no_code_to_follow() -> None:
    with pytest.raises(CaptureError, match="ReLU is a TorchScript module"):
        check_model(torch.jit.script(nn.ReLU()))


def test_lazy_parameters_are_named_and_shapes_make_them_sound() -> None:
    model = nn.Sequential(nn.ReLU(), nn.LazyLinear(2))
    with pytest.raises(CaptureError, match=r"'1\.weight' of Sequential"):
        check_model(model)
    model(X)
    check_model(model)


def test_examples_that_forward_can_be_called_with_are_taken() -> None:
    check_examples(Net(), (X, X), {"scale": 2.0})
    check_examples(Net(), (X,), {"mask": X, "scale": 2.0, "shift": 1.0})
    check_examples(Net(), None, {})  # a capture without examples


def test_examples_in_other_containers_are_refused_with_what_to_write() -> None:
    assert "(x,)" in str(refusal(X, {}).advice)
    assert "(x,)" in str(refusal([X], {}).advice)
    assert "example_kwargs=" in str(refusal({"x": X}, {}).advice)
    found = refusal((X, X), [("scale", 2.0)])
    assert "list" in found.what
    assert found.where == "example_kwargs"


def test_a_call_that_does_not_fit_shows_the_line_to_write() -> None:
    missing = refusal((X,), {})
    assert "missing a required" in missing.what
    assert "qc.capture(model, (x, mask), example_kwargs={'scale': scale})" in str(missing.advice)
    named = refusal((X,), {"mask": X, "shift": 1.0})
    assert "qc.capture(model, (x, mask), example_kwargs={'scale': scale, 'shift': shift})" in str(named.advice)


def test_an_unknown_keyword_is_named_beside_the_one_that_was_meant() -> None:
    found = refusal((X, X), {"scael": 2.0})
    assert "'scael'" in found.what
    assert "scale" in str(found.advice).split(";")[-1]
    assert "test_argument_checks.py" in str(found.where)


def test_one_positional_argument_is_written_as_a_tuple() -> None:
    with pytest.raises(CaptureError) as caught:
        check_examples(nn.Linear(3, 3), (X, X), {})
    assert "(input,)" in str(caught.value.advice)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (X.to_sparse(), "sparse_coo"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
        (pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 2]), batch_first=True), "PackedSequence"),
    ],
    ids=["sparse", "nested", "packed"],
)
def test_tensors_that_are_not_dense_are_refused_wherever_they_are(value: Any, word: str) -> None:
    assert word in refusal((X, {"inner": [value]}), {"scale": 1.0}).what
    assert word in refusal((X,), {"mask": value, "scale": 1.0}).what
