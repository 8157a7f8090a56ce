"""The guide to FX graph mode, item by item: what it says of its functions holds here."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import CaptureError
from quantc.flows.fx import (
    PrepareCustomConfig,
    QConfigMapping,
    convert_fx,
    default_dynamic_qconfig,
    default_qconfig,
    float_qparams_weight_only_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
    prepare_fx,
    prepare_qat_fx,
)
from quantc.flows.fx.observed_module import ObservedGraphModule
from quantc.ir.types import tensor_type
from tests.support.fx_custom_modules import (
    DynamicQuantNonTraceable,
    FP32NonTraceable,
    M,
    ObservedNonTraceable,
    StaticQuantNonTraceable,
    WeightOnlyQuantNonTraceable,
    worst_error,
)
from tests.support.fx_models import Attention, model_and_data

SUBMODULE = "non_traceable_submodule"
STATIC_PREPARE = {"float_to_observed_custom_module_class": {"static": {FP32NonTraceable: ObservedNonTraceable}}}
STATIC_CONVERT = {
    "observed_to_quantized_custom_module_class": {"static": {ObservedNonTraceable: StaticQuantNonTraceable}}
}


@pytest.fixture
def model() -> M:
    torch.manual_seed(0)
    return M().eval()


@pytest.fixture
def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(6, 8) for _ in range(6)]


def quantized_ops(prepared: ObservedGraphModule) -> dict[str, str]:
    return {row.node: row.verdict for row in prepared.coverage().rows}


def test_1_1_a_traceable_module_becomes_a_graph(model: nn.Module) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    prepared = prepare_fx(layers, get_default_qconfig_mapping(), (torch.randn(2, 8),))
    assert isinstance(prepared, torch.fx.GraphModule)
    assert [entry.name for entry in prepared.program.log][:1] == ["capture (fx)"]
    passes = [entry.name.partition("{")[0] for entry in prepared.program.log]
    assert [name for name in passes if name in ("fuse", "annotate", "share")] == ["fuse", "annotate", "share"]


def test_1_2_only_the_traceable_part_is_quantized(model: nn.Module, batches: list[Tensor]) -> None:
    custom = {"non_traceable_module_name": [SUBMODULE]}
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (batches[0],), custom)
    assert quantized_ops(prepared) == {
        "linear": "quantized",
        "relu": "quantized",
        SUBMODULE: "float",
        "linear_1": "quantized",
    }


def test_1_3_control_flow_on_data_is_refused_by_name(model: nn.Module, batches: list[Tensor]) -> None:
    with pytest.raises(CaptureError) as caught:
        prepare_fx(model, get_default_qconfig_mapping(), (batches[0],))
    assert "depends on the data" in caught.value.what
    assert "fx_custom_modules.py" in (caught.value.where or "")


def test_1_4_the_options_combine(batches: list[Tensor]) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.named = M(), FP32NonTraceable()

        def forward(self, x: Tensor) -> Any:
            return self.part(self.named(x))

    torch.manual_seed(0)
    model = Whole().eval()
    original = copy.deepcopy(model)
    custom = {"non_traceable_module_class": [FP32NonTraceable]}  # 1b inside, 1a around it
    model.part = prepare_fx(model.part, get_default_qconfig_mapping(), (batches[0],), custom)  # type: ignore[assignment]
    for x in batches:
        model(x)
    model.part = convert_fx(model.part)  # type: ignore[assignment]
    assert worst_error(model, original, batches) < 0.05


def test_1_5_a_submodule_is_prepared_and_put_back(batches: list[Tensor]) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.traceable_submodule = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, x: Tensor) -> Any:
            x = x if float(x.sum()) > 0 else -x
            return self.traceable_submodule(x)

    torch.manual_seed(0)
    model_fp32 = Parent().eval()
    original = copy.deepcopy(model_fp32)
    prepared: Any = prepare_fx(model_fp32.traceable_submodule, get_default_qconfig_mapping(), (batches[0],))
    model_fp32.traceable_submodule = prepared
    for x in batches:
        model_fp32(x)
    quantized: Any = convert_fx(prepared)
    model_fp32.traceable_submodule = quantized
    assert all(row.kernel for row in quantized.placed)
    assert worst_error(model_fp32, original, batches) < 0.05
    model_fp32.eval().state_dict()


def test_1_6_and_1_7_a_mapping_for_everything(batches: list[Tensor]) -> None:
    qconfig = get_default_qconfig("x86")
    qconfig_mapping = QConfigMapping().set_global(qconfig)
    assert qconfig_mapping.global_qconfig == qconfig
    prepared = prepare_fx(nn.Sequential(nn.Linear(8, 4)).eval(), qconfig_mapping, (batches[0],))
    assert [name for name, _ in prepared.named_children() if "process" in name] == [
        "activation_post_process_0",
        "activation_post_process_1",
    ]


def test_1_8_the_model_is_not_changed(model: nn.Module, batches: list[Tensor]) -> None:
    before = copy.deepcopy(model.state_dict())
    modules = [type(module) for module in model.modules()]
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (batches[0],), STATIC_PREPARE)
    for x in batches:
        prepared(x)
    seen = copy.deepcopy(prepared.state_dict())
    convert_fx(prepared, STATIC_CONVERT)(batches[0])
    assert [type(module) for module in model.modules()] == modules
    assert not any(hasattr(module, "qconfig") for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, seen[name]) for name, value in prepared.state_dict().items() if value.numel())


@pytest.mark.parametrize(
    "custom",
    [
        pytest.param({"non_traceable_module_name": SUBMODULE}, id="1.13-a-bare-name"),
        pytest.param({"non_traceable_module_name": [SUBMODULE]}, id="1.9-by-name"),
        pytest.param({"non_traceable_module_class": [FP32NonTraceable]}, id="1.10-by-class"),
        pytest.param(
            {"non_traceable_module_name": SUBMODULE, "non_traceable_module_class": [FP32NonTraceable]}, id="1.11-both"
        ),
    ],
)
def test_1_9_to_1_13_modules_are_kept_whole(custom: dict[str, Any], model: nn.Module, batches: list[Tensor]) -> None:
    prepared = prepare_fx(
        model, get_default_qconfig_mapping(), (batches[0],), prepare_custom_config_dict=custom
    )  # 1.12: the keyword's spelling
    calls = [str(node.target) for node in prepared.graph.nodes if node.op == "call_module"]
    assert SUBMODULE in calls
    assert type(prepared.get_submodule(SUBMODULE)) is FP32NonTraceable
    for x in batches:
        prepared(x)
    assert worst_error(convert_fx(prepared), model, batches) < 0.05


def test_1_14_the_slips_of_the_guide_do_no_harm() -> None:
    on_the_class: Any = QConfigMapping.set_global
    assert on_the_class(default_qconfig) == QConfigMapping().set_global(default_qconfig)


def test_1_15_shapes_that_are_added_up() -> None:
    model, batches = model_and_data("attention")
    assert isinstance(model, Attention)
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (batches[0],))
    observed = [node.args[0] for node in prepared.graph.nodes if str(node.target).startswith("activation_post")]
    assert len(observed) > 10
    assert all(tensor_type(node) is not None for node in observed)  # and none of a shape
    for x in batches:
        prepared(x)
    quantized = convert_fx(prepared)
    assert worst_error(quantized, model, batches) < 0.05
    assert quantized(torch.randn(2, 9, 16)).shape == (2, 9, 16)  # another batch and length than the example


def test_custom_module_class(model: nn.Module, batches: list[Tensor]) -> None:
    """1.16 to 1.28 and 1.31: custom modules for static, dynamic and weight-only quantization, and for training."""
    prepared = prepare_fx(
        model, get_default_qconfig_mapping(), (batches[0],), prepare_custom_config_dict=STATIC_PREPARE
    )
    observed = prepared.get_submodule(SUBMODULE)
    assert type(observed) is ObservedNonTraceable
    for x in batches:
        prepared(x)
    assert observed.calls == len(batches)
    quantized = convert_fx(prepared, STATIC_CONVERT)
    inside = quantized.get_submodule(SUBMODULE)
    assert type(inside) is StaticQuantNonTraceable
    assert worst_error(quantized, model, batches) < 0.05
    assert set(inside.given) == {torch.quint8}
    assert torch.equal(copy.deepcopy(quantized)(batches[0]), quantized(batches[0]))


def test_1_17_dynamic_needs_no_observed_version(model: nn.Module, batches: list[Tensor]) -> None:
    prepared = prepare_fx(
        model,
        QConfigMapping().set_global(default_dynamic_qconfig),
        (batches[0],),
        prepare_custom_config_dict={"non_traceable_module_class": [FP32NonTraceable]},  # 1.25
    )
    convert_custom_config_dict = {
        "observed_to_quantized_custom_module_class": {"dynamic": {FP32NonTraceable: DynamicQuantNonTraceable}}  # 1.26
    }
    quantized = convert_fx(prepared, convert_custom_config_dict)  # 1.23: the second argument by position
    assert type(quantized.get_submodule(SUBMODULE)) is DynamicQuantNonTraceable  # 1.28: by from_observed
    assert worst_error(quantized, model, batches) < 0.05


def test_1_18_from_float_is_given_the_float_module(model: nn.Module, batches: list[Tensor]) -> None:
    given: list[nn.Module] = []

    class Observed(ObservedNonTraceable):
        @classmethod
        def from_float(cls, float_module: FP32NonTraceable) -> Any:
            given.append(float_module)
            return super().from_float(float_module)

    custom = {"float_to_observed_custom_module_class": {"static": {FP32NonTraceable: Observed}}}  # 1.20
    prepare_fx(model, get_default_qconfig_mapping(), (batches[0],), custom)
    assert [type(module) for module in given] == [FP32NonTraceable]
    assert given[0] is not model.get_submodule(SUBMODULE)


def test_1_19_from_observed_is_given_the_observed_module(model: nn.Module, batches: list[Tensor]) -> None:
    given: list[nn.Module] = []

    class Quantized(StaticQuantNonTraceable):
        @classmethod
        def from_observed(cls, observed_module: ObservedNonTraceable) -> Any:
            given.append(observed_module)
            return super().from_observed(observed_module)

    prepared = prepare_fx(model, get_default_qconfig_mapping(), (batches[0],), STATIC_PREPARE)
    for x in batches:
        prepared(x)
    custom = {"observed_to_quantized_custom_module_class": {"static": {ObservedNonTraceable: Quantized}}}  # 1.24
    convert_fx(prepared, custom)
    assert [type(module) for module in given] == [ObservedNonTraceable]


def test_1_21_the_same_entry_serves_training(model: nn.Module, batches: list[Tensor]) -> None:
    prepared = prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping(), (batches[0],), STATIC_PREPARE)
    assert type(prepared.get_submodule(SUBMODULE)) is ObservedNonTraceable
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    losses = []
    for x in batches * 4:
        loss = (prepared(x) - x[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-6:]) < sum(losses[:6])
    quantized = convert_fx(prepared.eval(), STATIC_CONVERT)
    assert type(quantized.get_submodule(SUBMODULE)) is StaticQuantNonTraceable
    assert worst_error(quantized, prepared, batches) < 0.1


def test_1_22_calibrating_is_what_convert_goes_by(batches: list[Tensor]) -> None:
    layers = nn.Sequential(nn.Linear(8, 4)).eval()
    prepared = prepare_fx(layers, get_default_qconfig_mapping(), (batches[0],))
    for x in batches:
        prepared(x)
    small = convert_fx(prepared)
    for x in batches:
        prepared(8 * x)
    wide = convert_fx(prepared)
    scale = [q.program.plan.qparams["linear:in0"].scale for q in (small, wide)]
    assert 4 < float(scale[1] / scale[0]) < 12


def test_1_27_weight_only_has_a_key(model: nn.Module, batches: list[Tensor]) -> None:
    mapping = QConfigMapping().set_global(float_qparams_weight_only_qconfig)
    custom = {"non_traceable_module_class": [FP32NonTraceable]}
    prepared = prepare_fx(model, mapping, (batches[0],), custom)
    swaps = {"weight_only": {FP32NonTraceable: WeightOnlyQuantNonTraceable}}
    quantized = convert_fx(prepared, {"observed_to_quantized_custom_module_class": swaps})
    assert type(quantized.get_submodule(SUBMODULE)) is WeightOnlyQuantNonTraceable
    assert worst_error(quantized, model, batches) < 0.02


def test_1_29_the_model_is_in_eval_mode_before_prepare(batches: list[Tensor]) -> None:
    from quantc.errors import ModeError

    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with pytest.raises(ModeError, match="training mode"):
        prepare_fx(layers, get_default_qconfig_mapping(), (batches[0],))
    prepare_fx(layers.eval(), get_default_qconfig_mapping(), (batches[0],))


class ObservedLSTM(nn.Module):
    """An LSTM written out step by step, so that each product and each state can be observed."""

    qconfig: Any

    def __init__(self, lstm: nn.LSTM, qconfig: Any) -> None:
        super().__init__()
        self.qconfig = qconfig
        self.w_ih, self.w_hh, self.b_ih, self.b_hh = lstm.all_weights[0]
        self.gates, self.state = qconfig.activation(), qconfig.activation()

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h = c = x.new_zeros(x.shape[0], self.w_hh.shape[1])
        outputs = []
        for step in range(x.shape[1]):
            ih = nn.functional.linear(x[:, step], self.w_ih, self.b_ih)
            gates = self.gates(ih + nn.functional.linear(h, self.w_hh, self.b_hh))
            i, f, g, o = gates.chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = self.state(torch.sigmoid(o) * torch.tanh(c))
            outputs.append(h)
        return torch.stack(outputs, dim=1), (h[None], c[None])

    @classmethod
    def from_float(cls, float_module: nn.LSTM) -> ObservedLSTM:
        return cls(float_module, float_module.qconfig)


class QuantizedLSTM(nn.Module):
    """The same on the scales that were observed: every product reads bytes."""

    def __init__(self, observed: ObservedLSTM) -> None:
        super().__init__()
        self.gates, self.state = (
            tuple(float(value) for value in observer.calculate_qparams())
            for observer in (observed.gates, observed.state)
        )
        self.biases = observed.b_ih.detach(), observed.b_hh.detach()
        weights = (observed.w_ih.detach(), observed.w_hh.detach())
        steps = [weight.abs().amax() / 127 for weight in weights]
        self.weights = [(weight / step).round() * step for weight, step in zip(weights, steps, strict=True)]

    @staticmethod
    def _on(grid: tuple[float, ...], x: Tensor) -> Tensor:
        return torch.quantize_per_tensor(x, grid[0], int(grid[1]), torch.quint8).dequantize()

    def forward(self, x: Tensor) -> Any:
        assert x.dtype is torch.quint8
        x = x.dequantize()
        h = c = x.new_zeros(x.shape[0], self.weights[1].shape[1])
        outputs = []
        for step in range(x.shape[1]):
            ih = nn.functional.linear(x[:, step], self.weights[0], self.biases[0])
            gates = self._on(self.gates, ih + nn.functional.linear(h, self.weights[1], self.biases[1]))
            i, f, g, o = gates.chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = self._on(self.state, torch.sigmoid(o) * torch.tanh(c))
            outputs.append(h)
        return torch.stack(outputs, dim=1), (h[None], c[None])

    @classmethod
    def from_observed(cls, observed_module: ObservedLSTM) -> QuantizedLSTM:
        return cls(observed_module)


def test_1_30_an_lstm_as_a_custom_module() -> None:
    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.head = nn.Linear(4, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            y, _ = self.lstm(torch.relu(self.embed(x)))
            return self.head(y)

    torch.manual_seed(0)
    model = Sequences().eval()
    batches = [torch.randn(3, 5, 4) for _ in range(4)]
    prepared = prepare_fx(
        model,
        get_default_qconfig_mapping("qnnpack"),
        (batches[0],),
        PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, ObservedLSTM),
    )
    for x in batches:
        prepared(x)
    custom = {"observed_to_quantized_custom_module_class": {"static": {ObservedLSTM: QuantizedLSTM}}}
    quantized = convert_fx(prepared, custom)
    assert type(quantized.get_submodule("lstm")) is QuantizedLSTM
    assert worst_error(quantized, model, batches) < 0.05


def test_1_32_traceable_and_opaque_code_alternate(batches: list[Tensor]) -> None:
    class Alternating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
            self.a, self.b = FP32NonTraceable(), FP32NonTraceable()

        def forward(self, x: Tensor) -> Any:
            x = self.a(torch.relu(self.first(x)))
            x = self.b(torch.relu(self.second(x)))
            return self.third(x)

    torch.manual_seed(0)
    model = Alternating().eval()
    custom = {"non_traceable_module_class": FP32NonTraceable}
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (batches[0],), custom)
    verdicts = quantized_ops(prepared)
    assert [verdicts[name] for name in ("linear", "linear_1", "linear_2")] == ["quantized"] * 3
    for x in batches:
        prepared(x)
    prepared(batches[0][:2])  # a batch of another size than the example
    quantized = convert_fx(prepared)
    assert sum(row.op == "linear" and bool(row.kernel) for row in quantized.placed) == 3
    assert worst_error(quantized, model, batches) < 0.1
