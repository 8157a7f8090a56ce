"""Items 3.20 to 3.48: every name that the eager document lists."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc.nn as qnn
from quantc.flows import eager
from tests.support.eager_models import CASES
from tests.support.eager_small import FUSE, Small, X, run, small, with_qconfig
from tests.support.seed_eager_items import ITEMS, item, quantized, torch_flow


@item("3.20")
def default_eval_fn() -> None:
    seen: list[Tensor] = []
    eager.default_eval_fn(seen.append, [(X, 1), (X + 1, 2)])  # type: ignore[arg-type]
    assert torch.equal(seen[1], X + 1)
    assert len(seen) == 2


@item("3.21")
def fake_quantize() -> None:
    ours = eager.FakeQuantize(eager.MinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)
    theirs = torch_flow.FakeQuantize(torch_flow.MinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)
    assert torch.equal(ours(X), theirs(X))


@item("3.22")
def fuse_conv_bn() -> None:
    conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    norm.running_mean, norm.running_var = torch.randn(4), torch.rand(4) + 0.5
    assert type(eager.fuse_conv_bn(True, conv, norm)).__name__ == "ConvBn2d"
    fused = eager.fuse_conv_bn(False, conv.eval(), norm.eval())
    assert type(fused) is nn.Conv2d
    assert torch.allclose(fused(X), norm(conv(X)), atol=1e-5)


@item("3.23")
def fuse_conv_bn_relu() -> None:
    parts = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    assert type(eager.fuse_conv_bn_relu(True, *parts)).__name__ == "ConvBnReLU2d"
    conv, norm, relu = (part.eval() for part in parts)
    fused = eager.fuse_conv_bn_relu(False, conv, norm, relu)
    assert type(fused).__name__ == "ConvReLU2d"
    assert torch.allclose(fused(X), relu(norm(conv(X))), atol=1e-5)


@item("3.24")
def _fuse_modules() -> None:
    model = Small().eval()
    fused: Any = eager._fuse_modules(model, FUSE, is_qat=False, inplace=True)
    assert fused is model
    assert [type(fused.get_submodule(name)).__name__ for name in FUSE[0]] == ["ConvReLU2d", "Identity", "Identity"]


@item("3.25")
def fuse_modules() -> None:
    model = Small().eval()
    before = model(X)
    fused: Any = eager.fuse_modules(model, ["conv", "bn", "relu"])
    assert torch.allclose(fused(X), before, atol=1e-5)
    assert type(model.bn) is nn.BatchNorm2d

    def reversed_names(modules: Any, is_qat: bool, known: Any) -> list[nn.Module]:
        return [nn.Sequential(*modules), *(nn.Identity() for _ in modules[1:])]

    assert type(eager.fuse_modules(model, FUSE, fuser_func=reversed_names).get_submodule("conv")) is nn.Sequential
    twice = {"additional_fuser_method_mapping": {(nn.Linear, nn.ReLU6): lambda is_qat, *parts: nn.Sequential(*parts)}}
    both = nn.Sequential(nn.Linear(2, 2), nn.ReLU6()).eval()
    assert type(eager.fuse_modules(both, ["0", "1"], fuse_custom_config_dict=twice)[0]) is nn.Sequential  # type: ignore[index]


def same_qparams(kind: str, x: Tensor = X, **settings: Any) -> None:
    ours, theirs = getattr(eager, kind)(**settings), getattr(torch_flow, kind)(**settings)
    for observer in (ours, theirs):
        observer(x)
        observer(x * 2 + 1)
    for mine, other in zip(ours.calculate_qparams(), theirs.calculate_qparams(), strict=True):
        assert torch.equal(mine.double(), other.double())


@item("3.26")
def observer() -> None:
    assert issubclass(eager.MinMaxObserver, eager.Observer)
    assert isinstance(eager.MinMaxObserver.with_args(dtype=torch.qint8)(), eager.Observer)


@item("3.27")
def observer_base() -> None:
    class Largest(eager.ObserverBase):
        """One that users might write."""

        def __init__(self) -> None:
            super().__init__(torch.quint8)
            self.largest = torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
            return x

        def calculate_qparams(self) -> tuple[Tensor, Tensor]:
            return self.largest / 64, torch.tensor([64])

    prepared = run(eager.prepare(with_qconfig(small(), eager.QConfig(Largest, eager.default_weight_observer))))
    converted: Any = eager.convert(prepared)
    assert converted.quant.scale == pytest.approx(float(X.abs().max()) / 64)


@item("3.28")
def _calculate_qparams() -> None:
    low, high = torch.tensor([-1.0, 0.5]), torch.tensor([3.0, 2.0])
    theirs = torch_flow.PerChannelMinMaxObserver(qscheme=torch.per_channel_affine)
    for mine, other in zip(
        eager._calculate_qparams(low, high, qscheme=torch.per_channel_affine),
        theirs._calculate_qparams(low, high),
        strict=True,
    ):
        assert torch.equal(mine.double(), other.double())
    assert torch.equal(eager.MinMaxObserver()._calculate_qparams(low[0], high[0])[0], eager._calculate_qparams(low[0], high[0])[0])  # fmt: skip


@item("3.29")
def min_max_observer() -> None:
    same_qparams("MinMaxObserver")
    same_qparams("MinMaxObserver", dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)


@item("3.30")
def per_channel_min_max_observer() -> None:
    same_qparams("PerChannelMinMaxObserver", ch_axis=1)


@item("3.31")
def histogram_observer() -> None:
    same_qparams("HistogramObserver")


@item("3.32")
def recording_observer() -> None:
    observer = eager.RecordingObserver()
    observer(X)
    observer(X + 1)
    assert torch.equal(observer.get_tensor_value()[1], X + 1)


@item("3.33")
def noop_observer() -> None:
    observer = eager.NoopObserver()
    assert observer(X) is X
    with pytest.raises(Exception, match="no scale"):
        observer.calculate_qparams()


@item("3.34")
def quant_stub() -> None:
    assert eager.QuantStub()(X) is X
    given: Any = eager.QuantStub(eager.default_qconfig)
    assert given.qconfig is eager.default_qconfig
    assert not hasattr(eager.QuantStub(), "qconfig")
    assert type(quantized().get_submodule("quant")).__name__ == "Quantize"


@item("3.35")
def dequant_stub() -> None:
    assert eager.DeQuantStub()(X) is X
    assert type(quantized().get_submodule("dequant")).__name__ == "DeQuantize"
    assert quantized()(CASES["convnet"].data()[0]).dtype is torch.float32


@item("3.36")
def quant_wrapper() -> None:
    layer = with_qconfig(nn.Linear(4, 4).eval(), eager.default_qconfig)
    wrapped = eager.QuantWrapper(layer)
    assert not wrapped.training
    x = torch.randn(3, 4)
    assert torch.equal(wrapped(x), layer(x))
    prepared = eager.prepare(wrapped)
    prepared(x)
    assert (eager.convert(prepared)(x) - layer(x)).abs().max() < 0.1


@item("3.37")
def propagate_qconfig_helper() -> None:
    model = Small()
    eager.propagate_qconfig_helper(
        model, {"fc": None, nn.Conv2d: eager.default_per_channel_qconfig}, eager.default_qconfig
    )
    found = {path: vars(module)["qconfig"] for path, module in model.named_modules()}
    assert found["fc"] is None
    assert found["conv"] is eager.default_per_channel_qconfig
    assert found["bn"] is eager.default_qconfig


@item("3.38")
def propagate_qconfig() -> None:
    model: Any = Small()
    model.fc.qconfig = None
    eager.propagate_qconfig(model, {"": eager.default_qconfig})
    assert model.fc.qconfig is None
    assert model.conv.qconfig is eager.default_qconfig
    assert eager.propagate_qconfig_ is eager.propagate_qconfig


@item("3.39")
def _observer_forward_hook() -> None:
    layer: Any = nn.Linear(4, 4)
    layer.activation_post_process = eager.MinMaxObserver()
    layer.register_forward_hook(eager._observer_forward_hook)
    out = layer(torch.randn(3, 4))
    assert layer.activation_post_process.max_val == out.max()


@item("3.40")
def add_observer() -> None:
    model = small()
    eager.propagate_qconfig_(model)
    eager.add_observer(model)
    assert set(eager.get_observer_dict(model)) == {
        f"{name}.activation_post_process" for name in ("quant", "conv", "fc")
    }  # fmt: skip
    with pytest.raises(eager.EagerError):
        eager.register_activation_post_process_hook(nn.Linear(2, 2))


@item("3.41")
def add_quant_dequant() -> None:
    model = with_qconfig(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2))).eval())
    eager.propagate_qconfig_(model)
    wrapped: Any = eager.add_quant_dequant(model)
    assert isinstance(wrapped[0], eager.QuantWrapper)
    assert isinstance(wrapped[1][0], eager.QuantWrapper)
    assert isinstance(eager.add_quant_dequant(with_qconfig(nn.Linear(2, 2))), eager.QuantWrapper)
    x = torch.randn(3, 4)
    prepared = eager.prepare(wrapped)
    prepared(x)
    assert eager.convert(prepared)(x).shape == (3, 2)


@item("3.42")
def prepare() -> None:
    model = small()
    prepared = eager.prepare(model)
    assert prepared is not model
    run(prepared)
    for path in ("quant", "conv", "fc"):
        observer: Any = prepared.get_submodule(path).activation_post_process
        assert observer.min_val <= observer.max_val
    assert eager.prepare(model, inplace=True) is model


@item("3.43")
def quantize() -> None:
    expected = eager.convert(run(eager.prepare(small())))(X)
    assert torch.equal(eager.quantize(small(), eager.default_eval_fn, [[(X, None)]])(X), expected)


@item("3.44")
def quantize_dynamic() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.randn(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.qint8, torch.float16):
            assert (eager.quantize_dynamic(model, dtype=dtype)(x) - torch_flow.quantize_dynamic(model, dtype=dtype)(x)).abs().max() <= 1e-6  # fmt: skip
    chosen: Any = eager.quantize_dynamic(model, {"0"})
    assert type(chosen[2]) is nn.Linear
    assert type(chosen[0]).__name__ == "Linear"
    assert type(chosen[0]) is not nn.Linear
    by_channel: Any = eager.quantize_dynamic(model, {"": eager.per_channel_dynamic_qconfig, "2": None})
    assert by_channel[0].weight().qscheme() is torch.per_channel_affine
    assert type(by_channel[2]) is nn.Linear
    with pytest.raises(ValueError, match="float64"):
        eager.quantize_dynamic(model, dtype=torch.float64)


@item("3.45")
def quantize_qat() -> None:
    model = with_qconfig(eager.fuse_modules_qat(Small().train(), FUSE), eager.get_default_qat_qconfig("fbgemm"))

    def train(model: nn.Module, steps: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()

    made = eager.quantize_qat(model, train, [10])
    before = eager.quantize_qat(model, train, [1])
    assert not made.training
    assert made(X).square().mean() < before(X).square().mean()


@item("3.46")
def convert() -> None:
    model = quantized("residual")
    kinds = {type(module).__module__.split(".")[0] for module in model.modules()}
    assert not any(isinstance(module, nn.Conv2d | nn.BatchNorm2d) for module in model.modules())
    assert "quantc" in kinds
    kept = eager.convert(run(eager.prepare(small())), mapping={nn.Linear: qnn.STATIC_MODULES[nn.Linear]},
                         remove_qconfig=False, accept="missing-stub")  # fmt: skip
    assert type(kept.get_submodule("quant")) is eager.QuantStub
    assert hasattr(kept, "qconfig")


@item("3.47")
def swap_module() -> None:
    layer: Any = with_qconfig(nn.Linear(4, 4), eager.default_dynamic_qconfig)
    calls: list[int] = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    swapped = eager.swap_module(layer, eager.get_default_dynamic_quant_module_mappings(), {})
    assert type(swapped) is qnn.DYNAMIC_MODULES[nn.Linear]
    swapped(torch.randn(2, 4))
    assert calls == [1]
    plain = nn.Linear(4, 4)
    assert eager.swap_module(plain, eager.get_default_dynamic_quant_module_mappings(), {}) is plain


@item("3.48")
def get_observer_dict() -> None:
    prepared = eager.prepare(small())
    found: dict[str, Any] = {}
    eager.get_observer_dict(prepared, found, "model")
    assert set(found) == {f"model.{name}.activation_post_process" for name in ("quant", "conv", "fc")}
    assert found["model.fc.activation_post_process"] is prepared.get_submodule("fc.activation_post_process")


__all__ = ["ITEMS"]
