"""Behaviours of the FX flow: what is fused, and what patterns of one's own come to."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quantc.flows.fx import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    FuseCustomConfig,
    MatchAllNode,
    convert_fx,
    default_qat_qconfig,
    default_qconfig,
    fuse_fx,
    get_default_qconfig,
    get_default_qconfig_mapping,
    prepare_qat_fx,
)
from quantc.flows.fx.custom_config import CustomConfigError
from tests.support.fx_behaviours import called, run, some

pytestmark = pytest.mark.filterwarnings("ignore")

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BYTES = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)


def settled(model: nn.Module) -> nn.Module:
    """A model whose norms do something."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            module.running_mean = torch.randn_like(module.running_mean)  # type: ignore[arg-type]
    return model


def image(dim: int) -> Tensor:
    return torch.randn(2, 3, *[4] * dim)


def same(fused: Any, model: nn.Module, *inputs: Tensor) -> bool:
    return torch.allclose(fused(*inputs), model(*inputs), atol=1e-5)


@pytest.mark.parametrize("dim", some([1, 2, 3]))
@pytest.mark.parametrize("relu", some([False, True]))
def test_fuse_conv_bn_relu(dim: int, relu: bool) -> None:
    model = settled(nn.Sequential(CONVS[dim](3, 3, 2), NORMS[dim](3), nn.ReLU() if relu else nn.Identity()))
    trained = prepare_qat_fx(model.train(), {"": default_qat_qconfig}, (image(dim),))
    assert {"0.weight", "1.running_mean"} <= set(trained.state_dict())
    model.eval()
    fused = fuse_fx(model, example_inputs=(image(dim),))
    assert not any("batch_norm" in name for name in called(fused))
    assert same(fused, model, image(dim))


def test_fuse_linear_bn_eval() -> None:
    model = settled(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).eval()
    fused = fuse_fx(model, example_inputs=(torch.randn(2, 4),))
    assert list(called(fused)) == ["aten.linear.default"]
    assert same(fused, model, torch.randn(5, 4))


def onednn() -> Any:
    from torch.ao.quantization.backend_config import get_onednn_backend_config

    return get_onednn_backend_config()


@pytest.mark.parametrize("config", some([None, "onednn"]))
@pytest.mark.parametrize("norm", some([False, True]))
def test_fuse_linear_bn_leaky_relu_onednn(norm: bool, config: str | None) -> None:
    model = settled(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if norm else nn.Identity(), nn.LeakyReLU())).eval()
    fused = fuse_fx(model, backend_config=onednn() if config else None, example_inputs=(torch.randn(2, 4),))
    assert list(called(fused)) == ["aten.linear.default", "aten.leaky_relu.default"]
    assert same(fused, model, torch.randn(5, 4))


@pytest.mark.parametrize("config", some([None, "onednn"]))
def test_fuse_linear_tanh_for_onednn_backend(config: str | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()
    fused = fuse_fx(model, backend_config=onednn() if config else None)
    assert list(called(fused)) == ["aten.linear.default", "aten.tanh.default"]
    assert same(fused, model, torch.randn(5, 4))


class Residual(nn.Module):
    def __init__(self, norm: bool, relu: bool, left: bool, two: bool, add: Any) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3) if norm else nn.Identity()
        self.other, self.relu = nn.Conv2d(3, 3, 1) if two else nn.Identity(), nn.ReLU() if relu else nn.Identity()
        self.left, self.add = left, add

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.bn(self.conv(x)), self.other(x)
        out: Tensor = self.relu(self.add(one, two) if self.left else self.add(two, one))
        return out


RESIDUALS = list(itertools.product([False, True], repeat=4))


@pytest.mark.parametrize("config", some([None, "onednn"]))
@pytest.mark.parametrize("kind", some(RESIDUALS[::3]))
def test_fuse_conv_bn_add_relu_onednn(kind: tuple[bool, bool, bool, bool], config: str | None) -> None:
    model = settled(Residual(*kind, add=torch.add)).eval()
    fused = fuse_fx(model, backend_config=onednn() if config else None, example_inputs=(image(2),))
    assert not any("batch_norm" in name for name in called(fused))
    assert same(fused, model, image(2))


@pytest.mark.parametrize("kind", some(RESIDUALS[::3]))
def test_fuse_conv_bn_add_relu_lowering(kind: tuple[bool, bool, bool, bool]) -> None:
    model = settled(Residual(*kind, add=lambda x, y: x + y))
    found = run(model, get_default_qconfig_mapping("onednn"), image(2), backend_config=onednn()).check()
    two = kind[-1]
    assert not found.left
    assert len(found.observers) == (3 if two else 2)  # the input, the other convolution, and the whole


