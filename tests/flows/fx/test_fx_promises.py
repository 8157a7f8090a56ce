"""What the documents of the FX flow promise, item by item."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from quantc.errors import InputError, LoadError, ModeError
from quantc.flows.fx import (
    QConfig,
    QConfigMapping,
    convert_fx,
    convert_to_reference_fx,
    default_qat_qconfig,
    default_qconfig,
    float16_dynamic_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
    prepare_fx,
    prepare_qat_fx,
)
from quantc.flows.fx.custom_config import CustomConfigError
from quantc.flows.observers import MinMaxObserver, PerChannelMinMaxObserver, default_weight_observer
from quantc.flows.qconfig import default_symmetric_qnnpack_qconfig
from quantc.nn.intrinsic import qat as intrinsic_qat
from tests.support.fx_behaviours import some

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
jit: Any = torch.jit


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        out: Tensor = self.head((x + x).mean([2, 3]))
        return out


def images(count: int = 4, size: int = 8) -> Tensor:
    return torch.randn(count, 3, size, size)


def converted(model: nn.Module, mapping: Any, *batches: Tensor, **options: Any) -> Any:
    prepared = prepare_fx(model.eval(), mapping, (batches[0],))
    for x in batches:
        prepared(x)
    return convert_fx(prepared, **options)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("model", "shape"),
    [(nn.Linear(4, 2), (4,)), (nn.Conv2d(3, 2, 1), (3, 5, 5)), (Net(), (3, 8, 8)), (nn.ReLU(), (3,))],
    ids=["linear", "conv", "net", "relu"],
)
def test_an_example_batch_of_one_leaves_the_batch_open(model: nn.Module, shape: tuple[int, ...]) -> None:
    prepared = prepare_fx(model.eval(), {"": default_qconfig}, (torch.randn(1, *shape),))
    calls = [torch.randn(count, *shape) for count in (5, 1, 3)]
    for x in calls:
        assert torch.allclose(prepared(x), model(x), atol=1e-6)
    quantized = convert_fx(prepared)
    assert [quantized(x).shape[0] for x in calls] == [5, 1, 3]


class OnlyOne(nn.Module):
    """The size of its batch decides what it computes, or what it can be added to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)
        self.register_buffer("rows", torch.randn(3, 4))
        self.rows: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "added":
            return self.linear(x + self.rows)  # type: ignore[no-any-return]
        out: Tensor = self.linear(x)
        return out if x.shape[0] == 1 else 2 * out


@pytest.mark.parametrize("how", ["added", "asked"])
def test_a_batch_of_one_that_means_something_stays_fixed(how: str) -> None:
    model, x = OnlyOne(how).eval(), torch.randn(1, 4)
    prepared = prepare_fx(model, {"": default_qconfig}, (x,))
    assert torch.allclose(prepared(x), model(x), atol=1e-6)
    with pytest.raises(InputError, match="has size 2"):
        prepared(torch.randn(2, 4))


OBSERVERS = {
    "int8 activations": (MinMaxObserver.with_args(dtype=torch.qint8), default_weight_observer),
    "affine int8 weights": (MinMaxObserver, MinMaxObserver.with_args(dtype=torch.qint8)),
    "affine int8 weights by channel": (
        MinMaxObserver,
        PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_affine),
    ),
    "quint8 weights": (MinMaxObserver, MinMaxObserver.with_args(dtype=torch.quint8)),
}


@pytest.mark.parametrize("engine", some(["x86", "qnnpack"]))
@pytest.mark.parametrize("name", OBSERVERS)
def test_bytes_of_any_kind_are_quantized(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.quantized, "engine", engine)
    model, batches = Net().eval(), [images() for _ in range(3)]
    prepared = prepare_fx(model, {"": QConfig(*OBSERVERS[name])}, (batches[0],))
    for batch in batches:
        prepared(batch)
    x = batches[-1]
    reference, quantized = convert_to_reference_fx(prepared), convert_fx(prepared)
    assert all(row.kernel for row in quantized.placed) or engine == "x86"
    assert {"conv", "linear"} <= {row.op for row in quantized.placed}
    spread = float(model(x).max() - model(x).min())
    step = float(prepared.get_submodule(sorted(_observers(prepared))[-1]).calculate_qparams()[0])  # type: ignore[operator]
    assert (
        float((quantized(x) - reference(x)).abs().max()) <= 2.01 * step
    )  # one of the layer, and one that it was given
    assert float((quantized(x) - model(x)).abs().max()) < 0.1 * spread


