"""The float weights that a quantized model was made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from quantc.flows.fx import get_default_qat_qconfig_mapping, get_default_qconfig_mapping, prepare_fx, prepare_qat_fx
from quantc.flows.fx.custom_config import CustomConfigError
from quantc.flows.fx.original_weights import Weights, original_weights


class Net(nn.Module):
    """A convolution with its norm, a layer without bias, and a weight that the model itself holds, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem: Any = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))
        self.fc, self.w = nn.Linear(3, 3, bias=False), nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Any:
        y = self.fc(self.stem(x).mean((2, 3)))
        return F.linear(F.linear(y, self.w), self.w)


def made(mapping: Any = None) -> tuple[Net, Weights]:
    torch.manual_seed(0)
    model = Net().eval()
    model.stem[1].running_var.uniform_(0.5, 2)
    prepared = prepare_fx(model, mapping or get_default_qconfig_mapping(), (torch.randn(2, 2, 3, 3),))
    return model, original_weights(prepared.program)


def test_weights_go_by_the_name_of_their_module_and_their_number_in_it() -> None:
    _, found = made()
    assert set(found) == {"stem_0_packed_weight_0", "fc_packed_weight_0", "_packed_weight_0", "_packed_weight_1"}


def test_norms_are_folded_into_them() -> None:
    model, found = made()
    folded = fuse_conv_bn_eval(model.stem[0], model.stem[1])
    weight, bias = found["stem_0_packed_weight_0"]
    torch.testing.assert_close(weight, folded.weight.detach())
    torch.testing.assert_close(bias, folded.bias.detach())


def test_a_layer_without_bias_has_none() -> None:
    model, found = made()
    weight, bias = found["fc_packed_weight_0"]
    assert torch.equal(weight, model.fc.weight)
    assert bias is None


def test_they_are_copies() -> None:
    model, found = made()
    found["_packed_weight_0"][0].zero_()
    assert float(model.w.abs().sum()) > 0
    assert torch.equal(found["_packed_weight_1"][0], model.w)


def test_layers_that_stay_float_have_none() -> None:
    assert set(made(get_default_qconfig_mapping().set_module_name("fc", None))[1]) == {
        "stem_0_packed_weight_0",
        "_packed_weight_0",
        "_packed_weight_1",
    }


def test_a_model_in_training_is_refused() -> None:
    prepared = prepare_qat_fx(
        nn.Sequential(nn.Linear(2, 2)).train(), get_default_qat_qconfig_mapping(), (torch.zeros(2, 2),)
    )
    with pytest.raises(CustomConfigError, match="calibrated"):
        original_weights(prepared.program)
