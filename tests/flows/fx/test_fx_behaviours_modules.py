"""Behaviours of the FX flow: which modules get which QConfig, modules of one's own, states, and what convert gives."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from quantc.errors import ModeError
from quantc.flows.fake_quantize import (
    FakeQuantize,
)
from quantc.flows.fx import (
    QConfig,
    QConfigMapping,
    QuantType,
    convert_fx,
    default_dynamic_qconfig,
    default_qat_qconfig,
    default_qconfig,
    float16_dynamic_qconfig,
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
    prepare_fx,
    prepare_qat_fx,
)
from quantc.flows.fx.custom_config import CustomConfigError
from quantc.flows.observers import MinMaxObserver, default_weight_observer
from quantc.flows.qconfig import default_reuse_input_qconfig
from tests.support.fx_behaviours import run, some

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def image(count: int = 2, channels: int = 1) -> Tensor:
    return torch.randn(count, channels, 4, 4)


def convs(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(count)))


class Given(nn.Module):
    """A linear whose weights are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = torch.randn(5, 5) / 3, torch.zeros(5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.w, self.b)


# -- which QConfig -----------------------------------------------------------------------------------------------------


def test_qconfig_none() -> None:
    found = run(convs(), {"": default_qconfig, "module_name": [("1", None)]}, image()).check()
    assert (found.taken, found.left) == (["conv2d"], ["conv2d"])


def test_qconfig_module_type() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(16, 3))
    found = run(model, {"object_type": [(nn.Conv2d, default_qconfig)]}, image()).check()
    assert found.taken == ["conv2d"]


def test_qconfig_qat_module_type() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.Linear(5, 5))
    kinds = [(nn.Linear, default_qat_qconfig), (nn.ReLU, default_qat_qconfig)]
    found = run(model, {"": None, "object_type": kinds}, torch.rand(5, 5), qat=True).check(0.1)
    assert found.taken == ["linear", "relu", "linear"]


def test_qconfig_function() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    found = run(Sum(), {"object_type": [(torch.add, default_qconfig)]}, image(), image()).check()
    assert found.kernels == ["sum"]


def test_qconfig_module_name_regex() -> None:
    assert run(convs(), {"module_name_regex": [(r"\d", default_qconfig)]}, image()).check().left == []


def test_qconfig_precedence() -> None:
    model = nn.Sequential()
    for name, layer in {"linear": nn.Linear(4, 4), "conv": 1, "module_conv1": 1, "module_conv2": 1}.items():
        model.add_module(name, nn.Conv2d(1, 1, 1) if layer == 1 else layer)  # type: ignore[arg-type]
    mapping = {
        "": default_qconfig,
        "object_type": [(nn.Conv2d, default_dynamic_qconfig)],
        "module_name_regex": [("module_conv*", float16_dynamic_qconfig)],
        "module_name": [("module_conv2", default_qat_qconfig)],
    }
    prepared = prepare_fx(model.eval(), mapping, (image(),))
    from quantc.flows.fx.assign_qconfigs import Choice

    chosen = Choice(prepared.program, QConfigMapping.from_dict(mapping))
    found = {node.name: chosen[node] for node in prepared.program.graph.nodes if node.name in ("linear", *CONVS)}
    assert found == {
        "linear": default_qconfig,
        "conv2d": default_dynamic_qconfig,
        "conv2d_1": float16_dynamic_qconfig,
        "conv2d_2": default_qat_qconfig,
    }


CONVS = ("conv2d", "conv2d_1", "conv2d_2")


@pytest.mark.parametrize("relu", some([nn.ReLU(), functional.relu, torch.relu]))
@pytest.mark.parametrize(
    "layers", some([[nn.Linear(4, 3)], [nn.Conv1d(3, 3, 3)], [nn.Conv1d(3, 3, 3), nn.BatchNorm1d(3)]])
)
def test_qconfig_dict_with_fused_modules(layers: list[nn.Module], relu: Any) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.relu = nn.Sequential(*copy.deepcopy(layers)), relu

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.relu(self.body(x))
            return out

    found = run(Fused(), get_default_qconfig_mapping("qnnpack"), torch.randn(1, 3, 4)).check()
    assert (found.left, len(found.observers)) == ([], 2)


class Sub(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x.transpose(2, 3))
        return out.transpose(2, 3)


class WithSub(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sub, self.one, self.two = Sub(), nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.sub(self.one(x)))
        return out.transpose(2, 3)