def _observers(prepared: fx.GraphModule) -> list[str]:
    return [name for name, _ in prepared.named_children() if name.startswith("activation_post_process")]


def test_symmetric_qconfigs_of_qnnpack_run_on_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    quantized = converted(Net(), {"": default_symmetric_qnnpack_qconfig}, images(), images())
    assert all(row.kernel for row in quantized.placed)
    assert any(torch.int8 in node.args for node in quantized.program.nodes())


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.part, self.last = nn.Conv2d(3, 3, 1), Part(), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.part(self.conv(x)))
        return out


@pytest.mark.parametrize("by", some(["name", "class"]))
@pytest.mark.parametrize("interface", some([([0], [0]), ([], []), ([0], []), ([], [0])], keep=2))
def test_a_standalone_module_computes_as_it_would_inside(interface: tuple[list[int], list[int]], by: str) -> None:
    model, x = Whole().eval(), images()
    own = {"input_quantized_idxs": interface[0], "output_quantized_idxs": interface[1]}
    key: Any = "part" if by == "name" else Part
    custom = {f"standalone_module_{by}": [(key, None, (x,), own, None)]}
    prepared = prepare_fx(model, {"": default_qconfig}, (x,), custom)
    together = prepare_fx(model, {"": default_qconfig}, (x,))
    for y in (x, images(2)):
        prepared(y)
        together(y)
    quantized = convert_fx(prepared)
    assert torch.equal(quantized(x), convert_fx(together)(x))
    assert torch.equal(copy.deepcopy(quantized)(x), quantized(x))


def test_a_standalone_module_takes_and_gives_quantized_tensors_by_itself() -> None:
    x = images()
    custom = {
        "standalone_module_name": [("part", None, (x,), {"input_quantized_idxs": 0, "output_quantized_idxs": 0}, None)]
    }
    prepared = prepare_fx(Whole().eval(), {"": default_qconfig}, (x,), custom)
    prepared(x)
    given = torch.quantize_per_tensor(x, 0.05, 128, torch.quint8)
    assert convert_fx(prepared).part(given).is_quantized


class Nested(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inner = nn.Identity() if inner is None else inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        x = torch.add(x, x)
        x = torch.add(x, x)
        out: Tensor = self.inner(x)
        return out


def test_the_nth_op_of_a_module_keeps_its_qconfig_until_convert() -> None:
    model, x = Nested(Nested(Nested())).eval(), torch.randn(3, 4)
    rows = [("", 0), ("inner", 1), ("inner.inner", 0)]
    order = [(path, kind, index, default_qconfig) for path, index in rows for kind in (nn.Linear, torch.add)]
    prepared = prepare_fx(model, {"module_name_object_type_order": order}, (x,))
    prepared(x)
    quantized = {row.node for row in prepared.coverage().rows if row.verdict == "quantized"}
    assert quantized == {"linear", "add", "linear_3", "add_3", "linear_4", "add_4"}
    error = (convert_fx(prepared)(x) - model(x)).abs().max()
    assert float(error) < 0.1 * float(model(x).abs().max())


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.block = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(self.linear(x))
        return out


class Observed(Custom):
    @classmethod
    def from_float(cls, module: Custom) -> Observed:
        made = cls()
        made.linear, made.block = module.linear, module.block
        return made


def test_modules_inside_a_custom_module_have_their_qconfigs() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Custom()).eval()
    custom = {"float_to_observed_custom_module_class": {"static": {Custom: Observed}}}
    mapping = QConfigMapping().set_global(default_qconfig).set_module_name("1.block", None)
    prepared = prepare_fx(model, mapping, (torch.randn(2, 3),), custom)
    observed: Any = prepared.get_submodule("1")
    assert observed.qconfig == default_qconfig
    assert observed.linear.qconfig == default_qconfig
    assert observed.block[0].qconfig is None


def test_the_graph_names_modules_that_there_are() -> None:
    quantized, x = converted(Net(), get_default_qconfig_mapping(), images()), images()
    named = dict(quantized.named_modules())
    targets = [node.target for node in quantized.graph.nodes if node.op == "call_module"]
    assert targets
    assert set(targets) <= set(named)
    again = fx.Transformer(quantized).transform()
    assert torch.equal(again(x)[0], quantized(x))
    assert list(nn.Sequential(quantized).named_modules())[1:3][0][0] == "0"
    assert not list(quantized.parameters())


