"""BackendConfig as a front end to rule tables: its classes, how they are read, and that torch's are read alike."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.ao.quantization.backend_config.utils
    from torch.ao.nn import intrinsic
    from torch.ao.quantization import backend_config as torchs

from quantc.flows.fx import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    MatchAllNode,
    ObservationType,
    QConfig,
    QConfigMapping,
    convert_fx,
    convert_to_reference_fx,
    default_dynamic_qconfig,
    default_qconfig,
    fuse_fx,
    get_default_qconfig,
    get_default_qconfig_mapping,
    prepare_fx,
)
from quantc.flows.fx.backend_config_rules import translate_backend_config
from quantc.flows.fx.custom_config import CustomConfigError
from quantc.flows.observers import FixedQParamsObserver, MinMaxObserver, ReuseInputObserver
from quantc.flows.qconfig import get_default_qat_qconfig
from tests.support.fx_behaviours import some
from tests.support.fx_models import model_and_data

pytestmark = pytest.mark.filterwarnings("ignore")

BYTES = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
PLAIN = DTypeConfig(torch.quint8, torch.quint8)
SHARED = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT


def one(pattern: Any, *dtypes: DTypeConfig, **rest: Any) -> BackendConfig:
    config = BackendPatternConfig(pattern).set_dtype_configs(dtypes or [BYTES])
    for name, value in rest.items():
        getattr(config, f"set_{name}")(value)
    return BackendConfig("own").set_backend_pattern_config(config)


def verdicts(model: nn.Module, config: Any, qconfig: Any, *inputs: Tensor) -> dict[str, tuple[str, str]]:
    mapping = qconfig if isinstance(qconfig, QConfigMapping) else QConfigMapping().set_global(qconfig)
    prepared = prepare_fx(model.eval(), mapping, inputs, backend_config=config)
    prepared(*inputs)
    quantized = convert_fx(prepared, backend_config=config)
    worst = (quantized(*inputs) - model(*inputs)).abs().max()
    assert float(worst) < 0.3
    return {row.op: (row.verdict.value, row.reason) for row in prepared.coverage().rows}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# -- the classes -------------------------------------------------------------------------------------------------------


def test_dtype_configs_have_a_dict_form() -> None:
    bound = DTypeWithConstraints(torch.quint8, 0, 31, 2**-12)
    config = DTypeConfig(bound, torch.quint8, torch.qint8, torch.float, is_dynamic=False)
    assert (config.input_dtype, config.output_dtype, config.weight_dtype) == (torch.quint8, torch.quint8, torch.qint8)
    assert config.input_dtype_with_constraints is bound
    assert DTypeConfig.from_dict(config.to_dict()) == config
    assert DTypeConfig.from_dict({"input_dtype": torch.quint8}).to_dict() == {
        "input_dtype": DTypeWithConstraints(torch.quint8)
    }
    with pytest.raises(CustomConfigError, match="no key 'typo'"):
        DTypeConfig.from_dict({"typo": 1})
    with pytest.raises(CustomConfigError, match="input_dtype is 'quint8'"):
        DTypeConfig("quint8")  # type: ignore[arg-type]


def test_pattern_configs_have_setters_and_a_dict_form() -> None:
    config = (
        BackendPatternConfig((nn.Conv2d, nn.ReLU))
        .set_observation_type(SHARED)
        .add_dtype_config(BYTES)
        .add_dtype_config(PLAIN)
        .set_root_module(nn.Conv2d)
        .set_qat_module(nn.Conv2d)
        .set_reference_quantized_module(nn.Conv2d)
        .set_fused_module(intrinsic.ConvReLU2d)
        .set_fuser_method(intrinsic.ConvReLU2d)
        ._set_root_node_getter(len)
        ._set_extra_inputs_getter(len)
        ._set_num_tensor_args_to_observation_type({1: SHARED})
        ._set_input_type_to_index({"weight": 1})
    )
    data = config.to_dict()
    assert data["pattern"] == (nn.Conv2d, nn.ReLU)
    assert data["dtype_configs"] == [BYTES.to_dict(), PLAIN.to_dict()]
    assert BackendPatternConfig.from_dict(data).to_dict() == data
    assert "pattern=" in repr(config)
    assert config.set_dtype_configs([PLAIN]).dtype_configs == [PLAIN]
    with pytest.raises(CustomConfigError, match="two patterns"):
        config._set_pattern_complex_format(nn.ReLU)
    with pytest.raises(CustomConfigError, match="unknown observation type"):
        config.set_observation_type("shared")  # type: ignore[arg-type]
    nested = BackendPatternConfig()._set_pattern_complex_format((nn.ReLU, nn.Conv2d))
    assert BackendPatternConfig.from_dict(nested.to_dict()).to_dict() == nested.to_dict()


def test_backend_configs_replace_a_pattern_that_is_set_again() -> None:
    first, second = BackendPatternConfig(nn.Linear), BackendPatternConfig(nn.Linear).add_dtype_config(BYTES)
    config = BackendConfig("one").set_backend_pattern_configs([first, BackendPatternConfig(nn.ReLU)])
    assert config.set_name("two").name == "two"
    assert config.set_backend_pattern_config(second).configs[0] is second
    assert [each.pattern for each in config.configs] == [nn.Linear, nn.ReLU]
    assert BackendConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert BackendConfig.from_dict({"configs": [second]}).configs == [second]
    with pytest.raises(CustomConfigError, match="configs holds 3"):
        config.set_backend_pattern_config(3)  # type: ignore[arg-type]


# -- what becomes of them ----------------------------------------------------------------------------------------------


class Two(nn.Module):
    """A layer, and the same as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(torch.relu(self.layer(x)), self.weight)


