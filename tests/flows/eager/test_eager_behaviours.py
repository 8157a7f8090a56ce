"""Behaviours that code written for torch's eager mode relies on, one test for each; those of training are in
`test_eager_training_behaviours`."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import ModeError
from quantc.flows import eager
from quantc.nn import STATIC_MODULES, intrinsic, quantized, torch_state_dict
from quantc.nn.intrinsic import quantized as intrinsic_quantized
from quantc.nn.quantized import dynamic
from tests.support.eager_small import converted
from tests.support.oracles import sqnr

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Stubbed(nn.Module):
    """A model between stubs."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.quant, self.body, self.dequant = eager.QuantStub(), nn.Sequential(*layers), eager.DeQuantStub()

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.body(self.quant(x)))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sub1 = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
        self.sub2 = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        self.fc3 = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Any:
        return self.fc3(self.sub2(self.sub1(x)))


# -- static --------------------------------------------------------------------------------------------------------


def test_a_single_layer_keeps_its_name_and_its_keys() -> None:
    torch.manual_seed(0)
    wrapped = eager.QuantWrapper(nn.Sequential(nn.Linear(5, 5)))
    before = set(wrapped.state_dict())
    made = converted(wrapped, X)
    assert type(made.module[0]) is quantized.Linear
    assert set(wrapped.state_dict()) == before
    assert not [layer for layer in made.modules() if hasattr(layer, "qconfig")]


def test_two_layers_of_which_one_is_quantized() -> None:
    model = nn.Sequential(nn.Linear(5, 8), eager.QuantWrapper(nn.Linear(8, 5)))
    vars(model[1])["qconfig"] = eager.get_default_qconfig("fbgemm")
    vars(model)["qconfig"] = None
    made = converted(model, X)
    assert type(made[0]) is nn.Linear
    assert type(made[1].module) is quantized.Linear


def test_nested_parts_with_configs_of_their_own() -> None:
    model = Nested()
    model.sub2[0] = eager.QuantWrapper(model.sub2[0])
    model.fc3 = eager.QuantWrapper(model.fc3)  # type: ignore[assignment]
    vars(model)["qconfig"] = None
    vars(model.sub2[0])["qconfig"] = eager.default_per_channel_qconfig
    vars(model.fc3)["qconfig"] = eager.default_qconfig
    made = converted(model, X)
    assert type(made.sub1[0]) is nn.Linear
    assert type(made.sub2[0].module) is quantized.Linear
    assert type(made.sub2[1]) is nn.Linear
    assert made.sub2[0].module.weight().qscheme() == torch.per_channel_affine
    assert made.fc3.module.weight().qscheme() == torch.per_tensor_affine


def test_every_part_with_a_config_can_be_wrapped() -> None:
    model = Nested().eval()
    model.fc3.qconfig = eager.default_qconfig  # type: ignore[assignment]
    vars(model.sub2[0])["qconfig"] = eager.default_qconfig
    eager.propagate_qconfig_(model)
    wrapped: Any = eager.add_quant_dequant(model)
    assert type(wrapped.fc3) is eager.QuantWrapper
    assert type(wrapped.sub2[0]) is eager.QuantWrapper
    assert type(wrapped.sub1[0]) is nn.Linear
    prepared = eager.prepare(wrapped)
    prepared(X)
    made: Any = eager.convert(prepared)
    assert type(made.fc3.module) is quantized.Linear


def test_a_part_is_skipped() -> None:
    model = nn.Sequential(eager.QuantWrapper(nn.Sequential(nn.Linear(5, 5), nn.ReLU())), nn.Linear(5, 5))
    vars(model)["qconfig"] = eager.get_default_qconfig("fbgemm")
    vars(model[1])["qconfig"] = None
    made = converted(model, X)
    assert type(made[1]) is nn.Linear
    assert type(made[0].module[0]) is quantized.Linear
    assert type(made[0].module[1]) is nn.ReLU


