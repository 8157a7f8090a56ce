"""Behaviours of the FX flow: whole models, static recurrent layers, and formats that are refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quantc.flows.fx import (
    BackendConfig,
    BackendPatternConfig,
    ConvertCustomConfig,
    DTypeConfig,
    ObservationType,
    PrepareCustomConfig,
    QConfig,
    QConfigMapping,
    default_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
    prepare_fx,
)
from quantc.flows.fx.backend_config import MatchAllNode
from quantc.flows.fx.custom_config import CustomConfigError
from quantc.flows.observers import FixedQParamsObserver, default_weight_observer
from quantc.flows.qconfig import (
    default_symmetric_qnnpack_qat_qconfig,
    default_symmetric_qnnpack_qconfig,
    float16_static_qconfig,
)
from tests.support.fx_behaviours import agrees, run, some, torchs
from tests.support.fx_models import model_and_data

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.ao.quantization.backend_config.utils
    from torch.ao import quantization as ao
    from torch.ao.nn import quantizable
    from torch.ao.nn import quantized as nnq
    from torch.ao.quantization import backend_config as configs

pytestmark = pytest.mark.filterwarnings("ignore")
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
FUNCTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# -- layers and their functions, as torch's eager and graph flows have them ----------------------------------------------


@pytest.mark.parametrize("dim", some([1, 2, 3]))
@pytest.mark.parametrize("relu", some([False, True]))
def test_conv_bn_relu(dim: int, relu: bool) -> None:
    model = nn.Sequential(CONVS[dim](3, 3, 3), NORMS[dim](3), nn.ReLU() if relu else nn.Identity())
    x = torch.randn(2, 3, *[5] * dim)
    assert agrees(model, x).kernels == ["conv"]
    assert run(model, get_default_qat_qconfig_mapping(), x, qat=True).check(0.1).left == []


@pytest.mark.parametrize("trained", some([False, True]))
def test_linear_bn(trained: bool) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(4, 4)
    if trained:
        assert run(model, get_default_qat_qconfig_mapping(), x, qat=True).check(0.15).left == []
    else:
        assert agrees(model, x).kernels == ["linear"]


class ByKeywords(nn.Module):
    def __init__(self, function: Any, weight: Tensor, dim: int, **rest: Any) -> None:
        super().__init__()
        self.function, self.weight, self.dim, self.rest = function, nn.Parameter(weight), dim, rest

    def forward(self, given: Tensor) -> Tensor:
        ones = [1] * self.dim
        more = {"stride": ones, "padding": [0] * self.dim, "dilation": ones, "groups": 1} if self.dim else {}
        out: Tensor = self.function(given, self.weight, bias=None, **more, **self.rest)
        return out


@pytest.mark.parametrize("dim", some([1, 2, 3]))
def test_lowering_functional_conv_with_kwargs(dim: int) -> None:
    model = ByKeywords(FUNCTIONS[dim], torch.randn(16, 3, *[3] * dim), dim)
    assert agrees(model, torch.randn(1, 3, *[8] * dim)).kernels == ["conv"]


@pytest.mark.parametrize("dim", some([1, 2, 3]))
def test_lowering_functional_conv_transpose_with_kwargs(dim: int) -> None:
    model = ByKeywords(TRANSPOSED[dim], torch.randn(3, 16, *[3] * dim), dim, output_padding=[0] * dim)
    found = run(model, get_default_qconfig_mapping(), torch.randn(1, 3, *[8] * dim)).check()
    assert found.taken == [f"conv_transpose{dim}d"]


@pytest.mark.slow
def test_lowering_functional_linear_with_kwargs() -> None:
    model = ByKeywords(functional.linear, torch.randn(4, 8), 0)
    assert agrees(model, torch.randn(1, 8)).kernels == ["linear"]


# -- recurrent layers that are quantized statically --------------------------------------------------------------------

OBSERVED = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, quantizable.LSTM)
QUANTIZED = ConvertCustomConfig().set_observed_to_quantized_mapping(quantizable.LSTM, nnq.LSTM)


class Recurrent(nn.Module):
    def __init__(self, answer: Any, *heads: nn.Module) -> None:
        super().__init__()
        self.lstm, self.answer, self.heads, self.after = nn.LSTM(6, 6, 1), answer, nn.ModuleList(heads), nn.Identity()

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
        return self.answer(self, self.lstm(x, (h, c)))


ANSWERS: dict[str, Any] = {
    "parts": lambda m, y: (m.heads[0](y[0]), (m.heads[1](y[1][0]), m.heads[2](y[1][1]))),
    "whole": lambda m, y: m.after(y),
    "hidden": lambda m, y: m.after(y[1]),
}


@pytest.mark.parametrize("name", some(ANSWERS))
def test_static_lstm(name: str) -> None:
    heads = [nn.Linear(6, 4) for _ in range(3)] if name == "parts" else []
    inputs = (torch.rand(5, 3, 6), torch.rand(1, 3, 6), torch.randn(1, 3, 6))
    model = Recurrent(ANSWERS[name], *heads)
    found = run(
        model, get_default_qconfig_mapping(), *inputs, prepare_custom_config=OBSERVED, convert=QUANTIZED
    ).check()
    assert type(found.prepared.lstm) is quantizable.LSTM
    assert type(found.quantized.lstm) is nnq.LSTM
    assert "linear" not in found.left


def test_preserve_tuple() -> None:
    class Stated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 6, 1)

        def forward(self, x: Tensor, state: list[Tensor]) -> Any:
            return self.lstm(x, (state[0], state[1]))

    inputs = (torch.randn(5, 3, 6), [torch.randn(1, 3, 6), torch.randn(1, 3, 6)])
    found = run(Stated(), {"": default_qconfig}, *inputs)
    out, (h, c) = found.quantized(*inputs)
    assert (type(found.quantized(*inputs)[1]), out.shape, h.shape, c.shape) == (tuple, (5, 3, 6), (1, 3, 6), (1, 3, 6))


# -- formats that the flow does not have -------------------------------------------------------------------------------


def with_32_bits() -> Any:
    config = configs.get_qnnpack_backend_config()
    for each in config.configs:
        if each.pattern in (nn.Linear, nn.Sigmoid, nn.Tanh, torch.add, torch.mul):
            each.add_dtype_config(configs.DTypeConfig(torch.qint32, torch.qint32))
    return config


@pytest.mark.parametrize("layer", some([nn.Linear(5, 5), nn.Sigmoid()]))
def test_mixed_dtypes(layer: nn.Module) -> None:
    observer = FixedQParamsObserver.with_args(scale=2**-11, zero_point=0, dtype=torch.qint32)
    mapping = QConfigMapping().set_global(QConfig(observer, default_weight_observer))
    with pytest.raises(CustomConfigError, match=r"torch\.qint32, which this flow does not quantize to"):
        prepare_fx(nn.Sequential(layer).eval(), mapping, (torch.rand(5, 5),), backend_config=with_32_bits())


def test_reshape_fp16() -> None:
    """Ops that are to be float16 stay float32 between those that are quantized."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.randn(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.sigmoid(functional.linear(x, self.w).reshape(-1, 1, 4))
            return functional.linear(x, self.w)

    mapping = {"": float16_static_qconfig, "object_type": [(functional.linear, default_qconfig)]}
    found = run(Between(), mapping, torch.randn(2, 4)).check(0.1)
    assert (found.taken, found.left) == (["linear", "linear"], ["reshape", "sigmoid"])


