"""Items 3.1 to 3.48 of the eager document: what it promises, and every name it lists (`seed_eager_names`)."""

from __future__ import annotations

import importlib
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc.nn as qnn
from quantc.flows import eager
from tests.support import seed_eager_names
from tests.support.eager_models import CASES, QUANTC
from tests.support.eager_small import FUSE, Small, Twice, X, run, small, with_qconfig
from tests.support.seed_eager_items import ITEMS, item, quantized, size_of, torch_flow, wide

# -- what is promised ---------------------------------------------------------------------------------------------------


@item("3.1")
def weights_and_activations_take_a_quarter() -> None:
    model = with_qconfig(eager.QuantWrapper(wide()).eval())
    x = torch.randn(64, 512)
    prepared = eager.prepare(eager.fuse_modules(model, ["module.0", "module.1"]))
    prepared(x)
    converted: Any = eager.convert(prepared)
    assert size_of(converted.state_dict()) <= 0.27 * size_of(model.state_dict())
    q = converted.quant(x)
    assert q.data_of.untyped_storage().nbytes() * 4 == x.untyped_storage().nbytes()
    assert size_of(q.parts()) <= 0.27 * size_of(x)


@item("3.2")
def vector_instructions_are_eight_bits_wide() -> None:
    """An expectation, and no promise of time: the layers compute on bytes, of which four fit where one float does."""
    converted: Any = quantized("mlp")
    q = converted.quant(CASES["mlp"].data()[0])
    assert converted.body[0](q).data_of.dtype is torch.uint8
    assert converted.body[0].weight().data_of.dtype is torch.int8


@item("3.3")
def per_tensor_and_per_channel_asymmetric() -> None:
    affine = eager.QConfig(
        eager.MinMaxObserver.with_args(dtype=torch.quint8, qscheme=torch.per_tensor_affine, reduce_range=True),
        eager.PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_affine),
    )
    observer = affine.weight()
    weight = torch.tensor([[-1.0, 3.0], [-8.0, 2.0]])
    observer(weight)
    scale, zero_point = observer.calculate_qparams()
    q = qnn.quantize_per_channel(weight, scale, zero_point, 0)
    assert (zero_point != 0).all()
    assert (q.dequantize() - weight).abs().max() <= scale.max() / 2
    activation = affine.activation()
    activation(torch.tensor([0.5, 4.0]))
    assert activation.calculate_qparams()[1].item() == 0


@item("3.4")
def per_channel_is_vectors_of_scale_and_offset() -> None:
    conv: Any = quantized().get_submodule("body.0")
    weight = conv.weight()
    assert weight.q_per_channel_scales().shape == (8,)
    assert weight.q_per_channel_zero_points().shape == (8,)
    assert weight.q_per_channel_axis() == 0


@item("3.5")
def per_channel_for_conv_and_linear() -> None:
    model: Any = quantized()
    for layer in (model.body[0], model.body[4], model.body[9]):
        assert layer.weight().qscheme() is torch.per_channel_affine
    moved = with_qconfig(eager.QuantWrapper(nn.ConvTranspose2d(4, 6, 2)).eval())
    prepared = eager.prepare(moved)
    prepared(torch.randn(1, 4, 5, 5))
    transposed: Any = eager.convert(prepared).get_submodule("module")
    assert transposed.weight().q_per_channel_axis() == 1


@item("3.6")
def zero_is_exact() -> None:
    for low, high in [(-1.0, 2.0), (0.1, 3.0), (-7.0, -0.2), (0.0, 0.0), (-1e-9, 1e9)]:
        observer = eager.MinMaxObserver()
        observer(torch.tensor([low, high]))
        scale, zero_point = observer.calculate_qparams()
        q = qnn.quantize_per_tensor(torch.tensor([0.0, low, high]), scale.item(), int(zero_point.item()))
        assert q.dequantize()[0] == 0
        assert (q.dequantize()[1:] - torch.tensor([low, high])).abs().max() <= scale.item()


