"""What passes in silence elsewhere is loud here: each fault has a name, the path of the module, and a way out."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import ConfigError, MixedTensorsError, QuantcError, UnknownNameError
from quantc.flows import eager
from quantc.nn.quantized import FloatFunctional
from tests.support.eager_models import CASES, QUANTC, names
from tests.support.eager_small import FUSE, Small, Twice, X, run, small, with_qconfig


def check(error: QuantcError, path: str, *words: str) -> None:
    """An error names the place and says what to do."""
    assert error.where is not None
    assert path in error.where
    assert error.advice
    for word in words:
        assert word in str(error)


# -- reused layers -----------------------------------------------------------------------------------------------------


def prepared_twice() -> nn.Module:
    prepared = eager.prepare(with_qconfig(Twice().eval()))
    prepared(torch.randn(2, 4))
    return prepared


def test_a_layer_that_runs_twice_is_refused_and_a_relu_is_not() -> None:
    with pytest.raises(eager.ReusedLayerError) as caught:
        eager.convert(prepared_twice())
    check(caught.value, "fc", "ran 2 times", "accept='reused-layer'")
    assert [fault.path for fault in caught.value.faults] == ["fc"]


def test_a_layer_that_runs_once_in_each_of_two_calls_is_no_reuse() -> None:
    prepared = eager.prepare(small())
    run(prepared)
    run(prepared)
    eager.convert(prepared)


def test_a_reused_layer_can_be_accepted() -> None:
    with pytest.warns(eager.EagerWarning, match="fc"):
        converted = eager.convert(prepared_twice(), accept="reused-layer")
    assert type(converted.get_submodule("fc")).__name__ == "Linear"


def test_one_functional_module_for_two_sums_is_a_reuse() -> None:
    class TwoSums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.add = eager.QuantStub(), eager.DeQuantStub(), FloatFunctional()

        def forward(self, x: Tensor) -> Any:
            q = self.quant(x)
            return self.dequant(self.add.add(self.add.add(q, q), q))

    prepared = run(eager.prepare(with_qconfig(TwoSums().eval())))
    with pytest.raises(eager.ReusedLayerError) as caught:
        eager.convert(prepared)
    check(caught.value, "add", "FloatFunctional")


def test_one_module_under_two_names_is_refused_before_anything_is_done() -> None:
    model: Any = small()
    model.head = model.fc
    with pytest.raises(eager.ReusedLayerError) as caught:
        eager.prepare(model)
    check(caught.value, "fc", "fc, head", "deepcopy")
    model.head = copy.deepcopy(model.fc)
    eager.prepare(model)


def test_one_module_under_two_names_is_swapped_at_both_if_it_is_meant() -> None:
    model: Any = small()
    model.head = model.fc
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted: Any = eager.convert(run(eager.prepare(model, accept="reused-layer")), accept="reused-layer")
    assert converted.head is converted.fc
    assert type(converted.fc).__name__ == "Linear"
    assert not isinstance(converted.fc, nn.Linear)


# -- stubs -------------------------------------------------------------------------------------------------------------


def test_without_a_quant_stub_prepare_refuses() -> None:
    model = with_qconfig(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval())
    with pytest.raises(eager.MissingStubError) as caught:
        eager.prepare(model)
    check(caught.value, "0", "QuantStub")


class HalfStubbed(nn.Module):
    """Two inputs, one of which is not quantized."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong
        self.quant, self.dequant = eager.QuantStub(), eager.DeQuantStub()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.softmax = nn.Softmax(-1)
        self.add = FloatFunctional()

    def forward(self, x: Tensor) -> Any:
        q = self.quant(x)
        left = self.left(q)
        match self.wrong:
            case "float input":
                return self.dequant(self.add.add(left, self.right(x)))
            case "plain sum":
                return self.dequant(left + self.right(q))
            case "float layer":
                return self.softmax(left)
            case _:
                return self.add.add(left, self.right(q))