def test_stubs_in_the_code() -> None:
    made = converted(Stubbed(nn.Linear(5, 5)), X)
    assert [type(part) for part in (made.quant, made.body[0], made.dequant)] == [
        quantized.Quantize,
        quantized.Linear,
        quantized.DeQuantize,
    ]


def test_a_stub_without_a_config_stays() -> None:
    model = Stubbed(nn.Linear(5, 5)).eval()
    vars(model)["qconfig"] = eager.default_qconfig
    vars(model.dequant)["qconfig"] = None
    prepared = eager.prepare(model)
    prepared(X)
    with pytest.warns(eager.EagerWarning, match="returns quantized tensors"):
        made: Any = eager.convert(prepared)
    assert type(made.dequant) is eager.DeQuantStub


def test_a_wrapper_hands_its_config_to_its_stubs() -> None:
    wrapper: Any = eager.QuantWrapper(nn.Linear(5, 5))
    vars(wrapper)["qconfig"] = eager.default_qconfig
    eager.propagate_qconfig_(wrapper)
    assert wrapper.quant.qconfig is wrapper.dequant.qconfig is eager.default_qconfig


@pytest.mark.parametrize("engine", ["fbgemm", "qnnpack", "x86", "onednn"])
def test_a_residual_block_on_every_engine(engine: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
            self.op, self.pool, self.fc = quantized.FloatFunctional(), nn.AdaptiveAvgPool2d(1), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Any:
            y = self.op.add(self.relu(self.bn(self.conv(x))), x)
            return self.fc(torch.flatten(self.pool(y), 1))

    block = eager.fuse_modules(Block().eval(), [["conv", "bn", "relu"]])
    made = converted(eager.QuantWrapper(block), IMAGE, engine=engine).module
    assert type(made.conv) is intrinsic_quantized.ConvReLU2d
    assert type(made.op) is quantized.QFunctional
    assert type(made.pool) is nn.AdaptiveAvgPool2d
    assert type(made.fc) is quantized.Linear


def test_norms() -> None:
    layers: list[tuple[nn.Module, Tensor]] = [
        (nn.LayerNorm(8), IMAGE),
        (nn.GroupNorm(3, 3), IMAGE),
        (nn.InstanceNorm1d(3), IMAGE[0]),
        (nn.InstanceNorm2d(3), IMAGE),
        (nn.InstanceNorm3d(3), IMAGE[:, :, None]),
        (nn.BatchNorm2d(3), IMAGE),
    ]
    for layer, x in layers:
        made = converted(Stubbed(copy.deepcopy(layer)), x)
        assert type(made.body[0]) is getattr(quantized, type(layer).__name__)
        assert sqnr(layer.eval()(x), made(x)) > 25


@pytest.mark.parametrize("kind", [nn.Hardswish, nn.ELU, nn.LeakyReLU, nn.ReLU6, nn.PReLU, nn.Softmax])
def test_activations(kind: Any) -> None:
    layer = kind(1) if kind in (nn.PReLU, nn.Softmax) else kind()
    made = converted(Stubbed(layer), X)
    assert type(made.body[0]) is getattr(quantized, kind.__name__)
    with torch.no_grad():
        assert sqnr(layer(X), made(X)) > 20


def test_states_are_saved_and_loaded() -> None:
    torch.manual_seed(0)
    makes = [converted(eager.QuantWrapper(nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 5))), X) for _ in range(2)]
    assert set(makes[0].state_dict()) == set(makes[1].state_dict())
    makes[1].load_state_dict(makes[0].state_dict())
    assert torch.equal(makes[0](X), makes[1](X))
    file = io.BytesIO()
    torch.save(makes[0].state_dict(), file)
    file.seek(0)
    makes[1].load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(makes[0](X), makes[1](X))


def test_a_model_without_data_is_refused() -> None:
    model = eager.QuantWrapper(nn.Linear(5, 5)).eval()
    vars(model)["qconfig"] = eager.default_qconfig
    with pytest.raises(eager.NotObservedError):
        eager.convert(eager.prepare(model))