class Split(nn.Module):
    """Two outputs, one of which is given as a quantized tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def test_a_state_dict_makes_a_converted_model_the_other() -> None:
    x = images()
    one = converted(Net(), get_default_qconfig_mapping(), x, images())
    other = converted(Net(), get_default_qconfig_mapping(), 3 * images())
    other(x)  # weights are packed by now
    assert not torch.equal(one(x), other(x))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(one(x), other(x))
    assert torch.equal(one.program(x), other.program(x))
    assert torch.equal(copy.deepcopy(other)(x), one(x))


def test_a_state_dict_has_the_grids_of_quantized_outputs() -> None:
    def made(scale: float) -> Any:
        x = scale * torch.randn(5, 4)
        prepared = prepare_fx(Split().eval(), {"": default_qconfig}, (x,), {"output_quantized_idxs": [1]})
        prepared(x)
        return convert_fx(prepared)

    one, other, x = made(1), made(5), torch.randn(2, 4)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x)[0], other(x)[0])
    assert other(x)[1].q_scale() == one(x)[1].q_scale()
    assert torch.equal(one(x)[1].int_repr(), other(x)[1].int_repr())


def test_a_state_dict_of_another_model_is_refused() -> None:
    one = converted(Net(), get_default_qconfig_mapping(), images())
    other = converted(nn.Sequential(nn.Linear(4, 4)), get_default_qconfig_mapping(), torch.randn(2, 4))
    with pytest.raises(LoadError, match="another model"):
        other.load_state_dict(one.state_dict())
    state = one.state_dict()
    del state["head.weight_quantized"]
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.weight_quantized"):
        one.load_state_dict(state)


def test_original_weights_are_kept_when_asked_for() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2, bias=False)).eval()
    x = torch.randn(2, 3, 2, 2)
    kept = converted(model, {"": default_qconfig}, x, keep_original_weights=True).original_weights_lookup
    assert list(kept) == ["0_packed_weight_0", "3_packed_weight_0"]
    weight, bias = kept["0_packed_weight_0"]
    expected = model[1](model[0](x))  # the norm is folded into what is quantized
    assert torch.allclose(functional.conv2d(x, weight, bias), expected, atol=1e-5)
    assert torch.equal(kept["3_packed_weight_0"][0], model.get_parameter("3.weight"))
    assert kept["3_packed_weight_0"][1] is None
    assert not converted(model, {"": default_qconfig}, x).original_weights_lookup


def test_original_weights_of_float16_layers_have_the_names_of_their_modules() -> None:
    linear = nn.Linear(3, 3)
    model = nn.Sequential(OrderedDict({"a: 5": linear}))
    kept = converted(model, {"": float16_dynamic_qconfig}, torch.randn(2, 3), keep_original_weights=True)
    assert torch.equal(kept.original_weights_lookup["a_5_packed_weight_0"][0], linear.weight)
    trained = prepare_qat_fx(nn.Sequential(nn.Linear(3, 3)), {"": default_qat_qconfig}, (torch.randn(2, 3),))
    trained(torch.randn(2, 3))
    with pytest.raises(CustomConfigError, match="calibrated models only"):
        convert_fx(trained, keep_original_weights=True)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


def test_a_model_without_parameters_is_prepared_for_training() -> None:
    x = torch.randn(3, 4)
    prepared = prepare_qat_fx(Twice().train(), {"": default_qat_qconfig}, (x,))
    prepared(x)
    assert float((convert_fx(prepared.eval())(x) - 2 * x).abs().max()) < 0.1


def test_norms_are_frozen_by_the_function_that_users_know() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).train()
    x = torch.randn(4, 3, 8, 8)
    prepared = prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,))
    prepared(x)
    (mean,) = (buffer for name, buffer in prepared.named_buffers() if name.endswith("running_mean"))
    before = mean.clone()
    prepared.apply(intrinsic_qat.freeze_bn_stats)
    prepared(x)
    assert torch.equal(before, mean)
    prepared.apply(intrinsic_qat.update_bn_stats)
    prepared(x)
    assert not torch.equal(before, mean)


def test_torchscript_is_refused_where_it_cannot_be_and_traced_where_it_can() -> None:
    model, x = Net().eval(), images()
    prepared = prepare_fx(model, {"": default_qconfig}, (x,))
    prepared(x)
    with pytest.raises(ModeError, match=r"torch\.jit\.script cannot read"):
        torch.jit.script(prepared)
    quantized = convert_fx(prepared)
    with pytest.raises(ModeError, match=r"torch\.jit\.script cannot read"):
        torch.jit.script(quantized)
    traced = jit.trace(quantized, (x,))
    assert torch.equal(traced(x), quantized.program(x))