@item("3.7")
def the_mapping() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=generator) * 3
    scale, zero_point = 0.0371, 113
    q = qnn.quantize_per_tensor(x, scale, zero_point)
    expected = torch.quantize_per_tensor(x, scale, zero_point, torch.quint8).int_repr()
    assert torch.equal(q.int_repr(), expected)
    assert torch.equal(q.int_repr().long(), (torch.round(x * (1 / scale)) + zero_point).clamp(0, 255).long())


@item("3.8")
def eight_bit_weights_and_activations_and_biases_of_32() -> None:
    """The bias is kept in float and rounded to steps of the accumulator: it costs nothing there that can be measured."""
    model: Any = quantized("mlp")
    x = CASES["mlp"].data()[0]
    q, layer = model.quant(x), model.body[4]
    assert q.data_of.dtype is torch.uint8
    assert layer.weight().data_of.dtype is torch.int8
    inside = model.body[2](model.body[0](q))
    weight, step = layer.weight(), inside.q_scale() * layer.weight().q_per_channel_scales().double()
    bias = torch.round(layer.bias().double() / step)
    assert (bias.abs() < 2**31).all()
    sums = (inside.data_of.long() - inside.q_zero_point()) @ weight.data_of.long().T + bias.long()
    levels = torch.round(sums.double() * step / layer.scale) + layer.zero_point
    assert (levels.clamp(0, 255) - layer(inside).data_of).abs().max() <= 1


@item("3.9")
def a_quantized_tensor_has_data_scale_and_zero_point_and_is_saved_so() -> None:
    q = qnn.quantize_per_tensor(torch.randn(3, 4), 0.05, 128)
    assert (q.q_scale(), q.q_zero_point(), q.int_repr().dtype) == (0.05, 128, torch.uint8)
    assert torch.equal(q.reshape(4, 3)[1:].int_repr(), q.int_repr().reshape(4, 3)[1:])
    file = io.BytesIO()
    torch.save(q.parts(), file)
    file.seek(0)
    back = qnn.QuantizedTensor.from_parts(torch.load(file, weights_only=True))
    assert back.equals(q)
    for dtype in (torch.qint8, torch.quint8, torch.qint32):
        assert qnn.quantize_per_tensor(torch.randn(3), 0.1, 0, dtype).data_of.dtype in (
            torch.int8, torch.uint8, torch.int32,
        )  # fmt: skip


@item("3.10")
def three_techniques() -> None:
    dynamic = eager.quantize_dynamic(small())
    static = eager.quantize(small(), eager.default_eval_fn, [[(X, 0)]])
    qat = with_qconfig(eager.fuse_modules_qat(Small().train(), FUSE), eager.get_default_qat_qconfig("fbgemm"))
    trained = eager.quantize_qat(qat, lambda model: model(X), [])
    for model in (dynamic, static, trained):
        assert model(X).shape == (2, 4)


