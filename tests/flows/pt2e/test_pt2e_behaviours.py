"""Behaviours that code written for torchao's `prepare_pt2e` and `convert_pt2e` relies on, one test for each."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import observer as theirs

from quantc.errors import AnnotationError
from quantc.flows.pt2e import (
    ComposableQuantizer,
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    SharedQuantizationSpec,
    XNNPACKQuantizer,
    convert_pt2e,
    get_symmetric_quantization_config,
    prepare_pt2e,
)
from quantc.nn import observers
from tests.support.pt2e_quantizers import Annotating, Doing, converted, count, exported
from tests.support.pt2e_runs import DQ, DQ_CHANNEL, IMAGE, INT8, Q_CHANNEL, UINT8, Q, aten, conv, xnnpack

CHANNELS = QuantizationSpec(torch.int8, observers.PerChannelMinMaxObserver, -128, 127, torch.per_channel_affine, 0)


# -- a quantizer of one's own --------------------------------------------------------------------------------------


def test_a_quantizer_of_ones_own() -> None:
    made = converted(nn.Conv2d(3, 4, 3), IMAGE, conv())
    assert (count(made, Q), count(made, DQ)) == (2, 3)


def test_an_output_that_is_not_annotated_stays_float() -> None:
    made = converted(nn.Conv2d(3, 4, 3), IMAGE, conv(output=None))
    assert (count(made, Q), count(made, DQ)) == (1, 2)
    (output,) = made.graph.find_nodes(op="output")
    assert output.args[0][0].target is aten.conv2d.default


def test_a_pool_shares_the_scale_of_what_it_reads() -> None:
    def annotation(node: fx.Node) -> Any:
        if node.target is aten.max_pool2d.default:
            shared = SharedQuantizationSpec((node.args[0], node))  # type: ignore[arg-type]
            return QuantizationAnnotation({node.args[0]: UINT8}, shared)  # type: ignore[dict-item]
        return None

    made = converted(nn.Sequential(nn.MaxPool2d(2)), IMAGE, Doing(annotation))
    scales = {node.args[1:3] for node in made.graph.nodes if str(node.target).endswith(Q)}
    assert (count(made, Q), count(made, DQ), len(scales)) == (2, 2, 1)


def product_of_scales(found: list[Any]) -> tuple[Tensor, Tensor]:
    scales = [each.calculate_qparams()[0] for each in found]
    return (scales[0] * scales[1]).reshape(-1), torch.zeros(scales[1].numel(), dtype=torch.int32)


@pytest.mark.parametrize("is_qat", [False, True])
@pytest.mark.parametrize("weight", [INT8, CHANNELS])
def test_the_scale_of_a_bias_is_derived(weight: QuantizationSpec, is_qat: bool) -> None:
    is_channels = weight is CHANNELS

    def annotation(node: fx.Node) -> Any:
        if node.target is not aten.conv2d.default:
            return None
        x, kernel, bias = node.all_input_nodes
        scheme = torch.per_channel_symmetric if is_channels else torch.per_tensor_symmetric
        ends = (-(2**31), 2**31 - 1)
        derived = DerivedQuantizationSpec(
            [(x, node), (kernel, node)], product_of_scales, torch.int32, *ends, scheme, 0 if is_channels else None
        )
        return QuantizationAnnotation({x: UINT8, kernel: weight, bias: derived}, UINT8)

    made = converted(nn.Conv2d(3, 4, 3), IMAGE, Doing(annotation), is_qat=is_qat)
    (call,) = made.graph.find_nodes(op="call_function", target=aten.conv2d.default)
    x, kernel, bias = call.args[:3]
    wanted = torch.tensor(x.args[1]) * (made.get_buffer(str(kernel.args[1].target)) if is_channels else kernel.args[1])
    found = made.get_buffer(str(bias.args[1].target)) if is_channels else torch.tensor(bias.args[1])
    torch.testing.assert_close(found, wanted.to(found.dtype).reshape(found.shape))
    assert bias.args[-3:] == (-(2**31), 2**31 - 1, torch.int32)
    assert bias.args[0].op == "get_attr"
    assert count(made, DQ_CHANNEL) == (2 if is_channels else 0)


@pytest.mark.parametrize("is_qat", [False, True])
def test_scales_that_are_fixed(is_qat: bool) -> None:
    fixed = FixedQParamsQuantizationSpec(torch.uint8, 1 / 256, 0, 0, 255, torch.per_tensor_affine)
    made = converted(
        nn.Sequential(nn.Sigmoid()), IMAGE, Annotating(aten.sigmoid.default, (fixed,), fixed), is_qat=is_qat
    )
    steps = [node for node in made.graph.nodes if str(node.target).endswith((Q, DQ))]
    assert len(steps) == 4
    assert {node.args[1:3] for node in steps} == {(1 / 256, 0)}


class SigmoidAdd(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(x) + y


def test_uses_of_one_tensor_share_a_fixed_scale() -> None:
    fixed = FixedQParamsQuantizationSpec(torch.uint8, 1 / 256, 0, 0, 255, torch.per_tensor_affine)
    both = ComposableQuantizer(
        [Annotating(aten.sigmoid.default, (fixed,), fixed), Annotating(aten.add.Tensor, (fixed, fixed), fixed)]
    )
    made = converted(SigmoidAdd(), (IMAGE[0], IMAGE[0] + 1), both)
    assert (count(made, Q), count(made, DQ)) == (4, 4)


# -- sharing -------------------------------------------------------------------------------------------------------


class TwoCats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        joined = torch.cat([self.a(x), self.b(y)], dim=1)
        return torch.cat([joined, z + z], dim=1)


def cats(leader: int) -> Doing:
    """Every join shares one scale, that of an operand which leads."""

    def annotation(node: fx.Node) -> Any:
        if node.target is aten.conv2d.default:
            return QuantizationAnnotation(dict(zip(node.all_input_nodes, (UINT8, INT8), strict=False)), UINT8)
        if node.target is not aten.cat.default:
            return None
        operands = node.all_input_nodes
        like = SharedQuantizationSpec((operands[leader], node))
        read: Any = dict.fromkeys(operands, like) | {operands[leader]: UINT8}
        return QuantizationAnnotation(read, like)

    return Doing(annotation)


@pytest.mark.parametrize("leader", [0, 1])
def test_sharing_goes_on_through_joins(leader: int) -> None:
    """Also where the one that leads is annotated after those that follow it."""
    inputs = (*IMAGE, IMAGE[0] + 1, torch.randn(1, 2, 4, 4))
    prepared = prepare_pt2e(exported(TwoCats().eval(), inputs), cats(leader))
    prepared(*inputs)
    found = set()
    for node in prepared.graph.nodes:
        if node.target is aten.cat.default:
            found |= {id(getattr(prepared, str(operand.target))) for operand in node.args[0]}
            found |= {id(getattr(prepared, str(reader.target))) for reader in node.users}
        if node.target is aten.conv2d.default:
            found |= {id(getattr(prepared, str(reader.target))) for reader in node.users}
    assert len(found) == 1
    made = convert_pt2e(prepared)
    assert count(made, Q) == 7


class ThreeAdds(nn.Module):
    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return (a + b) + (c + d)


def test_implicit_sharing_can_be_refused() -> None:
    def annotation(node: fx.Node) -> Any:
        if node.target is not aten.add.Tensor:
            return None
        first, second = node.all_input_nodes
        like = SharedQuantizationSpec((second, node))
        return QuantizationAnnotation({first: like, second: UINT8}, like, allow_implicit_sharing=False)

    inputs = tuple(torch.randn(2, 3) for _ in range(4))
    prepared = prepare_pt2e(exported(ThreeAdds().eval(), inputs), Doing(annotation))
    adds = [node for node in prepared.graph.nodes if node.target is aten.add.Tensor]
    groups = [
        {
            id(getattr(prepared, str(near.target)))
            for near in (*node.all_input_nodes, *node.users)
            if near.op == "call_module"
        }
        for node in adds
    ]
    inner = [{id(getattr(prepared, str(near.target))) for near in node.all_input_nodes} for node in adds]
    assert all(len(group) == 1 for group in inner)
    assert len(set.union(*inner)) == 3
    assert len(groups) == 3


# -- formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["quantc", "torchao"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.int16, torch.float8_e5m2, torch.float8_e4m3fn])
def test_other_formats_of_activations(wanted: torch.dtype, dtype: torch.dtype, source: str) -> None:
    """The bits are those of torchao's observers, and what is dequantized has the dtype of what was quantized."""
    info: Any = torch.iinfo(wanted) if wanted is torch.int16 else torch.finfo(wanted)
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 3, 3, dtype=dtype).eval(), IMAGE[0].to(dtype)
    results = []
    for kind in (observers.MinMaxObserver, theirs.MinMaxObserver):
        act = QuantizationSpec(wanted, kind, int(info.min), int(info.max), torch.per_tensor_affine)
        weight = QuantizationSpec(torch.int8, kind, -128, 127, torch.per_tensor_symmetric)
        made = converted(model, (x,), Annotating(aten.conv2d.default, (act, weight), act))
        assert (count(made, Q), count(made, DQ)) == (2, 3)
        results.append(made(x))
    assert results[0].dtype is dtype
    assert torch.equal(*results)
    coarse = 0.02 if wanted is torch.int16 else 0.3
    torch.testing.assert_close(results[0], model(x), atol=coarse, rtol=0)