@pytest.mark.parametrize("inside", some([False, True]))
def test_qconfig_for_call_method(inside: bool) -> None:
    rows = [("sub", default_qconfig if inside else None)]
    found = run(WithSub(), {"": None if inside else default_qconfig, "module_name": rows}, image()).check()
    assert (found.taken if inside else found.left) == ["transpose", "conv2d", "transpose"]


def test_qconfig_for_call_func() -> None:
    model = nn.Sequential(nn.Sequential(Given(), Given()), Given())
    found = run(model, {"": default_qconfig, "module_name": [("1", None)]}, torch.rand(5, 5)).check()
    assert (found.taken, found.left) == (["linear", "linear"], ["linear"])


def test_default_quant_after_none_qconfig() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), Turned(), nn.Conv2d(1, 1, 1))
    found = run(model, {"": default_qconfig, "module_name": [("0", None)]}, image()).check()
    assert found.left == ["conv2d"]


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(2, 3)


def test_fusion_pattern_unquantized() -> None:
    class Child(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.relu(torch.add(x, 1.0))

    found = run(
        nn.Sequential(Child(), nn.Conv2d(1, 1, 1)), {"": default_qconfig, "module_name": [("0", None)]}, image()
    )
    assert (found.check().left, found.taken) == (["add", "relu"], ["conv2d"])


def test_reuse_input_qconfig() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(-1)

    behind = run(nn.Sequential(nn.Conv2d(1, 1, 1), Flat()), get_default_qconfig_mapping(), image()).check()
    assert (behind.left, len({id(each) for each in behind.observers})) == ([], 2)
    alone = run(Flat(), get_default_qconfig_mapping(), image())
    assert (alone.taken, alone.observers) == ([], [])
    assert run(Flat(), {"": default_reuse_input_qconfig}, image()).observers == []


@pytest.mark.parametrize("train", some([False, True]))
def test_prepare_mode(train: bool) -> None:
    """A model that computes the same in either mode may be in either; the model itself is not changed."""
    model, x = nn.Sequential(nn.Linear(5, 10)), (torch.randn(1, 5),)
    prepare_qat_fx(model.train(train), get_default_qat_qconfig_mapping(), x)
    prepared = prepare_fx(model.train(train), get_default_qconfig_mapping(), x)
    assert not prepared.training
    assert model.training is train
    with pytest.raises(ModeError, match="in training mode"):
        prepare_fx(nn.Sequential(nn.Dropout(), nn.Linear(5, 5)).train(), get_default_qconfig_mapping(), x)


def test_convert_qconfig_mapping() -> None:
    """What stays float is said in prepare: a mapping for convert that differs is refused."""
    model, x = nn.Sequential(Given(), nn.Linear(5, 5)), torch.rand(5, 5)
    qconfig = get_default_qat_qconfig("fbgemm")
    mapping = {"": None, "object_type": [(functional.linear, qconfig), (nn.Linear, qconfig)]}
    prepared = prepare_qat_fx(model.train(), mapping, (x,))
    prepared(x)
    convert_fx(prepared.eval(), qconfig_mapping=mapping)
    with pytest.raises(CustomConfigError, match="another than that of prepare"):
        convert_fx(prepared, qconfig_mapping={**mapping, "module_name": [("0", None)]})


# -- modules of one's own ----------------------------------------------------------------------------------------------


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class Observed(Custom):
    @classmethod
    def from_float(cls, module: Custom) -> Observed:
        assert hasattr(module, "qconfig")
        made = cls()
        made.linear = module.linear
        return made


class Static(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out

    @classmethod
    def from_observed(cls, module: Any) -> Static:
        from torch.ao.nn import quantized as nnq

        module.linear.activation_post_process = module.activation_post_process
        return cls(nnq.Linear.from_float(module.linear))  # type: ignore[no-untyped-call]  # it asks for the QConfig of the layer


class Dynamic(Static):
    @classmethod
    def from_observed(cls, module: Any) -> Dynamic:
        from torch.ao.nn.quantized import dynamic as nnqd

        return cls(nnqd.Linear.from_float(module.linear))  # type: ignore[no-untyped-call]


SWAP = {"float_to_observed_custom_module_class": {"static": {Custom: Observed}}}
BACK = {"observed_to_quantized_custom_module_class": {"static": {Observed: Static}}}


class WithCustom(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.custom, self.how = nn.Linear(3, 3), Custom(), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "chain":
            out: Tensor = self.custom(self.linear(x))
        elif self.how == "beside":
            out = self.custom(x) + self.linear(x)
        else:
            out = self.custom(x) + self.custom(x)
        return out


@pytest.mark.parametrize("how", some(["chain", "beside", "twice"]))
def test_custom_module_class(how: str) -> None:
    found = run(WithCustom(how), {"": default_qconfig}, torch.randn(3, 3), prepare_custom_config=SWAP, convert=BACK)
    assert type(found.quantized.custom) is Static
    x = found.inputs[0]
    assert float((found.quantized(x) - found.model(x)).abs().max()) < 0.1


def test_custom_module_class_of_dynamic_quantization() -> None:
    custom = {"non_traceable_module_class": [Custom]}
    back = {"observed_to_quantized_custom_module_class": {"dynamic": {Custom: Dynamic}}}
    found = run(
        WithCustom("chain"),
        {"": default_dynamic_qconfig},
        torch.randn(3, 3),
        prepare_custom_config=custom,
        convert=back,
    )
    assert type(found.quantized.custom) is Dynamic
    x = found.inputs[0]
    assert float((found.quantized(x) - found.model(x)).abs().max()) < 0.1


@pytest.mark.parametrize("trained", some([False, True]))
def test_non_traceable_module(trained: bool) -> None:
    class Keys(nn.Module):
        def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
            return {key: x[key] for key in x}

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: dict[str, Tensor]) -> Tensor:
            rows: list[Tensor] = [self.linear(row) for row in x["key"]]
            return torch.stack(rows)

    model = nn.Sequential(Keys(), Rows())
    custom = {"non_traceable_module_name": ["0"], "non_traceable_module_class": [Rows]}
    prepare = prepare_qat_fx if trained else prepare_fx
    qconfig = get_default_qat_qconfig() if trained else default_qconfig
    prepared = prepare(model.train(trained), {"": qconfig}, ({"key": torch.randn(3, 2)},), custom)
    assert [type(prepared.get_submodule(name)) for name in ("0", "1")] == [Keys, Rows]
    assert type(prepared.get_submodule("1.linear")) is nn.Linear  # nothing inside is touched


@pytest.mark.parametrize("indexes", some([([0], [0]), ([], [0]), ([0], []), ([], [])]))
def test_quantized_input_quantized_output(indexes: tuple[list[int], list[int]]) -> None:
    custom = {"input_quantized_idxs": indexes[0], "output_quantized_idxs": indexes[1]}
    prepared = prepare_fx(convs().eval(), {"": default_qconfig}, (image(1),), custom)
    prepared(image(4))
    quantized, x = convert_fx(prepared), image()
    given = torch.quantize_per_tensor(x, 0.05, 64, torch.quint8) if indexes[0] else x
    assert quantized(given).is_quantized is bool(indexes[1])
    static: str = QuantType.STATIC
    assert static == "static"


@pytest.mark.parametrize("model", some(["identity", "conv", "dict"]))
def test_quant_output_always_observed(model: str) -> None:
    class Answer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1) if model != "identity" else nn.Identity()

        def forward(self, x: Tensor) -> Any:
            x = self.conv(x)
            return {"output": x} if model == "dict" else x

    prepared = prepare_qat_fx(
        Answer().train(), {"": get_default_qat_qconfig("fbgemm")}, (image(),), {"output_quantized_idxs": [0]}
    )
    prepared(image())
    if model == "identity":
        with pytest.raises(CustomConfigError, match="output 0 is not quantized"):
            convert_fx(prepared.eval())  # no op yields it: there is nothing to say on which grid
        return
    made = convert_fx(prepared.eval())(image())
    assert (made["output"] if model == "dict" else made).is_quantized


# -- attributes, copies, states ----------------------------------------------------------------------------------------


def test_preserve_attributes() -> None:
    model = convs()
    model.kept = 3  # type: ignore[assignment]
    prepared = prepare_fx(model.eval(), {"": default_qconfig}, (image(),), {"preserved_attributes": ["kept"]})
    prepared(image())
    quantized = convert_fx(prepared, {"preserved_attributes": ["kept"]})
    for each in (prepared, copy.deepcopy(prepared), quantized, copy.deepcopy(quantized)):
        assert each.kept == 3


@pytest.mark.parametrize("keep", some([False, True]))
def test_remove_qconfig(keep: bool) -> None:
    """Quantized models have no QConfigs; modules that users keep whole have them until then."""
    model = nn.Sequential(nn.AvgPool2d(1), Turned())
    custom = {"non_traceable_module_class": [Turned]}
    prepared = prepare_fx(model.eval(), {"": default_qconfig}, (image(),), custom)
    prepared(image())
    quantized = convert_fx(prepared, _remove_qconfig=not keep)
    assert any(hasattr(module, "qconfig") for module in quantized.modules()) is keep


def test_save_observer_state_dict() -> None:
    model, x = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)), torch.randn(5, 5)
    first = run(model, {"": get_default_qconfig("fbgemm")}, x)
    file = io.BytesIO()
    torch.save(first.prepared.state_dict(), file)
    file.seek(0)
    second = prepare_fx(model.eval(), {"": get_default_qconfig("fbgemm")}, (x,))
    second.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(convert_fx(second)(x), first.quantized(x))


