"""The FX flow: what prepared and quantized modules are like, and what is refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.backends.qnnpack import QNNPACK
from quantc.backends.x86 import X86
from quantc.errors import CalibrationError, ConfigError, DataError, InputError, ModeError, QuantcError, SaveError
from quantc.flows.fx import (
    ConvertCustomConfig,
    PrepareCustomConfig,
    QConfig,
    QConfigMapping,
    QuantizedGraphModule,
    convert_fx,
    convert_to_reference_fx,
    default_dynamic_qconfig,
    fuse_fx,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
    prepare_fx,
    prepare_qat_fx,
)
from quantc.flows.fx.fuse import UnfusedWarning
from quantc.flows.fx.observed_module import ObservedGraphModule
from quantc.flows.observers import (
    HistogramObserver,
    MinMaxObserver,
    PlaceholderObserver,
    default_fixed_qparams_range_0to1_observer,
    default_weight_observer,
)
from tests.support.fx_custom_modules import DynamicQuantNonTraceable, FP32NonTraceable, M
from tests.support.fx_models import Classifier, model_and_data


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(6, 8) for _ in range(4)]


def prepared_layers(custom: Any = None, mapping: Any = None) -> ObservedGraphModule:
    mapping = get_default_qconfig_mapping() if mapping is None else mapping
    prepared = prepare_fx(layers(), mapping, (batches()[0],), custom)
    for x in batches():
        prepared(x)
    return prepared


# -- prepared modules --------------------------------------------------------------------------------------------------


def test_a_prepared_model_computes_what_the_model_does() -> None:
    prepared, model = prepared_layers(), layers()
    assert torch.equal(prepared(batches()[0]), model(batches()[0]))
    observers = {name: module for name, module in prepared.named_children() if name.startswith("activation_post")}
    assert list(observers) == [f"activation_post_process_{number}" for number in range(3)]
    assert all(isinstance(module, HistogramObserver) for module in observers.values())
    assert {"0.weight", "0.bias", "2.weight", "activation_post_process_0.min_val"} <= set(prepared.state_dict())


def test_copies_are_independent() -> None:
    prepared = prepared_layers()
    before = prepared.activation_post_process_0.max_val.clone()
    twin = copy.deepcopy(prepared)
    twin(100 * batches()[0])
    assert torch.equal(prepared.activation_post_process_0.max_val, before)
    assert float(twin.activation_post_process_0.max_val) > 50
    twin.get_parameter("0.weight").data.zero_()
    assert float(prepared.get_parameter("0.weight").abs().max()) > 0
    convert_fx(twin)


def test_a_state_dict_carries_a_calibration() -> None:
    prepared = prepared_layers()
    fresh = prepare_fx(layers(), get_default_qconfig_mapping(), (batches()[0],))
    fresh.load_state_dict(prepared.state_dict())
    x = batches()[0]
    assert torch.equal(convert_fx(fresh)(x), convert_fx(prepared)(x))


def test_what_is_put_in_the_place_of_an_observer_or_weight_counts() -> None:
    prepared = prepared_layers()
    prepared.activation_post_process_0 = HistogramObserver()
    prepared.activation_post_process_0(50 * batches()[0])
    assert float(convert_fx(prepared).program.plan.qparams["linear:in0"].scale) > 0.5
    holder: Any = prepared.get_submodule("2")
    holder.weight = nn.Parameter(torch.zeros(4, 16))
    made = convert_fx(prepared)(batches()[0])
    assert float((made - layers()[2].bias).abs().max()) < 0.02  # type: ignore[index]


def test_batches_of_any_size_calibrate() -> None:
    model, _ = model_and_data("classifier")
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (torch.randn(2, 3, 16, 16),))
    for shape in ((1, 3, 16, 16), (5, 3, 24, 20)):
        prepared(torch.randn(shape))
    assert convert_fx(prepared)(torch.randn(3, 3, 18, 18)).shape == (3, 5)
    with pytest.raises(InputError, match="size 4 in dimension 1"):
        prepared(torch.randn(2, 4, 16, 16))


def test_arguments_may_be_given_by_name() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, left: Tensor, right: Tensor) -> Any:
            return self.linear(left) + right

    model, (x, y) = Two().eval(), batches()[:2]
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (x, y))
    assert torch.equal(prepared(right=y, left=x), prepared(x, right=y))
    quantized = convert_fx(prepared)
    assert torch.equal(quantized(x, right=y), quantized(x, y))
    with pytest.raises(InputError):
        prepared(x, wrong=y)


def test_what_was_given_may_change_afterwards() -> None:
    mapping, custom = get_default_qconfig_mapping(), PrepareCustomConfig()
    prepared = prepared_layers(custom, mapping)
    mapping.set_global(None)
    custom.set_output_quantized_indexes(0)
    assert convert_fx(prepared)(batches()[0]).dtype is torch.float32


def test_coverage_says_what_is_float_and_why() -> None:
    mapping = get_default_qconfig_mapping().set_module_name("2", None)
    rows = {row.node: row for row in prepared_layers(mapping=mapping).coverage().rows}
    assert {name: row.verdict for name, row in rows.items()} == {
        "linear": "quantized",
        "relu": "quantized",
        "linear_1": "float",
    }
    assert "the QConfigMapping has nothing for it" in rows["linear_1"].reason


def test_a_prepared_model_is_not_pickled() -> None:
    with pytest.raises(SaveError, match="not pickled"):
        pickle.dumps(prepared_layers())


# -- quantized modules -------------------------------------------------------------------------------------------------


def test_it_runs_on_kernels_of_the_engine_that_torch_is_set_to(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepared_layers()
    assert convert_fx(prepared).target == "x86"
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    on_qnnpack = convert_fx(prepared)
    assert on_qnnpack.target == "qnnpack"
    assert all(row.kernel for row in on_qnnpack.placed)


def test_a_quantized_model_is_copied_saved_and_loaded(tmp_path: Path) -> None:
    quantized, x = convert_fx(prepared_layers()), batches()[0]
    expected = quantized(x)
    assert isinstance(quantized, QuantizedGraphModule)
    assert torch.equal(copy.deepcopy(quantized)(x), expected)
    quantized.save(tmp_path / "model.qc")
    assert torch.equal(qc.load(tmp_path / "model.qc")(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(quantized))(x), expected)  # noqa: S301 - our own
    other = convert_fx(prepared_layers())
    other.load_state_dict(quantized.state_dict())
    assert torch.equal(other(x), expected)
    assert all(value.dtype is not torch.float32 or value.dim() < 2 for value in quantized.state_dict().values())


def test_the_reference_is_in_q_dq_form() -> None:
    prepared, x = prepared_layers(), batches()[0]
    reference = convert_to_reference_fx(prepared)
    targets = [str(node.target) for node in reference.graph.nodes]
    assert sum("quantized_decomposed.quantize_per_tensor" in target for target in targets) == 3
    assert not any(target.startswith("activation_post_process") for target in targets)
    step = float(prepared.activation_post_process_2.calculate_qparams()[0])
    assert float((reference(x) - convert_fx(prepared)(x)).abs().max()) <= 1.01 * step


def test_quantized_weights_take_a_quarter() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 256)).eval(), torch.randn(4, 256)
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (x,))
    prepared(x)
    quantized = convert_fx(prepared)
    assert quantized.memory().share < 0.27


def test_attributes_are_preserved() -> None:
    model: Any = layers()
    model.version, model.labels = 3, ["a", "b"]
    custom = PrepareCustomConfig().set_preserved_attributes(["version", "labels"])
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (batches()[0],), custom)
    assert (prepared.version, copy.deepcopy(prepared).labels) == (3, ["a", "b"])
    prepared(batches()[0])
    quantized = convert_fx(prepared, ConvertCustomConfig().set_preserved_attributes(["version"]))
    assert (quantized.version, copy.deepcopy(quantized).labels) == (3, ["a", "b"])
    with pytest.raises(AttributeError):
        quantized.missing  # noqa: B018


def test_inputs_and_outputs_that_are_quantized_tensors() -> None:
    prepared = prepared_layers({"input_quantized_idxs": [0], "output_quantized_idxs": [0]})
    quantized, x = convert_fx(prepared), batches()[0]
    scale, zero_point = prepared.activation_post_process_0.calculate_qparams()
    given = torch.quantize_per_tensor(x, float(scale), int(zero_point), torch.quint8)
    made = quantized(given)
    assert made.dtype is torch.quint8
    assert made.q_scale() == pytest.approx(float(prepared.activation_post_process_2.calculate_qparams()[0]))
    assert torch.equal(made.dequantize(), convert_fx(prepared_layers())(given.dequantize()))
    assert torch.equal(copy.deepcopy(quantized)(given).int_repr(), made.int_repr())
    with pytest.raises(InputError, match="input 0 is not a quantized tensor"):
        quantized(x)


def test_an_output_that_is_float_is_not_given_quantized() -> None:
    mapping = get_default_qconfig_mapping().set_module_name("2", None)
    with pytest.raises(ConfigError, match="output 0 is not quantized"):
        convert_fx(prepared_layers({"output_quantized_idxs": 0}, mapping))


@pytest.mark.parametrize("backend", [X86, QNNPACK], ids=["x86", "qnnpack"])
@pytest.mark.parametrize("name", ["classifier", "attention"])
def test_another_table_may_be_given(name: str, backend: Backend) -> None:
    model, data = model_and_data(name)
    prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (data[0],), backend_config=backend)
    for x in data:
        prepared(x)
    with torch.no_grad():
        exact = model(data[0])
        assert float((convert_fx(prepared)(data[0]) - exact).abs().max()) < 0.05 * float(exact.abs().max())
    assert {row.quantizer for row in prepared.coverage().rows if row.verdict == "quantized"} == {backend.name}


def test_a_qconfig_that_leaves_weights_float_quantizes_no_layer_with_weights() -> None:
    mapping = QConfigMapping().set_global(QConfig(HistogramObserver, PlaceholderObserver))
    prepared = prepared_layers(mapping=mapping)
    rows = {row.node: row for row in prepared.coverage().rows}
    assert (rows["linear"].verdict, rows["relu"].verdict) == ("float", "quantized")
    assert "leaves weights float" in rows["linear"].reason
    assert torch.equal(convert_to_reference_fx(prepared).get_parameter("0.weight"), layers()[0].weight)  # type: ignore[index]


def test_an_activation_goes_with_the_layer_it_is_fused_into() -> None:
    signed = QConfig(MinMaxObserver.with_args(dtype=torch.qint8), default_weight_observer)
    mapping = get_default_qconfig_mapping().set_object_type(nn.ReLU, signed)
    prepared, x = prepared_layers(mapping=mapping), batches()[0]
    assert isinstance(prepared.activation_post_process_1, HistogramObserver)
    assert float((convert_fx(prepared)(x) - layers()(x)).detach().abs().max()) < 0.05


def test_a_known_range_says_nothing_of_what_is_read() -> None:
    fixed = QConfig(default_fixed_qparams_range_0to1_observer, default_weight_observer)
    mapping = QConfigMapping().set_object_type(nn.Sigmoid, fixed)
    model, x = nn.Sequential(nn.Sigmoid()).eval(), 4 * batches()[0]
    prepared = prepare_fx(model, mapping, (x,))
    prepared(x)
    assert float((convert_fx(prepared)(x) - model(x)).abs().max()) <= 1.01 / 256


def test_sums_that_a_processor_would_cut_off_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales are for 7 bits, but what lies beyond takes the eighth: on AVX2 two products may then leave 16 bits."""
    prepared = prepared_layers()
    monkeypatch.setattr("quantc.targets.kernels.saturation.instruction_set_here", lambda: "avx2")
    with pytest.warns(UserWarning, match="sums can saturate in linear"):
        convert_fx(prepared)
    safe = prepare_fx(layers(), get_default_qconfig_mapping("x86"), (batches()[0],), backend_config=X86)
    for x in batches():
        safe(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_fx(safe)


# -- modules that are kept whole ---------------------------------------------------------------------------------------


def test_standalone_modules_are_prepared_on_their_own() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.alone = nn.Linear(8, 8), layers()

        def forward(self, x: Tensor) -> Any:
            return self.alone(self.first(x))

    model, x = Outer().eval(), batches()[0]
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    by_name = PrepareCustomConfig().set_standalone_module_name("alone", mapping, (x,))
    by_class = {"standalone_module_class": [(nn.Sequential, mapping, (x,), None, None)]}
    for custom in (by_name, by_class):
        prepared = prepare_fx(model, get_default_qconfig_mapping(), (x,), custom)
        assert isinstance(prepared.alone, ObservedGraphModule)
        for batch in batches():
            prepared(batch)
        quantized = convert_fx(prepared)
        assert isinstance(quantized.alone, QuantizedGraphModule)
        assert [row.verdict for row in prepared.alone.coverage().rows if row.op == "linear"] == ["quantized"] * 2
        assert {row.technique for row in prepared.alone.coverage().rows if row.op == "linear"} == {"dynamic"}
        assert float((quantized(x) - model(x)).abs().max()) < 0.05
        assert torch.equal(copy.deepcopy(quantized)(x), quantized(x))


def test_a_module_that_is_kept_whole_must_not_write_to_its_inputs() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x.add_(1) if float(x.sum()) > -1e9 else x

    model = nn.Sequential(nn.Linear(8, 8), Writes(), nn.Linear(8, 8)).eval()
    custom = {"non_traceable_module_class": Writes}
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (batches()[0],), custom)
    with torch.no_grad(), pytest.raises(DataError, match="1 is kept whole and writes to a tensor"):
        prepared(batches()[0])


