"""Behaviours of training in the eager flow that code written for torch relies on, one test for each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.flows import eager
from quantc.nn import intrinsic, qat, quantized
from quantc.nn.intrinsic import qat as intrinsic_qat
from quantc.nn.intrinsic import quantized as intrinsic_quantized
from quantc.nn.quantized import dynamic
from tests.support.oracles import sqnr

X = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


class Stubbed(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.quant, self.body, self.dequant = eager.QuantStub(), nn.Sequential(*layers), eager.DeQuantStub()

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.body(self.quant(x)))


def prepared(model: nn.Module, engine: str = "onednn", **keywords: Any) -> Any:
    if not hasattr(model, "qconfig"):
        vars(model)["qconfig"] = eager.get_default_qat_qconfig(engine)
    return eager.prepare_qat(model.train(), **keywords)


def trained(model: Any, *inputs: Any, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        loss = (model(*inputs) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("engine", ["fbgemm", "qnnpack", "onednn"])
def test_linears_are_trained_and_converted(engine: str) -> None:
    torch.manual_seed(0)
    model = prepared(Stubbed(nn.Linear(5, 8), nn.Linear(8, 5)), engine)
    assert [type(layer) for layer in model.body] == [qat.Linear, qat.Linear]
    losses = trained(model, X, steps=20)
    assert losses[-1] < losses[0]
    made: Any = eager.convert(model.eval())
    assert [type(layer) for layer in made.body] == [quantized.Linear, quantized.Linear]
    with torch.no_grad():
        assert sqnr(model(X), made(X)) > (15 if engine == "fbgemm" else 25)  # it trains with fewer levels


@pytest.mark.parametrize("engine", ["fbgemm", "qnnpack"])
def test_convolutions_and_norms_are_trained_and_converted(engine: str) -> None:
    torch.manual_seed(0)
    model = Stubbed(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).train()
    model = eager.fuse_modules_qat(model, ["body.0", "body.1", "body.2"])  # type: ignore[assignment]
    ready = prepared(model, engine)
    assert type(ready.body[0]) is intrinsic_qat.ConvBnReLU2d
    trained(ready, IMAGE)
    made: Any = eager.convert(ready.eval())
    assert type(made.body[0]) is intrinsic_quantized.ConvReLU2d
    with torch.no_grad():
        assert sqnr(ready(IMAGE), made(IMAGE)) > 20


def test_dropout_stays_and_does_nothing_afterwards() -> None:
    torch.manual_seed(0)
    model = prepared(Stubbed(nn.Linear(5, 5), nn.Dropout(0.5)))
    assert type(model.body[1]) is nn.Dropout
    trained(model, X)
    made: Any = eager.convert(model.eval())
    assert type(made.body[1]) is quantized.Dropout
    assert torch.equal(made(X), made(X))


def test_observers_and_rounding_are_switched_off() -> None:
    torch.manual_seed(0)
    model = prepared(Stubbed(nn.Linear(5, 5)))
    model(X)
    observer = model.body[0].activation_post_process.activation_post_process
    model.apply(eager.disable_observer)
    before = observer.max_val.clone()
    model(10 * X)
    assert torch.equal(observer.max_val, before)
    model.apply(eager.disable_fake_quant)
    linear = model.body[0]
    torch.testing.assert_close(model(X), nn.functional.linear(X, linear.weight, linear.bias))


def test_scales_are_symmetric_where_asked() -> None:
    model = Stubbed(nn.Linear(5, 5)).train()
    vars(model)["qconfig"] = eager.default_symmetric_qnnpack_qat_qconfig
    ready = prepared(model)
    trained(ready, X)
    made: Any = eager.convert(ready.eval())
    assert made.body[0].weight().q_zero_point() == 0
    assert made.quant.out_dtype is made.body[0].out_dtype is torch.int8


def test_dynamic_layers_are_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).train()
    vars(model)["qconfig"] = eager.default_dynamic_qat_qconfig
    mapping = {nn.Linear: qat.dynamic.Linear}
    ready = prepared(model, mapping=mapping, accept="missing-stub")
    assert type(ready[0]) is qat.dynamic.Linear
    trained(ready, X)
    made: Any = eager.convert(ready.eval(), mapping=eager.get_default_dynamic_quant_module_mappings())
    assert type(made[0]) is dynamic.Linear
    with torch.no_grad():
        assert sqnr(ready(X), made(X)) > 25


class Table(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.emb, self.linear = kind(10, 12), nn.Linear(12, 1)
        self.emb.qconfig = eager.default_embedding_qat_qconfig
        qconfig = eager.get_default_qat_qconfig("onednn")
        vars(self.linear)["qconfig"] = qconfig
        self.quant, self.dequant = eager.QuantStub(qconfig), eager.DeQuantStub(qconfig)

    def forward(self, *given: Tensor) -> Any:
        return self.dequant(self.linear(self.quant(self.emb(*given))))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("is_narrow", [False, True])
def test_tables_are_trained(kind: Any, is_narrow: bool) -> None:
    torch.manual_seed(0)
    given: Any = (torch.randint(10, (4, 3)),)
    model = Table(kind)
    if is_narrow:
        model.emb.qconfig = eager.default_embedding_qat_qconfig_4bit
    ready = prepared(model, mapping=eager.get_embedding_qat_module_mappings())
    assert type(ready.emb) is getattr(qat, kind.__name__)
    losses = trained(ready, *given, steps=10)
    assert losses[-1] < losses[0]
    made: Any = eager.convert(ready.eval(), mapping=eager.get_embedding_static_quant_module_mappings())
    assert type(made.emb) is getattr(quantized, kind.__name__)
    assert made.emb.state_dict()["weight"].shape == (10, 6 if is_narrow else 12)
    assert type(made.linear) is quantized.Linear
    with torch.no_grad():
        torch.testing.assert_close(made.emb(*given), ready.emb(*given), atol=1e-5, rtol=0)
        torch.testing.assert_close(made(*given), ready(*given), atol=0.05, rtol=0)


def test_tables_of_the_wrong_kind_are_refused() -> None:
    bag: Any = nn.EmbeddingBag(10, 5, mode="max")
    bag.qconfig = eager.default_embedding_qat_qconfig
    assert type(qat.EmbeddingBag.from_float(bag)) is qat.EmbeddingBag
    for qconfig in (None, eager.default_qat_qconfig):
        bag.qconfig = qconfig
        with pytest.raises(Exception, match=r"qconfig|float") as caught:
            qat.EmbeddingBag.from_float(bag)
        assert type(caught.value).__module__.startswith("quantc")


def test_a_state_is_saved_and_loaded() -> None:
    torch.manual_seed(0)
    makes = []
    for _ in range(2):
        model = prepared(Stubbed(nn.Linear(5, 5)))
        trained(model, X)
        makes.append(model)
    makes[1].load_state_dict(makes[0].state_dict())
    made = [eager.convert(copy.deepcopy(model).eval()) for model in makes]
    assert torch.equal(made[0](X), made[1](X))
    made[1].load_state_dict(made[0].state_dict())
    assert set(made[0].state_dict()) == set(made[1].state_dict())


def test_hooks_are_kept() -> None:
    calls: list[str] = []
    model = Stubbed(nn.Linear(5, 5))
    model.body[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model.body[0].register_forward_hook(lambda *_: calls.append("after"))
    ready = prepared(model)
    ready(X)
    assert calls == ["before", "after"]
    made: Any = eager.convert(ready.eval())
    calls.clear()
    made(X)
    assert calls == ["before", "after"]


@pytest.mark.parametrize("op", ["add_scalar", "mul_scalar"])
def test_numbers_move_or_stretch_the_grid(op: str) -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.ff = eager.QuantStub(), quantized.FloatFunctional()

        def forward(self, x: Tensor) -> Any:
            return getattr(self.ff, op)(self.quant(x), 2.0)

    ready = prepared(Scalar())
    ready(X)
    with pytest.warns(eager.EagerWarning):
        made: Any = eager.convert(ready.eval())
    result = made(X)
    factor = 2 if op == "mul_scalar" else 1
    assert torch.abs(made.quant.scale * factor - result.q_scale()) < 1e-5


def test_results_with_known_ranges_need_no_data() -> None:
    model = Stubbed(nn.Sigmoid(), nn.Hardsigmoid(), nn.Tanh())
    ready = prepared(model)
    for layer in ready.body:
        assert type(layer.activation_post_process) is eager.FixedQParamsFakeQuantize
    before = ready(X)
    made: Any = eager.convert(ready.eval())
    torch.testing.assert_close(made(X), before.detach(), atol=2 / 128, rtol=0)
    for layer in made.body:
        assert not hasattr(layer, "activation_post_process")
        assert not layer._forward_hooks


def test_leaky_relu_is_what_was_trained() -> None:
    ready = prepared(Stubbed(nn.LeakyReLU()))
    for _ in range(3):
        ready(X)
    made: Any = eager.convert(ready.eval())
    torch.testing.assert_close(made(X), ready(X).detach(), atol=1e-5, rtol=0)


def test_relu_is_given_no_observer() -> None:
    ready = prepared(Stubbed(nn.Linear(5, 5), nn.ReLU()))
    assert not hasattr(ready.body[1], "activation_post_process")
    ready(X)
    made: Any = eager.convert(ready.eval())
    assert type(made.body[1]) is nn.ReLU


@pytest.mark.parametrize("kind", ["ConvBn1d", "ConvBn2d", "ConvBn3d", "ConvBnReLU2d", "LinearBn1d"])
def test_norms_in_training_are_those_of_torch(kind: str) -> None:
    """Losses, gradients and statistics beside torch's modules of the same names."""
    import torch.ao.nn.intrinsic as ao_intrinsic
    import torch.ao.nn.intrinsic.qat as ao_qat
    import torch.ao.quantization as ao

    torch.manual_seed(0)
    dim = int(kind[-2])
    layer: Any = nn.Linear(3, 4) if kind == "LinearBn1d" else getattr(nn, f"Conv{dim}d")(3, 4, 2)
    norm = getattr(nn, f"BatchNorm{dim}d")(4)
    relu = [nn.ReLU()] if "ReLU" in kind else []
    x = torch.randn(4, 3) if kind == "LinearBn1d" else torch.randn(4, 3, *[5] * dim)
    ours: Any = getattr(intrinsic, kind)(*copy.deepcopy([layer, norm, *relu])).train()
    theirs: Any = getattr(ao_intrinsic, kind)(*copy.deepcopy([layer, norm, *relu])).train()
    ours.qconfig, theirs.qconfig = eager.default_qat_qconfig, ao.qconfig.default_qat_qconfig
    pair: list[Any] = [getattr(intrinsic_qat, kind).from_float(ours), getattr(ao_qat, kind).from_float(theirs)]
    for _ in range(3):
        results = [side(x) for side in pair]
        for result in results:
            result.square().mean().backward()
        torch.testing.assert_close(*results)
    for name, parameter in pair[1].named_parameters():
        torch.testing.assert_close(dict(pair[0].named_parameters())[name].grad, parameter.grad)
    torch.testing.assert_close(pair[0].bn.running_var, pair[1].bn.running_var)