def test_quantized_model_type() -> None:
    one = run(nn.Sequential(nn.Linear(5, 5)), {"": default_qconfig}, torch.rand(8, 5))
    other = run(nn.Sequential(nn.Linear(5, 5)), {"": default_qconfig}, torch.rand(8, 5))
    x = one.inputs[0]
    assert torch.equal(copy.deepcopy(one.quantized)(x), one.quantized(x))
    other.quantized.load_state_dict(one.quantized.state_dict())
    assert torch.equal(other.quantized(x), one.quantized(x))
    assert torch.equal(convert_fx(copy.deepcopy(one.prepared))(x), one.quantized(x))


def test_state_dict() -> None:
    found = run(nn.Sequential(Given(), Given()), {"": default_qconfig}, torch.rand(5, 5))
    state = found.quantized.state_dict()
    stored = [value for value in state.values() if value.dtype is torch.int8]
    assert [tuple(value.shape) for value in stored] == [(5, 5), (5, 5)]
    assert "_extra_state" in state  # scales and zero points, with the ops they are of


def test_packed_weight_fused_op() -> None:
    class Behind(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
            out: Tensor = super().forward(input)  # type: ignore[no-untyped-call]
            return functional.relu(out)

    found = run(Behind(Given(), Given()), {"": default_qconfig}, torch.rand(5, 5)).check()
    assert found.kernels == ["linear", "linear"]
    assert "packed" in str(found.quantized.memory())


def test_trace_quantize_per_tensor() -> None:
    found = run(convs(1), {"": default_qconfig}, image())
    again: Any = fx.Transformer(found.quantized).transform()
    assert torch.equal(again(*found.inputs)[0], found.quantized(*found.inputs))


def test_stack_trace_preserved_linear() -> None:
    found = run(nn.Sequential(nn.Linear(1, 1)), get_default_qconfig_mapping(), torch.randn(2, 1))
    origin = found.prepared.program.origins.get(found.prepared.program.node("linear"))
    assert origin.module_path == "0"
    assert origin.source is not None


def test_observer_fqn() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Sequential(Given(), Given()), Given(), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.two(torch.add(self.one(x), 4))
            return self.three(torch.add(x, 2)), torch.mul(x, 5)

    prepared = prepare_fx(Several().eval(), {"": default_qconfig}, (torch.randn(1, 5),))
    names = [name for name, module in prepared.named_modules() if isinstance(module, MinMaxObserver)]
    assert names == [f"activation_post_process_{index}" for index in range(len(names))]
    assert {group.name for group in prepared.program.plan.groups} >= {"linear:out0", "linear_1:out0", "linear_2:out0"}


@pytest.mark.parametrize("trained", some([False, True]))
def test_copy_node_has_shared_actpp_instance(trained: bool) -> None:
    model, x = nn.Sequential(nn.AvgPool2d(3)), torch.randn(1, 3, 3, 3)
    found = run(model, {"": default_qat_qconfig if trained else default_qconfig}, x, qat=trained)
    kind = FakeQuantize if trained else MinMaxObserver
    called = [module for module in found.prepared.modules(remove_duplicate=False) if isinstance(module, kind)]
    assert len({id(each) for each in called}) == 1
    assert found.count("quantize_per_tensor.default") == 4  # what is read and what is yielded, to bytes and back


def test_linear_qint8_activation() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 2, 2), nn.Flatten(1), nn.Linear(8, 5))
    activation = MinMaxObserver.with_args(qscheme=torch.per_tensor_symmetric, dtype=torch.qint8)
    found = run(model, {"": QConfig(activation, default_weight_observer)}, torch.rand(2, 1, 5, 5)).check()
    assert found.left == []
    assert any(torch.int8 in node.args for node in found.reference.graph.nodes)


def test_dequantize() -> None:
    """An op that the flow leaves float reads float."""
    found = run(nn.Sequential(nn.Conv2d(1, 1, 1), nn.GELU()), {"": default_qconfig}, image()).check()
    assert (found.taken, found.left) == (["conv2d"], ["gelu"])