def test_a_module_that_is_kept_whole_must_grow_with_the_batch() -> None:
    class Fickle(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x[: max(1, x.shape[0] - 1)] if float(x.sum()) > 1e6 else x * 1.0

    model = nn.Sequential(Fickle(), nn.Linear(8, 8)).eval()
    custom = {"non_traceable_module_class": Fickle}
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (batches()[0],), custom)
    prepared(torch.randn(11, 8))
    with pytest.raises(InputError, match=r"gave \[\[5, 8\]\], where \[\[6, 8\]\] was expected"):
        prepared(1e6 * batches()[0].abs())


def test_a_kind_that_a_custom_module_has_no_version_for_is_refused() -> None:
    custom = {"non_traceable_module_class": [FP32NonTraceable]}
    prepared = prepare_fx(M().eval(), get_default_qconfig_mapping(), (batches()[0],), custom)
    for x in batches():
        prepared(x)
    swaps = {"dynamic": {FP32NonTraceable: DynamicQuantNonTraceable}}
    with pytest.raises(ConfigError, match="there is a dynamic version, and its QConfig is static"):
        convert_fx(prepared, {"observed_to_quantized_custom_module_class": swaps})


# -- fusing and training -----------------------------------------------------------------------------------------------


def test_fusing_alone() -> None:
    model, data = model_and_data("classifier")
    fused = fuse_fx(model, {"preserved_attributes": ["training"]})
    assert not any("batch_norm" in str(node.target) for node in fused.graph.nodes)
    assert torch.allclose(fused(data[0]), model(data[0]), atol=1e-5)
    assert isinstance(model, Classifier)
    assert isinstance(model.norm, nn.BatchNorm2d)
    with pytest.raises(ModeError, match="for inference"):
        fuse_fx(model.train())


