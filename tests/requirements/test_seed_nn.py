"""The module library of the eager flow under the names it was first described by: a test for each of them."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import quantc.nn.quantized.functional as qF
from quantc.nn import QuantizedTensor, observers, quantize_per_tensor
from quantc.nn import qconfig as qconfigs
from tests.support.nn_cases import engine


def named(path: str, name: str) -> Any:
    """A name of the document, with `torch.nn` replaced by `quantc.nn`."""
    return getattr(importlib.import_module(f"quantc.nn.{path}"), name)


def images() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, 8, 8)


def observed(module: Any, x: Tensor) -> Any:
    """A float module that has seen what it makes of `x`."""
    qconfig = qconfigs.get_default_qconfig("fbgemm")
    for part in (module, *module.children()):
        part.qconfig = qconfig
    observer = qconfig.activation()
    observer(module(x))
    module.activation_post_process = observer
    return module


def trained(module: Any) -> Any:
    for part in (module, *module.children()):
        part.qconfig = qconfigs.get_default_qat_qconfig("fbgemm")
    return module.train()


def test_3_9_a_quantized_tensor_keeps_levels_scale_and_zero_point(tmp_path: Path) -> None:
    x = torch.randn(100, 100)
    for dtype in (torch.int8, torch.uint8, torch.int32):
        q = quantize_per_tensor(x, 0.05, 3, dtype)
        assert q.int_repr().dtype is dtype
        assert (q.q_scale(), q.q_zero_point()) == (0.05, 3)
        if dtype is torch.int32:
            assert float((q.dequantize() - x).abs().max()) <= 0.025001
        assert torch.equal(q.t()[:10].reshape(-1).dequantize(), q.dequantize().t()[:10].reshape(-1))
        assert copy.deepcopy(q).equals(q)
        safetensors.torch.save_file(q.parts(), tmp_path / "q.safetensors")
        assert QuantizedTensor.from_parts(safetensors.torch.load_file(tmp_path / "q.safetensors")).equals(q)
        if dtype is not torch.int32:
            assert (tmp_path / "q.safetensors").stat().st_size <= 0.27 * 4 * x.numel()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        pytest.param("ConvBn2d", (nn.Conv2d, nn.BatchNorm2d), id="3.49"),
        pytest.param("ConvBnReLU2d", (nn.Conv2d, nn.BatchNorm2d, nn.ReLU), id="3.50"),
        pytest.param("ConvReLU2d", (nn.Conv2d, nn.ReLU), id="3.51"),
        pytest.param("LinearReLU", (nn.Linear, nn.ReLU), id="3.52"),
    ],
)
@pytest.mark.parametrize("package", ["_intrinsic.qat.modules", "intrinsic.qat.modules"])
def test_3_49_to_3_52_fused_modules_are_trained(package: str, name: str, parts: tuple[Any, ...]) -> None:
    sizes: dict[Any, tuple[int, ...]] = {nn.Conv2d: (3, 4, 3), nn.BatchNorm2d: (4,), nn.Linear: (8, 4), nn.ReLU: ()}
    fused = named("intrinsic", name)(*(part(*sizes[part]) for part in parts))
    module = named(package, name).from_float(trained(fused))
    assert module(images()).shape[0] == 2
    assert module.weight_fake_quant.calculate_qparams()[0].numel() == 4
    module(images()).sum().backward()
    assert module.weight.grad.abs().sum() > 0
    if "Bn" in name:
        assert not torch.equal(module.bn.running_mean, torch.zeros(4))


@pytest.mark.parametrize("package", ["_intrinsic.quantized.modules", "intrinsic.quantized.modules"])
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        pytest.param("ConvReLU2d", lambda: nn.Conv2d(3, 4, 3), id="3.53"),
        pytest.param("LinearReLU", lambda: nn.Linear(8, 4), id="3.54"),
    ],
)
def test_3_53_to_3_54_fused_modules_are_quantized(package: str, name: str, layer: Any) -> None:
    fused = observed(named("intrinsic", name)(layer(), nn.ReLU()), images())
    module = named(package, name).from_float(fused)
    found = module(quantize_per_tensor(images(), 0.03, 128))
    assert isinstance(found, QuantizedTensor)
    assert float(found.dequantize().min()) == 0
    assert float((found.dequantize() - fused(images())).abs().max()) < 0.1


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        pytest.param("Conv2d", lambda: nn.Conv2d(3, 4, 3), id="3.55"),
        pytest.param("Linear", lambda: nn.Linear(8, 4), id="3.56"),
    ],
)
def test_3_55_to_3_56_modules_are_trained(name: str, layer: Any) -> None:
    made = trained(layer())
    module = named("qat.modules", name).from_float(made)
    found = module(images())
    assert not torch.equal(found, made(images()))  # it rounds
    module.weight_fake_quant.disable_fake_quant()
    assert torch.equal(module(images()), made(images()))


def test_3_57_relu() -> None:
    q = quantize_per_tensor(images(), 0.03, 128)
    assert torch.equal(qF.relu(q).dequantize(), q.dequantize().relu())
    qF.relu(q, inplace=True)
    assert float(q.dequantize().min()) == 0


def test_3_58_linear() -> None:
    x, weight, bias = torch.randn(5, 8), torch.randn(3, 8), torch.randn(3)
    q, w = quantize_per_tensor(x, 0.03, 128), quantize_per_tensor(weight, 0.03, 0, torch.int8)
    found = qF.linear(q, w, bias, 0.08, 128)
    wanted = nn.functional.linear(q.dequantize(), w.dequantize(), bias)
    assert float((found.dequantize() - wanted).abs().max()) <= 0.0401


def test_3_59_conv2d() -> None:
    weight, bias = torch.randn(4, 3, 3, 3) / 5, torch.randn(4)
    q, w = quantize_per_tensor(images(), 0.03, 128), quantize_per_tensor(weight, 0.01, 0, torch.int8)
    found = qF.conv2d(q, w, bias, padding=1, scale=0.05, zero_point=128)
    wanted = nn.functional.conv2d(q.dequantize(), w.dequantize(), bias, padding=1)
    assert float((found.dequantize() - wanted).abs().max()) <= 0.0251


def test_3_60_max_pool2d() -> None:
    q = quantize_per_tensor(images(), 0.03, 128)
    assert torch.equal(qF.max_pool2d(q, 2).dequantize(), nn.functional.max_pool2d(q.dequantize(), 2))


def test_3_61_dynamic_linear() -> None:
    made = nn.Linear(64, 32)
    made.qconfig = qconfigs.default_dynamic_qconfig  # type: ignore[assignment]
    module = named("quantized.dynamic.modules", "Linear").from_float(made)
    x = torch.randn(4, 64)
    assert float((module(x) - made(x)).abs().max()) < 0.1
    assert module.weight().dtype is torch.int8


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_3_62_dynamic_recurrent_layers(name: str) -> None:
    made = getattr(nn, name)(16, 32)
    made.qconfig = qconfigs.default_dynamic_qconfig
    module = named("quantized.dynamic.modules", "RNNBase").from_float(made)
    assert type(module) is named("quantized.dynamic.modules", name)
    x = torch.randn(7, 2, 16)
    assert float((module(x)[0] - made(x)[0]).abs().max()) < 0.1


@pytest.mark.parametrize(
    ("name", "highest"), [pytest.param("ReLU", 100.0, id="3.63"), pytest.param("ReLU6", 6.0, id="3.64")]
)
def test_3_63_to_3_64_activations(name: str, highest: float) -> None:
    q = quantize_per_tensor(4 * images(), 0.1, 128)
    found = named("quantized.modules.activation", name)()(q)
    assert torch.equal(found.dequantize(), q.dequantize().clamp(0, highest))


@pytest.mark.parametrize(
    ("path", "name", "layer"),
    [
        pytest.param("quantized.modules.conv", "Conv2d", lambda: nn.Conv2d(3, 4, 3), id="3.65"),
        pytest.param("quantized.modules.linear", "Linear", lambda: nn.Linear(8, 4), id="3.70"),
    ],
)
def test_3_65_and_3_70_modules_are_quantized(path: str, name: str, layer: Any) -> None:
    made = observed(layer(), images())
    module = named(path, name).from_float(made)
    found = module(quantize_per_tensor(images(), 0.03, 128))
    assert (found.q_scale(), found.q_zero_point()) == (module.scale, module.zero_point)
    assert float((found.dequantize() - made(images())).abs().max()) < 0.1


METHODS = ("add", "add_scalar", "mul", "mul_scalar", "cat", "add_relu", "matmul")


@pytest.mark.parametrize("method", METHODS)
def test_3_66_to_3_67_ops_as_modules(method: str) -> None:
    floats = named("quantized.modules.functional_modules", "FloatFunctional")()
    floats.activation_post_process = observers.MinMaxObserver()
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    args = {"cat": ([x, y], 1), "add_scalar": (x, 2.0), "mul_scalar": (x, 0.5)}.get(method, (x, y))
    wanted = getattr(floats, method)(*args)
    floats.activation_post_process(wanted)
    module = named("quantized.modules.functional_modules", "QFunctional").from_float(floats)
    a, b = quantize_per_tensor(x, 0.03, 128), quantize_per_tensor(y, 0.03, 128)
    given = {"cat": ([a, b], 1), "add_scalar": (a, 2.0), "mul_scalar": (a, 0.5)}.get(method, (a, b))
    assert float((getattr(module, method)(*given).dequantize() - wanted).abs().max()) < 0.2


def test_3_68_to_3_69_where_quantized_tensors_begin_and_end() -> None:
    begin = named("quantized.modules.linear", "Quantize")(0.03, 128, torch.quint8)
    end = named("quantized.modules.linear", "DeQuantize")()
    found = begin(images())
    wanted = torch.quantize_per_tensor(images(), 0.03, 128, torch.quint8)
    assert torch.equal(found.int_repr(), wanted.int_repr())
    assert torch.equal(end(found), wanted.dequantize())


def test_weights_take_a_quarter_of_their_room(tmp_path: Path) -> None:
    """Whole models, as they are saved."""
    with engine("fbgemm"):
        model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64 * 36, 200), nn.Linear(200, 100))
        recurrent = nn.LSTM(128, 128, 2)
        recurrent.qconfig = qconfigs.default_dynamic_qconfig
        kinds = {nn.Conv2d: named("quantized", "Conv2d"), nn.Linear: named("quantized", "Linear")}
        x, made = images(), []
        for layer in model:
            made.append(kinds[type(layer)].from_float(observed(layer, x)) if type(layer) in kinds else layer)
            x = layer(x)
        dynamic = named("quantized.dynamic", "LSTM").from_float(recurrent)
        for quantized, floats in ((nn.Sequential(*made), model), (dynamic, recurrent)):
            safetensors.torch.save_file(quantized.state_dict(), tmp_path / "state.safetensors")
            whole = sum(parameter.numel() * 4 for parameter in floats.parameters())
            assert (tmp_path / "state.safetensors").stat().st_size <= 0.27 * whole


def test_one_more_module_takes_one_line() -> None:
    """A convolution of a class of its own: nothing else has to be written for it."""
    from quantc.nn.quantized.modules.conv import _ConvNd

    class Padded(nn.Conv2d):
        """A convolution that somebody has given another name."""

    class QuantizedPadded(_ConvNd, of=Padded): ...

    module = QuantizedPadded.from_float(observed(Padded(3, 4, 3, padding=1), images()))
    plain = named("quantized", "Conv2d")(3, 4, 3, padding=1)
    plain.load_state_dict(module.state_dict())
    q = quantize_per_tensor(images(), 0.03, 128)
    assert module(q).equals(plain(q))
    assert "QuantizedPadded(3, 4" in repr(module)