def test_an_operand_that_is_no_tensor_is_refused() -> None:
    class AddSix(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 6

    def annotation(node: fx.Node) -> Any:
        return QuantizationAnnotation({node.args[0]: UINT8, node.args[1]: UINT8}, UINT8)  # type: ignore[dict-item]

    with pytest.raises(AnnotationError, match="add"):
        prepare_pt2e(exported(AddSix().eval(), IMAGE), Doing(annotation))


# -- constants -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_per_channel", [False, True])
def test_weights_are_folded(is_per_channel: bool) -> None:
    made = converted(nn.Linear(4, 4), (torch.randn(2, 4),), xnnpack(is_per_channel=is_per_channel))
    assert (count(made, Q), count(made, DQ)) == ((2, 2) if is_per_channel else (2, 3))
    assert (count(made, Q_CHANNEL), count(made, DQ_CHANNEL)) == ((0, 1) if is_per_channel else (0, 0))
    assert made.get_buffer("_frozen_param0").dtype is torch.int8


def test_weights_are_not_folded_if_asked() -> None:
    made = converted(nn.Linear(4, 4), (torch.randn(2, 4),), xnnpack(is_per_channel=True), fold_quantize=False)
    assert count(made, Q_CHANNEL) == 1


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.other = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.fc(x) + self.other.t()


def test_other_constants_are_left_alone() -> None:
    quantizer = XNNPACKQuantizer().set_module_type(nn.Linear, get_symmetric_quantization_config())
    made = converted(Transposed(), (torch.randn(4, 4),), quantizer)
    assert (count(made, Q), count(made, DQ), count(made, "t.default")) == (2, 3, 1)


def test_all_that_precedes_the_quantize_op_of_a_constant_is_folded() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.randn(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight.t())

    made = converted(Functional(), (torch.randn(2, 4),), xnnpack())
    assert (count(made, Q), count(made, DQ), count(made, "t.default")) == (2, 3, 0)


def test_a_folded_weight_has_the_metadata_of_the_weight() -> None:
    module = exported(nn.Linear(4, 4).eval(), (torch.randn(2, 4),), strict=True)
    weight = next(node for node in module.graph.nodes if node.op == "get_attr" and "weight" in node.target)
    prepared = prepare_pt2e(module, xnnpack())
    prepared(torch.randn(2, 4))
    made = convert_pt2e(prepared)
    (folded,) = [node for node in made.graph.nodes if node.op == "get_attr" and "_frozen_param" in node.target]
    assert {key: weight.meta.get(key) for key in folded.meta} == folded.meta


def test_saved_and_loaded() -> None:
    x = torch.randn(2, 4)
    made = converted(nn.Linear(4, 4), (x,), xnnpack(is_per_channel=True))
    file = io.BytesIO()
    torch.export.save(torch.export.export(made, (x,)), file)
    file.seek(0)
    loaded: Any = torch.export.load(file).module()
    assert torch.equal(loaded(x), made(x))


def group_int4(kind: Any) -> QuantizationSpec:
    make = kind.with_args(
        target_dtype=torch.int8,
        mapping_type=theirs.MappingType.SYMMETRIC,
        granularity=theirs.PerGroup(group_size=32),
        quant_min=-8,
        quant_max=7,
    )
    return QuantizationSpec(torch.int8, make, -8, 7)


def stored(module: nn.Module) -> int:
    """The bytes of a state dict."""
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_weights_whose_observer_has_its_own_convert_are_folded(is_dynamic: bool) -> None:
    from torchao.quantization.pt2e import _affine_quantization as affine

    act_kind = affine.AffineQuantizedPlaceholderObserver if is_dynamic else affine.AffineQuantizedMinMaxObserver
    act_make = act_kind.with_args(
        target_dtype=torch.int8, mapping_type=theirs.MappingType.SYMMETRIC, granularity=theirs.PerToken()
    )
    act = QuantizationSpec(torch.int8, act_make, -128, 127, None, is_dynamic=is_dynamic)
    weight = group_int4(affine.AffineQuantizedMinMaxObserver)
    torch.manual_seed(0)
    model, x = nn.Linear(128, 20), torch.randn(5, 128)
    quantizer = Annotating(aten.linear.default, (act, weight))
    made = converted(model, (x,), quantizer)
    names = [str(node.target) for node in made.graph.nodes if node.op == "call_function"]
    assert sum("torchao.quantize_affine" in name for name in names) == 1
    assert sum("torchao.dequantize_affine" in name for name in names) == 2
    assert sum("torchao.choose_qparams_affine" in name for name in names) == int(is_dynamic)
    whole = converted(model, (x,), quantizer, fold_quantize=False)
    assert torch.equal(made(x), whole(x))
    codes = 128 * 20 * torch.int8.itemsize
    scales = 4 * 20 * (torch.float32.itemsize + torch.int64.itemsize)
    assert stored(made) <= codes + scales + 20 * 4 + 64
    assert stored(whole) >= 4 * 128 * 20


class Nibbles(observers.ObserverBase):
    """An observer that brings ops of its own."""

    def __init__(self, **_: Any) -> None:
        super().__init__(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self) -> Any:
        raise NotImplementedError

    def convert(self, model: fx.GraphModule, node: fx.Node) -> None:
        with model.graph.inserting_before(node):
            rounded = model.graph.call_function(torch.ops.quantc_tests.quantize_nibbles, (node.args[0], 0.5))
            back = model.graph.call_function(torch.ops.quantc_tests.dequantize_nibbles, (rounded, 0.5))
        node.replace_all_uses_with(back)
        model.graph.erase_node(node)


@pytest.fixture(scope="module")
def nibbles() -> Any:
    make: Any = torch.library.Library
    library = make("quantc_tests", "FRAGMENT")
    library.define("quantize_nibbles(Tensor x, float scale) -> Tensor")
    library.define("dequantize_nibbles(Tensor x, float scale) -> Tensor")
    library.impl("quantize_nibbles", lambda x, scale: (x / scale).round().clamp(-8, 7).to(torch.int8), "CPU")
    library.impl("dequantize_nibbles", lambda x, scale: x.float() * scale, "CPU")
    yield library
    library._destroy()


def test_observers_bring_their_own_ops(nibbles: Any) -> None:
    spec = QuantizationSpec(torch.uint8, Nibbles, 0, 255, torch.per_tensor_affine)
    made = converted(SigmoidAdd(), (*IMAGE, *IMAGE), Annotating(aten.add.Tensor, (spec, spec), spec))
    names = [str(node.target) for node in made.graph.nodes]
    assert names.count("quantc_tests.quantize_nibbles") == 3
    assert names.count("quantc_tests.dequantize_nibbles") == 3
    weight = converted(nn.Linear(4, 4), (torch.randn(2, 4),), Annotating(aten.linear.default, (UINT8, spec)))
    assert "quantc_tests.quantize_nibbles" not in [str(node.target) for node in weight.graph.nodes]
    assert weight.get_buffer("_frozen_param0").dtype is torch.int8
