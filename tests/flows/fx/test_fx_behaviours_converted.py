"""Behaviours of the FX flow: training, and the Q/DQ form beside what kernels run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quantc.flows.fake_quantize import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
)
from quantc.flows.fx import (
    QConfig,
    QConfigMapping,
    convert_fx,
    convert_to_reference_fx,
    default_dynamic_qconfig,
    default_qconfig,
    float16_dynamic_qconfig,
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
    prepare_qat_fx,
)
from quantc.flows.observers import MovingAverageMinMaxObserver
from quantc.flows.qconfig import default_embedding_qat_qconfig, default_per_channel_qconfig
from tests.support.fx_behaviours import run, some

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Given(nn.Module):
    """A linear whose weights are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = torch.randn(5, 5) / 3, torch.zeros(5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.w, self.b)


# -- trained -----------------------------------------------------------------------------------------------------------


def test_qat_and_script() -> None:
    """Fake quantizers are switched off and on; TorchScript cannot read them, and says so."""
    prepared = prepare_qat_fx(
        nn.Sequential(nn.Linear(5, 5)).train(), get_default_qat_qconfig_mapping(), (torch.randn(5, 5),)
    )
    prepared(torch.randn(5, 5))
    for switch, wanted in (
        (disable_observer, 0),
        (disable_fake_quant, 0),
        (enable_observer, 1),
        (enable_fake_quant, 1),
    ):
        prepared.apply(switch)
        key = "observer_enabled" if "observer" in switch.__name__ else "fake_quant_enabled"
        values = [value for name, value in prepared.state_dict().items() if name.endswith(key)]
        assert values
        assert all(int(value) == wanted for value in values)


def test_qat_functional_linear() -> None:
    def qconfig(kind: Any) -> QConfig:
        plain = {"observer": MovingAverageMinMaxObserver, "reduce_range": False}
        return QConfig(
            kind.with_args(quant_min=0, quant_max=255, dtype=torch.quint8, **plain),
            kind.with_args(quant_min=-128, quant_max=127, dtype=torch.qint8, **plain),
        )

    model = nn.Sequential(nn.Sequential(Given(), Given()), Given()).train()
    one, two = (prepare_qat_fx(model, {"": qconfig(kind)}, (torch.randn(1, 5),)) for kind in FAKES)
    for each in (one, two):
        each.apply(disable_fake_quant)
        each.apply(disable_observer)
    for step in range(6):
        for each in (one, two):
            each.apply(enable_observer if step == 2 else enable_fake_quant if step == 4 else lambda module: None)
        x = torch.randn(5, 5, requires_grad=True)
        grads = [torch.autograd.grad(each(x).sum(), [x])[0] for each in (one, two)]
        torch.testing.assert_close(grads[0], grads[1])
    x = torch.rand(5, 5)
    torch.testing.assert_close(convert_fx(one.eval())(x), convert_fx(two.eval())(x))


FAKES = (FakeQuantize, FusedMovingAvgObsFakeQuantize)


@pytest.mark.parametrize("bag", some([False, True]))
def test_qat_embedding_linear(bag: bool) -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb: nn.Module = nn.EmbeddingBag(10, 12, mode="sum") if bag else nn.Embedding(10, 12)
            self.linear = nn.Linear(12, 1)

        def forward(self, x: Tensor) -> Tensor:
            found = self.emb(x)
            out: Tensor = self.linear(found if bag else torch.sum(found, dim=1))
            return out

    mapping = (
        QConfigMapping()
        .set_global(get_default_qat_qconfig())
        .set_object_type(nn.EmbeddingBag if bag else nn.Embedding, default_embedding_qat_qconfig)
    )
    prepared = prepare_qat_fx(Looked().train(), mapping, (torch.randint(0, 10, (12, 12)),))
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        prepared(torch.randint(0, 10, (12, 12))).square().mean().backward()
        optimizer.step()
    quantized = convert_fx(prepared.eval(), qconfig_mapping=mapping)
    x = torch.randint(0, 10, (12, 1))
    assert torch.allclose(quantized(x), prepared(x), atol=0.1)
    assert "embedding" in " ".join(row.op for row in prepared.coverage().rows if row.verdict.value == "quantized")