@pytest.mark.parametrize("dim", some([1, 2, 3]))
def test_fuse_convtranspose_bn_eval(dim: int) -> None:
    model = settled(nn.Sequential(TRANSPOSED[dim](3, 3, 2), NORMS[dim](3))).eval()
    fused = fuse_fx(model, example_inputs=(image(dim),))
    assert [name for name in called(fused) if "batch_norm" in name] == []
    assert same(fused, model, image(dim))


def test_fuse_module_relu() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.BatchNorm2d(3), nn.ReLU())
    found = run(settled(model), {"": default_qconfig}, image(2)).check()
    assert len(found.observers) == 3  # behind each pair, not between
    assert found.kernels.count("conv") == 1


class LinearReLU(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 5), nn.ReLU())


@pytest.mark.parametrize("model", some([LinearReLU(), nn.Sequential(LinearReLU(), nn.Linear(5, 5))]))
def test_qconfig_fused_module(model: nn.Module) -> None:
    kinds = [(nn.Linear, default_qconfig), (nn.ReLU, default_qconfig), (functional.relu, default_qconfig)]
    found = run(model, {"": None, "object_type": kinds}, torch.rand(5, 5)).check()
    assert found.left == []
    assert len(found.observers) == 1 + sum(isinstance(each, nn.Linear) for each in model.modules())


def test_problematic_fuse_example() -> None:
    model = nn.Sequential(LinearReLU(), nn.Linear(5, 5))
    kinds = [(nn.Linear, get_default_qconfig("fbgemm")), (nn.ReLU, get_default_qconfig("fbgemm"))]
    found = run(model, {"": None, "object_type": kinds}, torch.randn(1, 5)).check()
    assert len(found.observers) == 3


def take_conv(is_qat: bool, *parts: Any) -> nn.Module:
    return nn.Conv2d(3, 3, 3)


CUSTOM_PATTERNS = {
    "fuse_custom_pattern": (nn.ReLU, (torch.add, MatchAllNode, (nn.BatchNorm2d, nn.Conv2d))),
    "fusion_pattern_with_multiple_inputs": (nn.ReLU, (torch.add, (nn.BatchNorm2d, nn.Conv2d), MatchAllNode)),
    "fusion_pattern_with_matchallnode": (nn.ReLU, (torch.add, nn.Conv2d, MatchAllNode)),
}


@pytest.mark.parametrize("name", some(CUSTOM_PATTERNS))
def test_fuse_custom_pattern(name: str) -> None:
    """A fuser may compute anything else in the place of a pattern: refused. Without one the pattern is one op."""
    config = BackendPatternConfig()._set_pattern_complex_format(CUSTOM_PATTERNS[name]).add_dtype_config(BYTES)
    backend = BackendConfig("own").set_backend_pattern_config(config)
    model = settled(Residual(norm=True, relu=True, left=name != "fuse_custom_pattern", two=False, add=torch.add))
    found = run(model, {"": default_qconfig}, image(2), backend_config=backend).check()
    assert (found.left, len(found.observers)) == ([], 2)
    config.set_fuser_method(take_conv)
    with pytest.raises(CustomConfigError, match="take_conv of a pattern is not run"):
        fuse_fx(model.eval(), backend_config=backend)


def test_fused_module_qat_swap() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Sequential(LinearReLU(), nn.Linear(5, 5)), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), torch.add(self.two(torch.add(x, 5)), 5)

    kinds = [(nn.Linear, default_qat_qconfig), (nn.ReLU, default_qat_qconfig)]
    prepared = prepare_qat_fx(Both().train(), {"": None, "object_type": kinds}, (torch.randn(1, 5),))
    prepared(torch.randn(4, 5))
    assert {"one.0.0.weight", "two.bias"} <= set(dict(prepared.named_parameters()))
    rows = {row.op for row in prepared.coverage().rows if row.verdict.value == "quantized"}
    assert rows == {"linear", "relu"}
    assert len(convert_fx(prepared.eval())(torch.randn(2, 5))) == 2


def test_fuse_custom_config_set_preserved_attributes() -> None:
    config = FuseCustomConfig()
    assert config.preserved_attributes == []
    assert config.set_preserved_attributes(["a", "b"]).preserved_attributes == ["a", "b"]


def test_fuse_custom_config_from_dict() -> None:
    assert FuseCustomConfig.from_dict({"preserved_attributes": ["a"]}).preserved_attributes == ["a"]


def test_fuse_custom_config_to_dict() -> None:
    data = {"preserved_attributes": ["a", "b"]}
    assert FuseCustomConfig().set_preserved_attributes(["a", "b"]).to_dict() == data