def test_fusing_says_what_it_cannot_know() -> None:
    model, data = model_and_data("waves")  # BatchNorm1d takes two axes or three
    with pytest.warns(UnfusedWarning, match="not folded: batch_norm"):
        fuse_fx(model)
    fused = fuse_fx(model, example_inputs=(data[0],))
    assert not any("batch_norm" in str(node.target) for node in fused.graph.nodes)
    assert torch.allclose(fused(data[1]), model(data[1]), atol=1e-5)


def test_training_trains_and_converts() -> None:
    model, data = model_and_data("classifier")
    prepared = prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping(), (data[0],))
    assert prepared.training
    optimizer = torch.optim.Adam(prepared.parameters(), lr=0.02)
    target = torch.tensor([0.1, 0.9, 0.1, 0.9, 0.5])
    losses = []
    for x in data * 6:
        loss = (prepared(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    prepared.eval()
    twin = copy.deepcopy(prepared)
    with torch.no_grad():
        quantized = convert_fx(prepared)
        assert float((quantized(data[0]) - twin(data[0])).abs().max()) <= 2.1 / 256
    assert all(row.kernel for row in quantized.placed)


def test_training_needs_data_before_it_is_converted() -> None:
    model, data = model_and_data("perceptron")
    prepared = prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping(), (data[0],))
    with pytest.raises(QuantcError, match="not trained"):
        convert_fx(prepared)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_model_that_was_not_calibrated_is_not_converted() -> None:
    prepared = prepare_fx(layers(), get_default_qconfig_mapping(), (batches()[0],))
    with pytest.raises(CalibrationError, match="3 observers have seen no data") as caught:
        convert_fx(prepared)
    assert "activation_post_process_0" in (caught.value.where or "")


PREPARE: Any = prepare_fx
CONVERT: Any = convert_fx
REFERENCE: Any = convert_to_reference_fx
FUSE: Any = fuse_fx


@pytest.mark.parametrize(
    "call",
    [
        lambda p: PREPARE(layers(), "x86", (batches()[0],)),
        lambda p: PREPARE(layers(), get_default_qconfig_mapping(), 3),
        lambda p: PREPARE(layers(), get_default_qconfig_mapping(), (batches()[0],), "custom"),
        lambda p: PREPARE(layers(), get_default_qconfig_mapping(), (batches()[0],), {}, prepare_custom_config_dict={}),
        lambda p: PREPARE(layers(), get_default_qconfig_mapping(), (batches()[0],), None, {"": None}),
        lambda p: PREPARE(layers(), get_default_qconfig_mapping(), (batches()[0],), backend_config="x86"),
        lambda p: CONVERT(layers()),
        lambda p: CONVERT(p, _remove_qconfig=1),
        lambda p: CONVERT(p, keep_original_weights="no"),
        lambda p: CONVERT(p, qconfig_mapping=QConfigMapping()),
        lambda p: CONVERT(p, ["custom"]),
        lambda p: REFERENCE(p, _remove_qconfig=None),
        lambda p: FUSE(layers(), 3),
    ],
)
def test_arguments_of_the_wrong_type_are_value_errors(call: Any) -> None:
    prepared = prepared_layers()
    with pytest.raises(ValueError, match=r"\w") as caught:
        call(prepared)
    assert isinstance(caught.value, ConfigError)