def quantized_nodes(model: nn.Module, config: Any, x: Tensor) -> set[str]:
    prepared = prepare_fx(model.eval(), {"": default_qconfig}, (x,), backend_config=config)
    return {row.node for row in prepared.coverage().rows if row.verdict.value == "quantized"}


def test_a_pattern_is_about_a_layer_or_a_function() -> None:
    x = torch.randn(2, 4)
    assert quantized_nodes(Two(), one(nn.Linear), x) == {"linear"}
    assert quantized_nodes(Two(), one(functional.linear), x) == {"linear_1"}
    assert quantized_nodes(Two(), one((nn.Linear, torch.relu)), x) == {"linear", "relu"}
    assert quantized_nodes(Two(), one((nn.Linear, nn.ReLU)), x) == set()
    prepared = prepare_fx(Two().eval(), {"": default_qconfig}, (x,), backend_config=one(nn.Linear))
    reasons = [row.reason for row in prepared.coverage().rows if row.node == "linear_1"]
    assert "the backend config has no pattern for the function linear" in reasons[0]


BOUND = DTypeConfig(
    DTypeWithConstraints(torch.quint8, 0, 31),
    DTypeWithConstraints(torch.quint8, 0, 31),
    DTypeWithConstraints(torch.qint8, -64, 63),
    torch.float,
)
LEAST = DTypeConfig(
    DTypeWithConstraints(torch.quint8, scale_min_lower_bound=2**-12),
    DTypeWithConstraints(torch.quint8, scale_min_lower_bound=2**-12),
    DTypeWithConstraints(torch.qint8, scale_min_lower_bound=2**-12),
    torch.float,
)


def observer(dtype: torch.dtype = torch.quint8, **keywords: Any) -> Any:
    symmetric = {"qscheme": torch.per_tensor_symmetric} if dtype is torch.qint8 else {}
    return MinMaxObserver.with_args(dtype=dtype, **symmetric, **keywords)