@item("3.11")
def dynamic_in_one_call() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.fc = nn.LSTM(8, 16, 2), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Any:
            return self.fc(self.lstm(x)[0])

    torch.manual_seed(0)
    model, x = Tagger().eval(), torch.randn(5, 1, 8)
    made: Any = eager.quantize_dynamic(model)
    assert {type(made.lstm).__name__, type(made.fc).__name__} == {"LSTM", "Linear"}
    assert not isinstance(made.lstm, nn.LSTM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torch_flow.quantize_dynamic(model)
    assert (made(x) - theirs(x)).abs().max() <= 1e-6
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval()
    x = torch.randn(1, 4, 16)
    with torch.no_grad():  # where torch's own call fails
        assert (eager.quantize_dynamic(encoder)(x) - encoder(x)).abs().max() < 0.1


@item("3.12")
def the_static_recipe() -> None:
    case = CASES["convnet"]
    model: Any = case.made(QUANTC).eval()  # with stubs, and no layer twice
    model = eager.fuse_modules(model, case.fuse)
    model.qconfig = eager.QConfig(
        eager.MinMaxObserver.with_args(qscheme=torch.per_tensor_affine, reduce_range=True),
        eager.MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
    )
    prepared = eager.prepare(model)
    for batch in case.data():
        prepared(batch)
    converted = eager.convert(prepared)
    x = case.data()[0]
    assert (converted(x) - model(x)).abs().max() < 0.1 * model(x).abs().max()


@item("3.13")
def convert_quantizes_weights_stores_qparams_and_swaps() -> None:
    prepared = run(eager.prepare(small()))
    converted: Any = eager.convert(prepared)
    observer: Any = prepared.get_submodule("fc.activation_post_process")
    scale, zero_point = observer.calculate_qparams()
    assert (converted.fc.scale, converted.fc.zero_point) == (scale.item(), zero_point.item())
    assert converted.fc.weight().data_of.dtype is torch.int8
    kinds = {path: type(module) for path, module in converted.named_modules()}
    assert kinds["conv"] is qnn.STATIC_MODULES[type(prepared.get_submodule("conv"))]


@item("3.14")
def min_max_and_l2_norm() -> None:
    """HistogramObserver takes the range with the least squared error."""
    torch.manual_seed(0)
    x = torch.cat([torch.randn(100_000), torch.tensor([40.0])])
    errors = {}
    for kind in (eager.MinMaxObserver, eager.HistogramObserver):
        observer = kind()
        observer(x)
        scale, zero_point = observer.calculate_qparams()
        q = qnn.quantize_per_tensor(x, scale.item(), int(zero_point.item()))
        errors[kind.__name__] = (q.dequantize() - x).square().sum().item()
    assert errors["HistogramObserver"] < errors["MinMaxObserver"]


@item("3.15")
def training_with_fake_quant() -> None:
    qconfig = eager.get_default_qat_qconfig("fbgemm", version=0)
    model = with_qconfig(eager.fuse_modules_qat(Small().train(), FUSE), qconfig)
    trained: Any = eager.prepare_qat(model)
    fake = trained.fc.weight_fake_quant
    trained(X).sum().backward()
    rounded = fake(trained.fc.weight)
    assert rounded.dtype is torch.float32
    assert all(len(row.unique()) <= 256 for row in rounded)
    assert trained.fc.weight.grad is not None
    converted: Any = eager.convert(trained.eval())
    assert torch.allclose(converted.fc.weight().dequantize(), fake(trained.fc.weight), atol=1e-6)


@item("3.16")
def qparams_of_users_own() -> None:
    def power_of_two(observer: Any) -> tuple[Any, Any]:
        largest = torch.maximum(-observer.min_val, observer.max_val)
        return 2.0 ** torch.ceil(torch.log2(largest / 63)), 64

    act = eager.UserObserver.with_args(qparams=power_of_two, observer=eager.MinMaxObserver, reduce_range=True)
    prepared = run(eager.prepare(with_qconfig(small(), eager.QConfig(act, eager.default_weight_observer))))
    converted: Any = eager.convert(prepared)
    for layer in (converted.quant, converted.conv, converted.fc):
        assert torch.log2(torch.tensor(layer.scale)).item() % 1 == 0
        assert layer.zero_point == 64
    bad = eager.UserObserver(lambda observer: (-1.0, 0))
    bad(X)
    with pytest.raises(Exception, match="positive finite"):
        bad.calculate_qparams()


@item("3.17")
def parts_of_a_model_have_configs_of_their_own() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (eager.QuantWrapper(nn.Linear(4, 4)) for _ in range(3))

        def forward(self, x: Tensor) -> Any:
            return self.third(self.second(self.first(x)))

    model: Any = with_qconfig(Parts().eval(), eager.default_qconfig)
    model.second.qconfig = None
    model.third.qconfig = eager.default_per_channel_qconfig
    prepared = eager.prepare(model)
    prepared(torch.randn(8, 4))
    converted: Any = eager.convert(prepared)
    assert converted.first.module.weight().qscheme() is torch.per_tensor_affine
    assert type(converted.second.module) is nn.Linear
    assert converted.third.module.weight().qscheme() is torch.per_channel_affine


@item("3.18")
def reused_layers_are_found() -> None:
    prepared = eager.prepare(with_qconfig(Twice().eval()))
    prepared(torch.randn(2, 4))
    with pytest.raises(eager.ReusedLayerError) as caught:
        eager.convert(prepared)
    assert caught.value.where == "fc"


NAMESPACES = {
    "torch.quantization": "quantc.flows.eager",
    "torch.nn.quantized": "quantc.nn.quantized",
    "torch.nn.quantized.dynamic": "quantc.nn.quantized.dynamic",
    "torch.nn.qat.modules": "quantc.nn.qat.modules",
    "torch.nn.intrinsic.quantized.modules": "quantc.nn.intrinsic.quantized.modules",
    "torch.nn.intrinsic.qat.modules": "quantc.nn.intrinsic.qat.modules",
}


@item("3.19")
def namespaces() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for old, new in NAMESPACES.items():
            theirs, ours = importlib.import_module(old), importlib.import_module(new)
            classes = [name for name in getattr(theirs, "__all__", ()) if name[0].isupper()]
            missing = [name for name in classes if not hasattr(ours, name)]
            assert set(missing) <= NOT_THERE, (new, missing)


NOT_THERE = {
    "ConvAdd2d", "ConvAddReLU2d", "LinearLeakyReLU", "LinearTanh", "LSTM", "MultiheadAttention", "QConfigMapping", "QuantType",
    "ObserverOrFakeQuantize", "MatchAllNode", "Pattern", "AffineQuantizedObserverBase", "Granularity", "MappingType",
    "WeightObserver", "PerAxis", "PerBlock", "PerGroup", "PerRow", "PerTensor", "PerToken", "TorchAODType", "ZeroPointDomain",
}  # fmt: skip
"""Of the FX flow, of torchao, or modules of oneDNN and statically quantized recurrent ones that the document does not name."""


@pytest.mark.parametrize("number", seed_eager_names.ITEMS)
def test_item(number: str) -> None:
    ITEMS[number]()


def test_every_item_has_a_test() -> None:
    assert sorted(ITEMS, key=lambda number: int(number.partition(".")[2])) == [f"3.{number}" for number in range(1, 49)]


def test_the_oracle_has_every_name_of_the_list() -> None:
    listed = [
        "default_eval_fn",
        "FakeQuantize",
        "fuse_conv_bn",
        "fuse_conv_bn_relu",
        "_fuse_modules",
        "fuse_modules",
        "Observer",
        "ObserverBase",
        "_calculate_qparams",
        "MinMaxObserver",
        "PerChannelMinMaxObserver",
        "HistogramObserver",
        "RecordingObserver",
        "NoopObserver",
        "QuantStub",
        "DeQuantStub",
        "QuantWrapper",
        "propagate_qconfig_helper",
        "propagate_qconfig",
        "_observer_forward_hook",
        "add_observer",
        "add_quant_dequant",
        "prepare",
        "quantize",
        "quantize_dynamic",
        "quantize_qat",
        "convert",
        "swap_module",
        "get_observer_dict",
    ]
    assert [name for name in listed if name not in eager.__all__] == []


def test_names_that_torch_has_are_here_too() -> None:
    """All but those of the FX flow, of scripts, of sparse tensors, and of torchao."""
    of_others = ("_jit", "script_", "fx", "_dict", "mapping", "sparse", "_new", "get_combined", "get_block")
    public = [name for name in torch_flow.__all__ if not any(part in name for part in of_others)]
    assert [name for name in public if not hasattr(eager, name) and name not in NOT_THERE] == []