def test_the_scale_of_a_stub_is_a_buffer() -> None:
    import torch.ao.nn.quantized as ao_quantized

    theirs = ao_quantized.Quantize(0.05, 3, torch.quint8)  # type: ignore[no-untyped-call]
    ours = quantized.Quantize(0.05, 3)
    for name in ("scale", "zero_point"):
        found, wanted = getattr(ours, name), getattr(theirs, name)
        assert name in dict(ours.named_buffers())
        assert torch.equal(found, wanted)
        assert found.dtype is wanted.dtype
    assert ours.grid == (float(theirs.scale), 3)
    assert torch.equal(ours(X).int_repr(), theirs(X).int_repr())
    theirs.load_state_dict(torch_state_dict(ours))
    other = quantized.Quantize(1.0, 0)
    other.load_state_dict(theirs.state_dict())
    assert torch.equal(other.scale, ours.scale)
    made = converted(Stubbed(nn.Linear(5, 5)), X)
    assert isinstance(made.quant.scale, Tensor)
    assert isinstance(made.body[0].scale, float)
    half = copy.deepcopy(made).half()
    assert half.quant.scale.dtype is torch.float32


def test_hooks_are_kept() -> None:
    calls: list[str] = []
    model = Stubbed(nn.Linear(5, 5))
    model.body[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model.body[0].register_forward_hook(lambda *_: calls.append("after"))
    vars(model)["qconfig"] = eager.default_qconfig
    prepared = eager.prepare(model.eval())
    prepared(X)
    made = eager.convert(prepared)
    calls.clear()
    made(X)
    assert calls == ["before", "after"]


def test_recording_what_comes_by() -> None:
    model = Stubbed(nn.Linear(5, 5)).eval()
    vars(model)["qconfig"] = eager.default_debug_qconfig
    prepared = eager.prepare(model)
    prepared(X)
    prepared(X)
    observers = eager.get_observer_dict(prepared)
    assert len(observers["body.0.activation_post_process"].get_tensor_value()) == 2
    assert torch.equal(observers["quant.activation_post_process"].get_tensor_value()[0], X)


def test_results_of_modules_that_are_no_leaves() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sigmoid, self.swish = nn.Sigmoid(), nn.Hardswish()

        def forward(self, x: Tensor) -> Any:
            return self.swish(self.sigmoid(x))

    model = Stubbed(Pair()).eval()
    vars(model)["qconfig"] = eager.default_qconfig
    prepared = eager.prepare(model, observer_non_leaf_module_list=[Pair])
    assert "body.0.activation_post_process" in eager.get_observer_dict(prepared)


@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d])
def test_transposed_convolutions_by_channel(kind: Any) -> None:
    """torch refuses them; here the scales lie along the outputs."""
    torch.manual_seed(0)
    layer = kind(3, 4, 3)
    x = IMAGE if kind is nn.ConvTranspose2d else IMAGE[:, :, 0]
    made = converted(Stubbed(layer), x)
    assert made.body[0].weight().q_per_channel_axis() == 1
    assert sqnr(layer(x).detach(), made(x)) > 25
    model = Stubbed(kind(3, 4, 3)).eval()
    vars(model)["qconfig"] = eager.get_default_qconfig("fbgemm")
    vars(model.body[0])["qconfig"] = None
    prepared: Any = eager.prepare(model)
    assert not hasattr(prepared.body[0], "activation_post_process")


# -- modules of users' own -----------------------------------------------------------------------------------------


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Any:
        return self.conv(x)


