"""The fuser methods, and the table of which serves what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import quantc.nn.intrinsic as nni
from quantc.flows import eager
from quantc.flows.eager.fusers import (
    FUSER_METHODS,
    FusionError,
    fuse_conv_bn,
    fuse_conv_bn_relu,
    fuse_convtranspose_bn,
    fuse_linear_bn,
    get_fuser_method,
)
from tests.support.eager_small import FUSE, Small, check


def test_norms_that_do_not_fit_are_refused_with_their_names() -> None:
    model = Small().eval()
    model.bn = nn.BatchNorm2d(5).eval()
    with pytest.raises(eager.FusionError, match="4 channels and 5") as caught:
        eager.fuse_modules(model, FUSE)
    check(caught.value, "conv, bn, relu")
    model.bn = nn.BatchNorm2d(4, track_running_stats=False).eval()
    with pytest.raises(eager.FusionError, match="running statistics"):
        eager.fuse_modules(model, FUSE)


def lively(norm: Any) -> Any:
    """A norm with statistics and weights that are not the identity."""
    torch.manual_seed(0)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.Conv1d(2, 3, 2), lively(nn.BatchNorm1d(3))], (2, 2, 4)),
        ([nn.Conv2d(2, 3, 2), lively(nn.BatchNorm2d(3)), nn.ReLU()], (2, 2, 4, 4)),
        ([nn.Conv3d(2, 3, 1), lively(nn.BatchNorm3d(3)), nn.ReLU()], (2, 2, 2, 2, 2)),
        ([nn.Linear(4, 3), lively(nn.BatchNorm1d(3))], (5, 4)),
        ([nn.ConvTranspose2d(2, 3, 2), lively(nn.BatchNorm2d(3))], (2, 2, 4, 4)),
        ([nn.Linear(4, 3), nn.ReLU()], (5, 4)),
        ([lively(nn.BatchNorm2d(2)), nn.ReLU()], (2, 2, 4, 4)),
    ],
    ids=lambda given: "-".join(type(layer).__name__ for layer in given) if isinstance(given, list) else "",
)
def test_one_module_computes_what_the_sequence_did(layers: list[nn.Module], shape: tuple[int, ...]) -> None:
    float_model = nn.Sequential(*layers).eval()
    fused = get_fuser_method([type(layer) for layer in layers])(False, *layers)
    x = torch.randn(shape)
    torch.testing.assert_close(fused(x), float_model(x))
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in fused.modules()) or isinstance(
        layers[0], nn.modules.batchnorm._BatchNorm
    )


def test_for_training_norms_are_kept() -> None:
    conv, norm, relu = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
    fused: Any = fuse_conv_bn_relu(True, conv, norm, relu)
    assert type(fused) is nni.ConvBnReLU2d
    assert list(fused) == [conv, norm, relu]
    assert type(fuse_linear_bn(True, nn.Linear(2, 3), nn.BatchNorm1d(3))) is nni.LinearBn1d


def test_what_has_no_form_for_training_is_refused() -> None:
    with pytest.raises(FusionError, match="training"):
        fuse_convtranspose_bn(True, nn.ConvTranspose2d(2, 3, 1), nn.BatchNorm2d(3))
    with pytest.raises(FusionError, match="weight and bias"):
        fuse_conv_bn(True, nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, affine=False))


def test_modes_that_differ_are_refused() -> None:
    with pytest.raises(FusionError, match="BatchNorm2d in training"):
        fuse_conv_bn(False, nn.Conv2d(2, 3, 1).eval(), nn.BatchNorm2d(3))


def test_a_sequence_that_cannot_be_fused_is_refused_with_those_that_can() -> None:
    with pytest.raises(FusionError, match="Linear, Sigmoid") as caught:
        get_fuser_method((nn.Linear, nn.Sigmoid))
    advice = str(caught.value.advice)
    assert "Linear, ReLU" in advice
    assert "Conv2d" not in advice
    assert isinstance(caught.value, NotImplementedError)


def test_methods_of_users_are_found_and_win() -> None:
    def mine(is_qat: bool, *modules: nn.Module) -> nn.Module:
        return modules[0]

    assert get_fuser_method([nn.Linear, nn.Sigmoid], {(nn.Linear, nn.Sigmoid): mine}) is mine
    assert get_fuser_method([nn.Linear, nn.ReLU], {(nn.Linear, nn.ReLU): mine}) is mine
    assert get_fuser_method([nn.Linear], {nn.Linear: mine}) is mine


def test_every_sequence_that_torch_fuses_is_fused() -> None:
    from torch.ao.quantization import fuser_method_mappings as theirs

    assert set(theirs._DEFAULT_OP_LIST_TO_FUSER_METHOD) <= set(FUSER_METHODS)