@pytest.mark.parametrize(("wrong", "place"), [("float input", "right"), ("plain sum", "the model itself")])
def test_floats_that_meet_quantized_tensors_are_found_by_convert(wrong: str, place: str) -> None:
    prepared = eager.prepare(with_qconfig(HalfStubbed(wrong).eval()))
    prepared(torch.randn(2, 4))
    with pytest.raises(eager.MissingStubError) as caught:
        eager.convert(prepared, accept="no-data")
    check(caught.value, place, "quantized")
    assert isinstance(caught.value, MixedTensorsError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = eager.convert(prepared, accept=("missing-stub", "no-data"))
    with pytest.raises(MixedTensorsError):
        converted(torch.randn(2, 4))


def test_a_quantized_tensor_that_meets_a_float_layer_is_found_by_convert() -> None:
    model: Any = HalfStubbed("float layer").eval()
    model.softmax.qconfig = None
    prepared = eager.prepare(with_qconfig(model))
    prepared(torch.randn(2, 4))
    with pytest.raises(eager.MissingStubError) as caught:
        eager.convert(prepared, accept="no-data")
    check(caught.value, "softmax", "DeQuantStub")


def test_a_model_that_returns_quantized_tensors_is_warned_of() -> None:
    prepared = eager.prepare(with_qconfig(HalfStubbed("no end").eval()))
    prepared(torch.randn(2, 4))
    with pytest.warns(eager.EagerWarning, match="DeQuantStub"):
        eager.convert(prepared, accept="no-data")


# -- fusing ------------------------------------------------------------------------------------------------------------


def test_layers_that_could_be_fused_are_listed_ready_to_paste() -> None:
    prepared = run(eager.prepare(with_qconfig(Small().eval())))
    with pytest.warns(eager.UnfusedWarning) as caught:
        eager.convert(prepared)
    assert str(FUSE) in str(caught[0].message)
    fused = run(eager.prepare(small()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", eager.UnfusedWarning)
        eager.convert(fused)


def test_a_norm_that_only_fusing_can_quantize_is_an_error_that_says_so() -> None:
    model = with_qconfig(eager.QuantWrapper(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()))
    prepared = eager.prepare(model)
    prepared(torch.randn(3, 4))
    with pytest.warns(eager.UnfusedWarning), pytest.raises(eager.MissingStubError) as caught:
        eager.convert(prepared)
    check(caught.value, "module.1", "fuse_modules(model, [['module.0', 'module.1']])")


class Skip(nn.Module):
    """Two convolutions with norms, between which the sum reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
        self.conv2, self.bn2, self.relu2 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
        self.fc, self.relu3 = nn.Linear(6, 6), nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        x = self.relu1(self.bn1(self.conv1(x)))
        y = self.conv2(x)
        z = self.relu2(self.bn2(y)) + y
        last = self.fc(z)
        return last, self.relu3(last)


def test_what_can_be_fused_is_found_by_running_the_model() -> None:
    model = Skip().eval()
    assert eager.fusable(model, X) == [["conv1", "bn1", "relu1"], ["bn2", "relu2"]]
    assert hooks(model) == 0
    assert torch.allclose(eager.fuse_modules(model, eager.fusable(model, X))(X)[1], model(X)[1], atol=1e-5)
    for case in CASES.values():
        found = eager.fusable(case.made(QUANTC).eval(), case.data()[0])
        assert all(names in found or len(names) == 2 for names in case.fuse)


def test_fusing_in_training_mode_names_the_modules_and_the_other_function() -> None:
    with pytest.raises(eager.EagerModeError) as caught:
        eager.fuse_modules(Small(), FUSE)
    check(caught.value, "conv, bn, relu", "model.eval()", "fuse_modules_qat")


def test_fusing_for_training_in_eval_mode_is_warned_of() -> None:
    with pytest.warns(eager.EagerWarning, match=r"model.train\(\)|eval mode"):
        eager.fuse_modules_qat(Small().eval(), FUSE)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["conv", "bm"], UnknownNameError),
        (["conv", "fc"], eager.FusionError),
        (["conv"], eager.FusionError),
        ([["conv", "bn"], "fc"], eager.FusionError),
    ],
)
def test_what_cannot_be_fused_is_refused_and_the_model_is_as_before(given: Any, expected: type[QuantcError]) -> None:
    model = Small().eval()
    with pytest.raises(expected):
        eager.fuse_modules(model, given, inplace=True)
    assert type(model.conv) is nn.Conv2d
    assert type(model.bn) is nn.BatchNorm2d


def test_norms_that_do_not_fit_are_refused_with_their_names() -> None:
    model = Small().eval()
    model.bn = nn.BatchNorm2d(5).eval()
    with pytest.raises(eager.FusionError, match="4 channels and 5") as caught:
        eager.fuse_modules(model, FUSE)
    check(caught.value, "conv, bn, relu")
    model.bn = nn.BatchNorm2d(4, track_running_stats=False).eval()
    with pytest.raises(eager.FusionError, match="running statistics"):
        eager.fuse_modules(model, FUSE)


def test_hooks_between_fused_modules_are_warned_of_and_others_are_kept() -> None:
    model, calls = Small().eval(), []
    model.conv.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.relu.register_forward_hook(lambda *_: calls.append("after"))
    model.bn.register_forward_hook(lambda *_: calls.append("between"))
    with pytest.warns(eager.LostHookWarning, match="BatchNorm2d"):
        fused = eager.fuse_modules(model, FUSE)
    fused(X)
    assert calls == ["before", "after"]


# -- data --------------------------------------------------------------------------------------------------------------


def test_converting_without_data_is_refused_and_names_every_layer() -> None:
    with pytest.raises(eager.NotObservedError) as caught:
        eager.convert(eager.prepare(small()))
    check(caught.value, "quant, conv, fc", "not run on data")


def test_layers_that_no_data_reached_are_named() -> None:
    class Branch(Small):
        def forward(self, x: Tensor) -> Any:
            q = self.quant(x)
            return self.dequant(self.conv(q) if x.sum() > -1e9 else self.fc(q))

    model = with_qconfig(Branch().eval())
    prepared = run(eager.prepare(model))
    with pytest.raises(eager.NotObservedError) as caught:
        eager.convert(prepared)
    check(caught.value, "fc", "in 1 runs")
    assert "conv" not in str(caught.value.where)


def test_a_functional_module_without_data_refuses_when_it_is_used() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.add = eager.QuantStub(), eager.DeQuantStub(), FloatFunctional()

        def forward(self, x: Tensor) -> Any:
            q = self.quant(x)
            return self.dequant(self.add.add(q, q) if len(x) > 2 else self.add.mul_scalar(q, 2.0))

    converted = eager.convert(run(eager.prepare(with_qconfig(Sometimes().eval()))))
    assert converted(X).shape == X.shape
    with pytest.raises(eager.NotObservedError) as caught:
        converted(torch.cat([X, X]))
    check(caught.value, "add", "no scale")


def test_statistics_that_were_loaded_are_data() -> None:
    calibrated = run(eager.prepare(small()))
    fresh = eager.prepare(small())
    fresh.load_state_dict(calibrated.state_dict())
    assert torch.equal(eager.convert(fresh)(X), eager.convert(calibrated)(X))


# -- modes -------------------------------------------------------------------------------------------------------------


def test_preparing_in_training_mode_is_refused() -> None:
    with pytest.raises(eager.EagerModeError) as caught:
        eager.prepare(small().train())
    check(caught.value, "the model itself", "prepare_qat")


def test_a_part_in_training_mode_is_named() -> None:
    model: Any = small()
    model.fc.train()
    with pytest.raises(eager.EagerModeError) as caught:
        eager.prepare(model)
    check(caught.value, "fc", "eval mode, but fc")


def test_training_needs_training_mode_and_converting_eval_mode() -> None:
    model = with_qconfig(Small().train(), eager.get_default_qat_qconfig("fbgemm"))
    with pytest.raises(eager.EagerModeError) as caught:
        eager.prepare_qat(copy.deepcopy(model).eval())
    check(caught.value, "the model itself", "model.train()")
    trained = eager.prepare_qat(model)
    trained(X)
    with pytest.raises(eager.EagerModeError) as caught:
        eager.convert(trained)
    check(caught.value, "the model itself", "model.eval()")


def trained(engine: str) -> nn.Module:
    torch.manual_seed(0)
    model = with_qconfig(eager.fuse_modules_qat(Small().train(), FUSE), eager.get_default_qat_qconfig(engine))
    trained = eager.prepare_qat(model)
    for scale in (1.0, 4.0):  # ranges are moving averages, and the second batch is hardly in them
        trained(X * scale)
    return trained.eval()


def test_a_converted_model_that_is_not_what_was_trained_is_warned_of() -> None:
    with pytest.warns(eager.ClippedWarning, match="beyond 127"):
        eager.convert(trained("fbgemm"))
    settled = trained("fbgemm")
    settled(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", eager.ClippedWarning)
        eager.convert(trained("onednn"))
        eager.convert(settled)


# -- qconfigs ----------------------------------------------------------------------------------------------------------


def test_a_key_that_matches_nothing_is_refused_with_the_closest_names() -> None:
    with pytest.raises(eager.NoEffectError) as caught:
        eager.propagate_qconfig_(Small(), {"cnov": eager.default_qconfig})
    check(caught.value, "cnov", "did you mean conv?")
    with pytest.raises(eager.NoEffectError, match="LSTM"):
        eager.quantize_dynamic(Small(), {nn.LSTM, nn.Linear})
    with pytest.warns(eager.EagerWarning, match="LSTM"):
        eager.quantize_dynamic(Small(), {nn.LSTM, nn.Linear}, accept="no-effect")


def test_a_qconfig_where_nothing_can_be_quantized_is_refused() -> None:
    model: Any = small()
    model.relu.qconfig = eager.default_qconfig
    with pytest.raises(eager.NoEffectError) as caught:
        eager.prepare(model)
    check(caught.value, "relu")


def test_a_model_without_qconfigs_is_refused() -> None:
    with pytest.raises(eager.NothingQuantizedError, match="qconfig"):
        eager.prepare(Small().eval())


def test_what_is_no_qconfig_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        eager.prepare(with_qconfig(Small().eval(), "fbgemm"))
    check(caught.value, "the model", "'fbgemm'")


def test_a_model_of_which_nothing_is_quantized_is_refused() -> None:
    with pytest.raises(eager.NothingQuantizedError):
        eager.convert(Small().eval())
    with pytest.raises(eager.NothingQuantizedError, match="no layer"):
        eager.quantize_dynamic(nn.Sequential(nn.ReLU()))
    with pytest.raises(eager.NothingQuantizedError, match="in place"):
        eager.quantize_dynamic(nn.Linear(4, 4), inplace=True)


def test_a_model_is_prepared_once() -> None:
    prepared = eager.prepare(small())
    with pytest.raises(eager.AlreadyDoneError):
        eager.prepare(prepared)


def test_reference_modules_are_programs() -> None:
    prepared = run(eager.prepare(small()))
    with pytest.raises(QuantcError, match="Program") as caught:
        eager.convert(prepared, is_reference=True)
    assert "to_program" in str(caught.value.advice)


def test_an_unknown_fault_cannot_be_accepted() -> None:
    for call in (eager.prepare, eager.convert):
        with pytest.raises(ConfigError, match="reused") as caught:
            call(small(), accept="reused")
        assert "reused-layer" in str(caught.value.advice)


# -- the ledger, and what is left of it ---------------------------------------------------------------------------------


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_a_converted_model_keeps_no_hooks_and_no_qconfigs() -> None:
    prepared = run(eager.prepare(small()))
    assert hooks(prepared)
    converted = eager.convert(prepared)
    assert hooks(converted) == 0
    assert not any(hasattr(module, "qconfig") for module in converted.modules())
    assert hooks(prepared), "the prepared model is not changed"


def test_prepared_models_copy_and_pickle() -> None:
    prepared = run(eager.prepare(small()))
    for twin in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):  # noqa: S301 - our own
        run(twin)
        assert torch.equal(eager.convert(twin)(X), eager.convert(prepared)(X))


def test_the_callers_model_is_not_changed() -> None:
    model = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    eager.convert(run(eager.prepare(model)))
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert hooks(model) == 0


@pytest.mark.parametrize("name", ["residual", "branches", "gate", "scalars"])
def test_sound_models_give_no_warning(name: str) -> None:
    case = CASES[name]
    fuse = case.fuse + (names("1.down 1.relu") if name == "gate" else [])
    model = eager.fuse_modules(case.made(QUANTC).eval(), fuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error", eager.EagerWarning)
        prepared = eager.prepare(with_qconfig(model))
        for batch in case.data():
            prepared(batch)
        eager.convert(prepared)


def test_a_quantized_model_is_saved_and_loaded() -> None:
    converted = eager.convert(run(eager.prepare(small())))
    file = io.BytesIO()
    torch.save(converted.state_dict(), file)
    file.seek(0)
    fresh = eager.convert(run(eager.prepare(small())))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh(X), converted(X))