# -- torch's tables ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qconfig", some([default_symmetric_qnnpack_qconfig, default_symmetric_qnnpack_qat_qconfig]))
def test_symmetric_qnnpack_qconfig_mapping(qconfig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    config = configs.get_qnnpack_backend_config()
    found = run(nn.Sequential(nn.Linear(30, 4)), {"": qconfig}, torch.rand(2, 30), backend_config=config).check()
    assert (found.taken, found.kernels) == (["linear"], ["linear"])


def test_backend_config_check_for_weight_and_bias() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = torch.randn(5, 5), torch.randn(5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x, self.weight)

    pattern = BackendPatternConfig(torch.addmm)._set_input_type_to_index({"weight": 2, "bias": 0})
    pattern.set_dtype_configs([DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)])
    config = BackendConfig().set_backend_pattern_config(pattern)
    assert run(Product(), QConfigMapping(), torch.rand(1, 5), backend_config=config).taken == []
    assert run(Product(), {"": default_qconfig}, torch.rand(3, 5), backend_config=config).check().left == []


def test_match_pattern_with_multiple_args() -> None:
    class Moved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.reshape(torch.transpose(x, 0, 1), (-1,))

    pattern = BackendPatternConfig()._set_pattern_complex_format((torch.reshape, torch.transpose, MatchAllNode))
    pattern.set_observation_type(ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
    pattern.add_dtype_config(DTypeConfig(torch.quint8, torch.quint8))
    config = BackendConfig().set_backend_pattern_config(pattern)
    found = run(Moved(), {"": default_qconfig}, torch.randn(1, 3, 3, 3), backend_config=config).check()
    assert (found.left, len(found.observers)) == ([], 2)  # what goes in and what comes out


def test_get_executorch_backend_config() -> None:
    config = configs.get_executorch_backend_config()
    found = run(
        nn.Sequential(nn.Linear(30, 4)),
        {"": default_symmetric_qnnpack_qconfig},
        torch.rand(2, 30),
        backend_config=config,
    )
    assert found.check().taken == ["linear"]


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", some([False, True]))
@pytest.mark.parametrize("name", some(["resnet", "mobilenet"]))
def test_resnet_base(name: str, trained: bool) -> None:
    """Residuals, norms, identities and dropout, calibrated and trained."""
    model, batches = model_and_data(name)
    mapping = get_default_qat_qconfig_mapping("x86") if trained else get_default_qconfig_mapping("x86")
    found = run(model, mapping, batches[0], qat=trained)
    expected, made = model(batches[0]), found.quantized(batches[0])
    assert float((made - expected).abs().max()) < 0.3 * float(expected.abs().max())
    assert found.left == []


@pytest.mark.slow
def test_sequential() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)))
    x = torch.rand(5, 1, 3, 3)
    found = agrees(model, x, mapping={"": ao.default_qconfig})  # pyright: ignore[reportPrivateImportUsage]
    assert found.kernels == ["conv", "conv"]
    assert torchs(model, {"": ao.default_qconfig}, x).shape == x.shape  # pyright: ignore[reportPrivateImportUsage]