# -- the Q/DQ form -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", some(["static", "dynamic", "per channel"]))
def test_convert_to_reference_decomposed_fx(kind: str) -> None:
    mapping = get_default_qconfig_mapping("fbgemm")
    if kind == "dynamic":
        mapping.set_object_type(nn.Linear, default_dynamic_qconfig)
    if kind == "per channel":
        mapping.set_object_type(nn.Linear, default_per_channel_qconfig)
    found = run(nn.Sequential(nn.Linear(5, 10)), mapping, torch.randn(3, 5)).check()
    ops = [str(node.target) for node in found.reference.graph.nodes if "quantized_decomposed" in str(node.target)]
    assert any("choose_qparams" in name for name in ops) is (kind == "dynamic")
    assert any("per_channel" in name for name in ops) is (kind != "dynamic")
    assert all(name.startswith("quantized_decomposed.") for name in ops)


@pytest.mark.parametrize("relu", some([False, True]))
def test_ref_linear_module(relu: bool) -> None:
    model = nn.Sequential(nn.Linear(10, 5), nn.ReLU() if relu else nn.Identity())
    found = run(model, {"": default_qconfig}, torch.randn(5, 10))
    assert torch.equal(found.quantized(*found.inputs), found.reference(*found.inputs))


@pytest.mark.parametrize("relu", some([False, True]))
@pytest.mark.parametrize("kind", some([nn.Conv1d, nn.Conv2d, nn.Conv3d]))
def test_ref_conv_module(kind: Any, relu: bool) -> None:
    dim = (nn.Conv1d, nn.Conv2d, nn.Conv3d).index(kind) + 1
    found = run(
        nn.Sequential(kind(3, 3, 3), nn.ReLU() if relu else nn.Identity()),
        {"": default_qconfig},
        torch.randn(2, 3, *[4] * dim),
    )
    step = float(found.observers[-1].calculate_qparams()[0])
    assert float((found.quantized(*found.inputs) - found.reference(*found.inputs)).abs().max()) <= 1.01 * step
    assert found.kernels == ["conv"]


def test_ref_pattern_multi_use() -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            z = self.two(x)
            return self.one(x), torch.mul(z, 5), torch.add(z, 5)

    kinds = [(nn.Linear, get_default_qconfig("fbgemm")), (nn.ReLU, get_default_qconfig("fbgemm"))]
    found = run(Read(), {"": None, "object_type": kinds}, torch.randn(2, 5)).check()
    assert (found.taken, found.left) == (["linear", "linear"], ["mul", "add"])


@pytest.mark.parametrize("qconfig", some([default_dynamic_qconfig, float16_dynamic_qconfig]))
@pytest.mark.parametrize("how", some(["chain", "twice", "beside"]))
def test_dynamic_with_fusion(qconfig: Any, how: str) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            if how == "beside":
                return self.one(x) + self.two(x)  # type: ignore[no-any-return]
            out: Tensor = (self.one if how == "twice" else self.two)(self.one(x))
            return out

    found = run(Layers(), {"": qconfig}, torch.rand(5, 5)).check()
    assert found.taken.count("linear") == 2


def test_dynamic_quant_weight_observer() -> None:
    found = run(Given(), {"": default_dynamic_qconfig}, torch.rand(1, 5))
    observer = default_dynamic_qconfig.weight()
    observer(found.model.w)
    expected = observer.calculate_qparams()
    held = [float(value) for node in found.reference.graph.nodes for value in node.args if isinstance(value, float)]
    assert any(abs(value - float(expected[0])) < 1e-7 for value in held)


def test_relu_lowering() -> None:
    class Only(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.relu(x)

    found = run(Only(), {"": default_qconfig}, torch.randn(4)).check()
    assert found.taken == ["relu"]
    assert convert_to_reference_fx(found.prepared) is not None