FIXED = FixedQParamsObserver.with_args(scale=1.0, zero_point=0)
ASKED: dict[str, tuple[DTypeConfig, QConfig, str]] = {
    "inside the range": (
        BOUND,
        QConfig(observer(quant_min=0, quant_max=15), observer(torch.qint8, quant_min=-32, quant_max=31)),
        "",
    ),
    "activations beyond it": (BOUND, QConfig(observer(quant_min=0, quant_max=63), observer(torch.qint8)), "0..31"),
    "weights beyond it": (
        BOUND,
        QConfig(observer(quant_min=0, quant_max=15), observer(torch.qint8, quant_min=-128, quant_max=127)),
        "-64..63",
    ),
    "no range": (BOUND, QConfig(ReuseInputObserver, ReuseInputObserver), "QConfig"),
    "the least scale": (LEAST, QConfig(observer(eps=2**-12), observer(torch.qint8, eps=2**-12)), ""),
    "a larger one": (LEAST, QConfig(observer(eps=2**-10), observer(torch.qint8, eps=2**-10)), ""),
    "activations below it": (LEAST, QConfig(observer(eps=2**-14), observer(torch.qint8, eps=2**-10)), "at least"),
    "weights below it": (LEAST, QConfig(observer(eps=2**-10), observer(torch.qint8, eps=2**-14)), "at least"),
    "no scale": (LEAST, QConfig(FIXED, observer(torch.qint8, eps=2**-10)), "at least"),
    "another dtype": (BYTES, QConfig(observer(torch.qint8), observer(torch.qint8)), "torch.quint8, not torch.qint8"),
    "run-time scales": (BYTES, default_dynamic_qconfig, "dynamic"),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_qconfig_is_taken_if_it_keeps_to_the_formats_of_the_pattern(name: str) -> None:
    dtypes, qconfig, why = ASKED[name]
    verdict, reason = verdicts(nn.Sequential(nn.Linear(30, 4)), one(nn.Linear, dtypes), qconfig, torch.rand(2, 30))[
        "linear"
    ]
    assert verdict == ("float" if why else "quantized")
    assert why in reason


def test_dynamic_formats_take_dynamic_qconfigs() -> None:
    dynamic = DTypeConfig(torch.quint8, torch.float, torch.qint8, torch.float, is_dynamic=True)
    x = torch.rand(2, 30)
    found = verdicts(nn.Sequential(nn.Linear(30, 4)), one(nn.Linear, BYTES, dynamic), default_dynamic_qconfig, x)
    assert found["linear"][0] == "quantized"


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(torch.add(self.bn(self.conv(x)), x))
        return out


def test_nested_patterns_have_any_operand() -> None:
    nested = (nn.ReLU, (torch.add, (nn.BatchNorm2d, nn.Conv2d), MatchAllNode))
    config = BackendConfig("own").set_backend_pattern_config(
        BackendPatternConfig()._set_pattern_complex_format(nested).add_dtype_config(BYTES)
    )
    x = torch.randn(2, 3, 4, 4)
    prepared = prepare_fx(Residual().eval(), {"": default_qconfig}, (x,), backend_config=config)
    names = [name for name, _ in prepared.named_children() if name.startswith("activation")]
    assert len(names) == 2  # what is read, and what comes out of the whole
    assert {row.verdict.value for row in prepared.coverage().rows} == {"quantized"}
    prepared(x)
    assert torch.allclose(
        convert_fx(prepared)(x), Residual().eval()(x) * 0 + convert_to_reference_fx(prepared)(x), atol=0.05
    )


def test_a_pattern_shares_the_scale_of_what_it_reads() -> None:
    config = one(torch.reshape, PLAIN, observation_type=SHARED)
    prepared = prepare_fx(Moves().eval(), {"": default_qconfig}, (torch.randn(2, 3, 4),), backend_config=config)
    observers = [module for name, module in prepared.named_children() if name.startswith("activation")]
    assert len(observers) == 1  # one instance, behind both tensors


class Moves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.reshape(x, (-1,))


def test_an_empty_config_quantizes_nothing() -> None:
    prepared = prepare_fx(
        nn.Sequential(nn.Tanh()).eval(), {"": default_qconfig}, (torch.randn(2, 3),), backend_config=BackendConfig()
    )
    assert {row.verdict.value for row in prepared.coverage().rows} == {"float"}


def drop_relu(is_qat: bool, conv: nn.Module, relu: nn.Module) -> nn.Module:
    return conv


REFUSED: dict[str, tuple[BackendConfig, str]] = {
    "a fuser": (one((nn.Conv2d, nn.ReLU), fuser_method=drop_relu), "drop_relu of a pattern is not run"),
    "32 bits": (one(nn.Linear, DTypeConfig(torch.qint32, torch.qint32, torch.qint8)), "torch.qint32"),
    "a module of one's own": (one(Two), "Two is no layer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(name: str) -> None:
    config, what = REFUSED[name]
    with pytest.raises(CustomConfigError, match=what):
        prepare_fx(nn.Sequential(nn.ReLU()).eval(), {"": default_qconfig}, (torch.randn(2, 3),), backend_config=config)
    with pytest.raises(CustomConfigError, match=what):
        fuse_fx(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()).eval(), backend_config=config)


def test_convert_takes_the_config_of_prepare_and_no_other() -> None:
    x = torch.randn(2, 4)
    prepared = prepare_fx(Two().eval(), {"": default_qconfig}, (x,), backend_config=one(nn.Linear))
    prepared(x)
    convert_fx(prepared, backend_config=one(nn.Linear))
    convert_to_reference_fx(prepared, backend_config=one(nn.Linear))
    with pytest.raises(CustomConfigError, match="another than that of prepare"):
        convert_fx(prepared, backend_config=one(functional.linear))


# -- torch's own -------------------------------------------------------------------------------------------------------

TORCHS = {
    "x86": torchs.get_native_backend_config,
    "fbgemm": torchs.get_fbgemm_backend_config,
    "qnnpack": torchs.get_qnnpack_backend_config,
    "onednn": torchs.get_onednn_backend_config,
}


@pytest.mark.parametrize("model_name", some(["classifier", "joined", "gated", "upscaler"]))
@pytest.mark.parametrize("name", ["x86", "qnnpack"])
def test_torchs_configs_quantize_what_the_flow_does_by_itself(name: str, model_name: str) -> None:
    model, batches = model_and_data(model_name)
    mapping = get_default_qconfig_mapping(name)
    own = prepare_fx(model, mapping, (batches[0],))
    by_config = prepare_fx(model, mapping, (batches[0],), backend_config=TORCHS[name]())
    for batch in batches:
        own(batch)
        by_config(batch)
    x = batches[-1]
    assert torch.equal(convert_fx(own)(x), convert_fx(by_config, backend_config=TORCHS[name]())(x))


@pytest.mark.parametrize("name", [*TORCHS, "executorch"])
def test_torchs_configs_are_read(name: str) -> None:
    made = TORCHS.get(name, torchs.get_executorch_backend_config)()
    assert len(translate_backend_config(made).table) > 70
    assert translate_backend_config(made) == translate_backend_config(made)


@pytest.mark.parametrize("trained", [False, True])
def test_qconfigs_of_qnnpack_keep_to_its_config(trained: bool) -> None:
    qconfig = get_default_qat_qconfig("qnnpack") if trained else get_default_qconfig("qnnpack")
    found = verdicts(nn.Sequential(nn.Linear(30, 4)), torchs.get_qnnpack_backend_config(), qconfig, torch.rand(2, 30))
    assert found["linear"][0] == "quantized"


class Leaky(nn.Module):
    def __init__(self, last: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm, self.last = nn.Linear(5, 5), norm, last

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.linear(x)))
        return out


@pytest.mark.parametrize("norm", some([nn.Identity(), nn.BatchNorm1d(5)]))
@pytest.mark.parametrize("last", [nn.LeakyReLU(0.1), nn.Tanh()])
def test_onednn_takes_a_linear_and_what_is_behind_it_as_one(last: nn.Module, norm: nn.Module) -> None:
    config, x, model = torchs.get_onednn_backend_config(), torch.randn(6, 5), Leaky(last, norm).eval()
    qconfig = get_default_qconfig("onednn")
    mapping = get_default_qconfig_mapping("onednn").set_object_type(nn.Tanh, qconfig)
    prepared = prepare_fx(model, mapping, (x,), backend_config=config)
    assert len([name for name, _ in prepared.named_children() if name.startswith("activation")]) == 2
    prepared(x)
    assert float((convert_fx(prepared)(x) - model(x)).abs().max()) < 0.05


@pytest.mark.parametrize("relu", some([False, True]))
@pytest.mark.parametrize("add", [torch.add, operator.add])
def test_onednn_takes_a_convolution_and_a_sum_as_one(add: Any, relu: bool) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu = nn.Conv2d(3, 3, 1), nn.ReLU() if relu else nn.Identity()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out: Tensor = self.relu(add(self.conv(x), y))
            return out

    model, inputs = Sum().eval(), (torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4))
    config = torchs.get_onednn_backend_config()
    prepared = prepare_fx(model, get_default_qconfig_mapping("onednn"), inputs, backend_config=config)
    assert len([name for name, _ in prepared.named_children() if name.startswith("activation")]) == 3
    prepared(*inputs)
    assert float((convert_fx(prepared)(*inputs) - model(*inputs)).abs().max()) < 0.05
