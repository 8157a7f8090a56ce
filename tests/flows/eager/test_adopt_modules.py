"""Models written with torch's own stubs, functional and fused modules, taken as if written with ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.ao.nn.intrinsic as torch_nni
import torch.ao.quantization as torch_flow
from torch import Tensor, nn
from torch.ao.nn.quantized import FloatFunctional as TorchFunctional

import quantc.nn.intrinsic as nni
from quantc.flows.eager.adopt_modules import THEIRS, adopt
from quantc.nn.quantized import FloatFunctional
from quantc.nn.stubs import DeQuantStub, QuantStub, QuantWrapper


class Written(nn.Module):
    """A model that nobody wrote for this library."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = torch_flow.QuantStub(), torch_flow.DeQuantStub()
        self.block = torch_nni.LinearReLU(nn.Linear(4, 4), nn.ReLU())  # type: ignore[no-untyped-call]
        self.sum: Any = TorchFunctional()

    def forward(self, x: Tensor) -> Any:
        y = self.quant(x)
        return self.dequant(self.sum.add(self.block(y), y))


def test_modules_of_torch_become_their_namesakes_in_place() -> None:
    model = Written()
    weight = model.block[0].weight
    assert adopt(model) is model
    kinds = {path: type(module) for path, module in model.named_modules() if path}
    assert kinds["quant"] is QuantStub
    assert kinds["dequant"] is DeQuantStub
    assert kinds["block"] is nni.LinearReLU
    assert kinds["sum"] is FloatFunctional
    assert kinds["block.0"] is nn.Linear
    assert model.block[0].weight is weight


def test_an_adopted_model_computes_what_it_did() -> None:
    torch.manual_seed(0)
    model, x = Written(), torch.randn(3, 4)
    before, keys = model(x), list(model.state_dict())
    assert torch.equal(adopt(model)(x), before)
    assert list(model.state_dict()) == keys


def test_the_model_itself_is_adopted_too() -> None:
    wrapped: Any = torch_flow.QuantWrapper(nn.Linear(2, 2))
    assert type(adopt(wrapped)) is QuantWrapper
    assert type(wrapped.quant) is QuantStub


def test_classes_that_only_have_the_name_are_left_alone() -> None:
    class LinearReLU(nn.Sequential):
        pass

    own = LinearReLU(nn.Linear(2, 2))
    assert type(adopt(own)) is LinearReLU


def test_every_class_that_torch_fuses_eager_models_into_has_a_namesake() -> None:
    theirs = torch_nni.modules.fused
    fused = {
        name for name, kind in vars(theirs).items() if isinstance(kind, type) and kind.__module__ == theirs.__name__
    }
    missing = {name for name in fused if not hasattr(THEIRS[theirs.__name__], name)}
    assert missing == {"ConvAdd2d", "ConvAddReLU2d", "LinearLeakyReLU", "LinearTanh"}  # no eager fuser makes these