class ObservedCustom(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Any:
        return self.conv(x)

    @classmethod
    def from_float(cls, module: Any) -> Any:
        made = cls(module.conv)
        vars(made)["qconfig"] = module.qconfig
        return made


class QuantizedCustom(ObservedCustom):
    @classmethod
    def from_observed(cls, module: Any) -> Any:
        module.conv.activation_post_process = module.activation_post_process
        return cls(quantized.Conv2d.from_float(module.conv))


def test_modules_of_users_own() -> None:
    torch.manual_seed(0)
    model: Any = Stubbed(nn.Conv2d(3, 3, 1), nn.Sequential(Custom())).eval()
    vars(model)["qconfig"] = eager.default_qconfig
    plain = Stubbed(copy.deepcopy(model.body[0]), nn.Sequential(copy.deepcopy(model.body[1][0].conv))).eval()
    vars(plain)["qconfig"] = eager.default_qconfig
    observed = {"float_to_observed_custom_module_class": {Custom: ObservedCustom}}
    swapped = {"observed_to_quantized_custom_module_class": {ObservedCustom: QuantizedCustom}}
    prepared = eager.prepare(model, prepare_custom_config_dict=observed)
    prepared(IMAGE)
    made: Any = eager.convert(prepared, convert_custom_config_dict=swapped)
    assert type(made.body[1][0]) is QuantizedCustom
    assert torch.equal(made(IMAGE), converted(plain, IMAGE)(IMAGE))


# -- dynamic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"fc3"}, {"fc3"}),
        ({"fc3", "sub2.0"}, {"fc3", "sub2.0"}),
        ({"fc3", "sub2"}, {"fc3", "sub2.0", "sub2.1"}),
        ({nn.Linear}, {"fc3", "sub1.0", "sub2.0", "sub2.1"}),
    ],
)
def test_dynamic_layers_by_name_and_class(keys: Any, wanted: set[str], dtype: torch.dtype) -> None:
    base = Nested().eval()
    before = set(base.state_dict())
    made = eager.quantize_dynamic(base, keys, dtype=dtype)
    assert {path for path, module in made.named_modules() if isinstance(module, dynamic.Linear)} == wanted
    assert set(base.state_dict()) == before
    inplace = Nested().eval()
    eager.quantize_dynamic(inplace, keys, dtype=dtype, inplace=True)
    assert {path for path, module in inplace.named_modules() if isinstance(module, dynamic.Linear)} == wanted


def test_dynamic_configs_by_class_and_name() -> None:
    config = {"fc3": None, "sub2.0": None, nn.Linear: eager.per_channel_dynamic_qconfig}
    made = eager.quantize_dynamic(Nested().eval(), config)
    found = {path: module for path, module in made.named_modules() if isinstance(module, dynamic.Linear)}
    assert set(found) == {"sub1.0", "sub2.1"}
    assert found["sub1.0"].weight().qscheme() == torch.per_channel_affine


