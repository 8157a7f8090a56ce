"""The first run of a converted model: floats that meet quantized tensors, and values that training clipped."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import MixedTensorsError
from quantc.flows import eager
from quantc.nn.quantized import FloatFunctional
from tests.support.eager_small import FUSE, Small, X, check, with_qconfig


class HalfStubbed(nn.Module):
    """Two inputs, one of which is not quantized."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong
        self.quant, self.dequant = eager.QuantStub(), eager.DeQuantStub()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.softmax = nn.Softmax(-1)
        self.add = FloatFunctional()

    def forward(self, x: Tensor) -> Any:
        q = self.quant(x)
        left = self.left(q)
        match self.wrong:
            case "float input":
                return self.dequant(self.add.add(left, self.right(x)))
            case "plain sum":
                return self.dequant(left + self.right(q))
            case "float layer":
                return self.softmax(left)
            case _:
                return self.add.add(left, self.right(q))


@pytest.mark.parametrize(("wrong", "place"), [("float input", "right"), ("plain sum", "the model itself")])
def test_floats_that_meet_quantized_tensors_are_found_by_convert(wrong: str, place: str) -> None:
    prepared = eager.prepare(with_qconfig(HalfStubbed(wrong).eval()))
    prepared(torch.randn(2, 4))
    with pytest.raises(eager.MissingStubError) as caught:
        eager.convert(prepared, accept="no-data")
    check(caught.value, place, "quantized")
    assert isinstance(caught.value, MixedTensorsError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = eager.convert(prepared, accept=("missing-stub", "no-data"))
    with pytest.raises(MixedTensorsError):
        converted(torch.randn(2, 4))


def test_a_quantized_tensor_that_meets_a_float_layer_is_found_by_convert() -> None:
    model: Any = HalfStubbed("float layer").eval()
    model.softmax.qconfig = None
    prepared = eager.prepare(with_qconfig(model))
    prepared(torch.randn(2, 4))
    with pytest.raises(eager.MissingStubError) as caught:
        eager.convert(prepared, accept="no-data")
    check(caught.value, "softmax", "DeQuantStub")


def test_a_model_that_returns_quantized_tensors_is_warned_of() -> None:
    prepared = eager.prepare(with_qconfig(HalfStubbed("no end").eval()))
    prepared(torch.randn(2, 4))
    with pytest.warns(eager.EagerWarning, match="DeQuantStub"):
        eager.convert(prepared, accept="no-data")


def test_a_norm_that_only_fusing_can_quantize_is_an_error_that_says_so() -> None:
    model = with_qconfig(eager.QuantWrapper(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()))
    prepared = eager.prepare(model)
    prepared(torch.randn(3, 4))
    with pytest.warns(eager.UnfusedWarning), pytest.raises(eager.MissingStubError) as caught:
        eager.convert(prepared)
    check(caught.value, "module.1", "fuse_modules(model, [['module.0', 'module.1']])")


def trained(engine: str) -> nn.Module:
    torch.manual_seed(0)
    model = with_qconfig(eager.fuse_modules_qat(Small().train(), FUSE), eager.get_default_qat_qconfig(engine))
    learning = eager.prepare_qat(model)
    for scale in (1.0, 4.0):  # ranges are moving averages, and the second batch is hardly in them
        learning(X * scale)
    return learning.eval()


def test_a_converted_model_that_is_not_what_was_trained_is_warned_of() -> None:
    with pytest.warns(eager.ClippedWarning, match="beyond 127"):
        eager.convert(trained("fbgemm"))
    settled = trained("fbgemm")
    settled(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", eager.ClippedWarning)
        eager.convert(trained("onednn"))
        eager.convert(settled)