@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "LSTMCell", "GRUCell", "RNNCell"])
def test_dynamic_recurrent_layers(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = getattr(nn, kind)(5, 7)
    layers: Any = eager.quantize_dynamic(nn.ModuleList([layer]).eval(), dtype=dtype)
    made = layers[0]
    assert type(made) is getattr(dynamic, kind)
    x = X if kind.endswith("Cell") else X[:, None]
    found, wanted = (side(x) for side in (made, layer))
    first = [each[0] if isinstance(each, tuple) else each for each in (found, wanted)]
    assert sqnr(first[1].detach(), first[0].detach()) > 25


def test_dynamic_hooks_are_kept() -> None:
    calls: list[int] = []
    model = Nested().eval()
    model.fc3.register_forward_hook(lambda *_: calls.append(1))
    eager.quantize_dynamic(model, {"fc3"})(X)
    assert calls == [1]


# -- fusing --------------------------------------------------------------------------------------------------------


class Fusable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.fc, self.fc_relu = nn.Linear(6, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        return self.fc_relu(self.fc(self.relu(self.bn(self.conv(x)))))


def test_fusing_in_eval_mode() -> None:
    torch.manual_seed(0)
    model = Fusable().eval()
    model.bn.running_mean.normal_()  # type: ignore[union-attr]
    made: Any = eager.fuse_modules(model, [["conv", "bn", "relu"], ["fc", "fc_relu"]])
    assert type(made.conv) is intrinsic.ConvReLU2d
    assert type(made.fc) is intrinsic.LinearReLU
    assert type(made.bn) is type(made.relu) is type(made.fc_relu) is nn.Identity
    torch.testing.assert_close(made(IMAGE), model(IMAGE), atol=1e-5, rtol=1e-5)
    with pytest.raises(eager.EagerModeError, match="training mode"):
        eager.fuse_modules(Fusable().train(), ["conv", "bn"])


def test_fusing_for_training() -> None:
    made: Any = eager.fuse_modules_qat(Fusable().train(), [["conv", "bn", "relu"], ["fc", "fc_relu"]])
    assert type(made.conv) is intrinsic.ConvBnReLU2d
    assert type(made.fc) is intrinsic.LinearReLU
    assert type(made.relu) is nn.Identity


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_fusing_transposed_convolutions(dim: int) -> None:
    kind, norm = getattr(nn, f"ConvTranspose{dim}d"), getattr(nn, f"BatchNorm{dim}d")
    model: Any = nn.Sequential(kind(2, 3, 3), norm(3)).eval()
    model[1].running_mean.normal_()
    x = torch.randn(2, 2, *[4] * dim)
    made: Any = eager.fuse_modules(model, ["0", "1"])
    assert type(made[1]) is nn.Identity
    torch.testing.assert_close(made(x), model(x), atol=1e-5, rtol=1e-5)


def test_fusing_a_linear_and_its_norm() -> None:
    model: Any = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).eval()
    model[1].running_mean.normal_()
    torch.testing.assert_close(eager.fuse_modules(model, ["0", "1"])(X), model(X), atol=1e-5, rtol=1e-5)


def test_fusing_by_a_function_of_ones_own() -> None:
    """A single module too: what the function gives is taken."""

    def fuse(modules: Any, is_qat: bool, known: Any) -> list[nn.Module]:
        return [nn.Identity() for _ in modules]

    model = nn.Sequential(nn.Linear(5, 5)).eval()
    made: Any = eager.fuse_modules(model, ["0"], fuser_func=fuse)
    assert type(made[0]) is nn.Identity
    for key in (nn.Linear, (nn.Linear,)):
        methods = {"additional_fuser_method_mapping": {key: lambda is_qat, linear: nn.Sequential(linear)}}
        made = eager.fuse_modules(model, ["0"], fuse_custom_config_dict=methods)
        assert type(made[0]) is nn.Sequential
    with pytest.raises(eager.FusionError, match="two modules"):
        eager.fuse_modules(model, ["0"])


def test_hooks_around_what_is_fused_are_kept() -> None:
    calls: list[str] = []
    model = Fusable().eval()
    model.conv.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.relu.register_forward_hook(lambda *_: calls.append("after"))
    eager.fuse_modules(model, ["conv", "bn", "relu"])(IMAGE)
    assert calls == ["before", "after"]


# -- TorchScript ---------------------------------------------------------------------------------------------------


def test_torchscript_is_refused_with_the_reason() -> None:
    static = converted(Stubbed(nn.Linear(5, 5), nn.LayerNorm(5)), X)
    for made, x in (
        (static, X),
        (eager.quantize_dynamic(nn.Sequential(nn.Linear(5, 5))), X),
        (eager.quantize_dynamic(nn.Sequential(nn.Embedding(5, 5)), dtype=torch.quint8), torch.tensor([1])),
    ):
        with pytest.raises(ModeError, match="script cannot read") as caught:
            torch.jit.script(made)
        assert "to_program" in str(caught.value.advice)
        with pytest.raises(ModeError, match="trace would keep"):
            torch.jit.trace(made, (x,))  # type: ignore[no-untyped-call]
    model = Stubbed(nn.Linear(5, 5)).eval()
    vars(model)["qconfig"] = eager.get_default_qconfig("x86")
    prepared = eager.prepare(model)
    with pytest.raises(ModeError, match="numbers in Python"):
        torch.jit.script(prepared)


def test_every_static_module_refuses_torchscript() -> None:
    kinds = {kind for kind in STATIC_MODULES.values() if kind.__module__.startswith("quantc.")}
    open_ones = {kind.__name__ for kind in kinds if not hasattr(kind, "__prepare_scriptable__")}
    assert len(kinds) > 20
    assert open_ones <= {"ReLU6", "Dropout"}  # float modules that hand on levels too
