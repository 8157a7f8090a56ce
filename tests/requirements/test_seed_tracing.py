"""Every promise of the document that this flow comes from, by its number in the list."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import quantc.flows.tracing as flow
from quantc.flows.tracing import AutoQuantizationState, UnseenOpError, auto_trace, convert, prepare, quantization_state
from quantc.flows.tracing.auto_trace import Interception, Run, add_auto_convert, add_auto_observation
from quantc.ir.plan import Part
from quantc.ir.program import Program
from quantc.verbs.convert import convert as convert_program
from tests.support.traced_models import Capturable, EarlyExit
from tests.support.traced_runs import Counted, Gated, Hooks, Small, sqnr, state, trace_of


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture(scope="module")
def example() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, 8, 8)


@pytest.fixture(scope="module")
def prepared(model: nn.Module, example: Tensor) -> nn.Module:
    made = prepare(model, example)
    with torch.no_grad():
        for _ in range(3):
            made(example)
    return made


@pytest.fixture(scope="module")
def converted(prepared: nn.Module) -> nn.Module:
    return convert(prepared)


def test_0_1_a_module_offers_prepare_and_convert() -> None:
    assert {"prepare", "convert"} <= set(flow.__all__)


def test_0_2_prepare_gives_a_model_to_calibrate(model: nn.Module, example: Tensor) -> None:
    made = prepare(model, example)
    assert isinstance(made, Small)
    assert trace_of(made).phase.value == "observing"


def test_0_3_calibration_is_calling_the_model(model: nn.Module, example: Tensor) -> None:
    made = prepare(model, example)
    assert trace_of(made).held.plan.batches == 0
    with torch.no_grad():
        found = made(example)
    assert trace_of(made).held.plan.batches == 1
    torch.testing.assert_close(found, model(example), rtol=1e-5, atol=1e-5)


def test_0_4_convert_gives_the_quantized_model(model: nn.Module, converted: nn.Module, example: Tensor) -> None:
    with torch.no_grad():
        expected, found = model(example), converted(example)
    assert not torch.equal(expected, found)
    assert sqnr(expected, found) > 30


def test_0_5_a_model_and_an_example_are_all_it_takes(model: nn.Module, example: Tensor) -> None:
    needed = [row for row in inspect.signature(prepare).parameters.values() if row.default is row.empty]
    assert [row.name for row in needed] == ["model", "example_inputs"]
    assert type(prepare(model, example)).forward is Small.forward


def test_0_6_tracing_records_the_subgraphs_of_quantizable_ops(model: nn.Module, example: Tensor) -> None:
    made = prepare(model, example)
    graphs = state(made).subgraphs
    assert len(graphs) == 1
    assert isinstance(graphs[0], Program)
    names = [node.name for node in graphs[0].graph.nodes]
    assert "conv2d" in names
    assert "linear" in names
    assert "conv2d_1" not in names
    assert "conv2d_1" in [node.name for node in state(made, "block").subgraphs[0].graph.nodes]


def test_0_7_transforms_are_defined_over_the_subgraphs(prepared: nn.Module) -> None:
    claims = state(prepared).subgraphs[0].plan.claims.rows
    parts = {node.name: claim.part for node, claim in claims.items()}
    assert parts["conv2d"] is Part.QUANTIZED
    assert parts["relu"] is Part.QUANTIZED


def test_0_8_subgraphs_are_called_while_user_code_runs(converted: nn.Module, example: Tensor) -> None:
    with torch.no_grad():
        converted(example)
        before = len(converted.log)  # type: ignore[arg-type]
        with Counted() as counted:
            converted(example)
    assert len(converted.log) == before + 1  # type: ignore[arg-type]
    assert counted.int8 == 3


def test_0_9_python_control_flow_goes_on_working(example: Tensor) -> None:
    torch.manual_seed(0)
    made = prepare(EarlyExit().eval(), [torch.randn(2, 3, 8, 8) * 0.1, torch.randn(2, 3, 8, 8) * 9])
    with torch.no_grad():
        made(example * 0.1)
        made(example * 9)
        quantized = convert(made)
        assert quantized(example * 0.1).shape == quantized(example * 9).shape == (2, 10)


def test_0_10_torch_function_is_overridden(model: nn.Module, example: Tensor, monkeypatch: Any) -> None:
    assert issubclass(Interception, TorchFunctionMode)
    assert "__torch_function__" in vars(Interception)
    seen: list[str] = []
    original = Interception.__torch_function__

    def call(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(getattr(func, "__name__", ""))
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(Interception, "__torch_function__", call)
    with torch.no_grad():
        prepare(model, example)(example)
    assert seen.count("relu") >= 2
    assert seen.count("sin") == 2


def test_0_11_the_call_of_modules_is_overridden(converted: nn.Module) -> None:
    for module in (converted, converted.get_submodule("block"), converted.get_submodule("conv")):
        assert type(module).__call__ is not nn.Module.__call__
    assert type(Small()).__call__ is nn.Module.__call__


@pytest.mark.parametrize("phase", ["tracing", "observing", "converted"])
def test_0_12_interception_is_active_in_all_phases(
    phase: str, model: nn.Module, example: Tensor, monkeypatch: Any
) -> None:
    phases: list[str] = []
    original = Interception.__torch_function__

    def call(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        phases.append(self.run.trace.phase.value)
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(Interception, "__torch_function__", call)
    with torch.no_grad():
        made = prepare(model, example)
        made(example)
        convert(made)(example)
    assert phase in phases


def test_0_13_the_current_module_is_known(converted: nn.Module, example: Tensor, monkeypatch: Any) -> None:
    paths: list[str] = []
    original = AutoQuantizationState.step_to

    def call(self: AutoQuantizationState, site: Any, run: Run) -> None:
        paths.append(run.frame.state.path)
        assert run.frame.state is self
        original(self, site, run)

    monkeypatch.setattr(AutoQuantizationState, "step_to", call)
    prepared = prepare(Small().eval(), example)
    with torch.no_grad():
        prepared(example)
    assert {"", "block"} <= set(paths)


def test_0_14_states_are_found_under_auto_quant_state(prepared: nn.Module) -> None:
    with_state = [name for name, module in prepared.named_modules() if hasattr(module, "_auto_quant_state")]
    assert with_state == ["", "block"]


def test_0_15_cur_op_needs_hooks(prepared: nn.Module) -> None:
    row = state(prepared)
    assert row.cur_op_needs_hooks(torch.nn.functional.conv2d)
    assert row.cur_op_needs_hooks(torch.relu)
    assert not row.cur_op_needs_hooks(torch.sin)
    assert not row.cur_op_needs_hooks(torch.argsort)


def test_0_16_unquantizable_ops_run_untouched(converted: nn.Module, example: Tensor, monkeypatch: Any) -> None:
    given: list[Any] = []
    original = torch.sin

    def sin(x: Tensor) -> Tensor:
        given.append(type(x))
        return original(x)

    monkeypatch.setattr(torch, "sin", sin)
    with torch.no_grad(), Counted() as counted:
        converted(example)
    assert counted.ops["aten.sin.default"] == 1
    assert given


def test_0_17_validate_cur_op_raises_where_control_flow_is_another(example: Tensor) -> None:
    torch.manual_seed(0)
    made = prepare(Gated().eval(), -torch.ones(2, 16))
    with torch.no_grad(), pytest.raises(UnseenOpError, match=r"expected .* seen linear"):
        made(torch.ones(2, 16))


def test_0_18_before_hook_gives_args_and_kwargs(prepared: nn.Module, example: Tensor, monkeypatch: Any) -> None:
    given: list[Any] = []
    original = AutoQuantizationState.op_prepare_before_hook

    def call(self: Any, func: Any, args: Any, kwargs: Any, site: Any, run: Any) -> Any:
        made = original(self, func, args, kwargs, site, run)
        given.append(made)
        return made

    monkeypatch.setattr(AutoQuantizationState, "op_prepare_before_hook", call)
    with torch.no_grad():
        prepare(Small().eval(), example)(example)
    assert given
    assert all(isinstance(args, tuple) and isinstance(kwargs, dict) for args, kwargs in given)


def test_0_19_after_hook_gives_the_output(model: nn.Module, example: Tensor, monkeypatch: Any) -> None:
    original = AutoQuantizationState.op_prepare_after_hook

    def call(self: Any, func: Any, output: Any, args: Any, kwargs: Any, site: Any, run: Any) -> Any:
        made = original(self, func, output, args, kwargs, site, run)
        return made * 0 if site.name == "sin" else made

    made = prepare(model, example)
    monkeypatch.setattr(AutoQuantizationState, "op_prepare_after_hook", call)
    with torch.no_grad():
        found = made(example)
    torch.testing.assert_close(found, made.get_parameter("head.bias").expand_as(found))


def test_0_20_before_then_function_then_after(model: nn.Module, example: Tensor, monkeypatch: Any) -> None:
    made = prepare(model, example)
    hooks = Hooks(monkeypatch)
    with torch.no_grad():
        made(example)
    order = ["op_prepare_before_hook", "op_prepare_function", "op_prepare_after_hook"]
    ops = [name for name in hooks.seen if name in order]
    assert ops
    assert ops == order * (len(ops) // 3)
    first = hooks.seen.index("op_prepare_before_hook")
    assert hooks.seen[first - 1] == "validate_cur_op"


def test_0_21_add_auto_observation_implements_calibration() -> None:
    assert "first_call" in (add_auto_observation.__doc__ or "")
    assert add_auto_observation.__module__.endswith("auto_trace")


def test_0_22_add_auto_convert_implements_inference(prepared: nn.Module, example: Tensor) -> None:
    twin = copy.deepcopy(prepared)
    program = convert_program(trace_of(twin).held)
    made = add_auto_convert(twin, trace_of(twin), program)
    with torch.no_grad():
        made(example)  # weights are packed
        with Counted() as counted:
            made(example)
    assert counted.int8 == 3


def test_0_23_one_state_per_non_leaf_module_as_a_child(prepared: nn.Module) -> None:
    states = {name for name, module in prepared.named_modules() if isinstance(module, AutoQuantizationState)}
    assert states == {"_auto_quant_state", "block._auto_quant_state"}
    assert isinstance(prepared._modules["_auto_quant_state"], AutoQuantizationState)


def test_0_24_the_state_holds_subgraphs_and_observers(prepared: nn.Module) -> None:
    assert state(prepared).subgraphs
    assert state(prepared).observers


def test_0_25_first_call_captures_and_later_calls_observe(model: nn.Module, example: Tensor, monkeypatch: Any) -> None:
    seen: list[bool] = []
    original = Interception.__torch_function__

    def call(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(self.run.frame.state.first_call)
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(Interception, "__torch_function__", call)
    made = prepare(model, example)
    assert seen
    assert all(seen)
    captured = len(seen)
    with torch.no_grad():
        made(example)
    assert not any(seen[captured:])
    assert trace_of(made).held.plan.batches == 1


def test_0_26_inference_hooks_do_the_transforms(prepared: nn.Module, example: Tensor, monkeypatch: Any) -> None:
    made = convert(prepared)
    hooks = Hooks(monkeypatch)
    with torch.no_grad():
        made(example)
    assert {"op_convert_before_hook", "op_convert_function", "op_convert_after_hook"} <= set(hooks.seen)
    assert not any(name.startswith("op_prepare") for name in hooks.seen)


def test_0_27_the_state_stores_all_captured_subgraphs(prepared: nn.Module) -> None:
    states = [row for row in prepared.modules() if isinstance(row, AutoQuantizationState)]
    nodes = [node.name for row in states for graph in row.subgraphs for node in graph.graph.nodes]
    whole = [node.name for node in trace_of(prepared).held.graph.nodes if node.op == "call_function"]
    assert set(whole) <= set(nodes)


def test_0_28_the_state_stores_observers_and_fake_quants(prepared: nn.Module, example: Tensor) -> None:
    observers = state(prepared).observers.values()
    assert observers
    assert all(row.seen for row in observers)
    trained = prepare(Small(), example, qat=True)
    assert state(trained).fake_quants
    assert state(trained, "block").fake_quants


def test_0_29_module_hooks_see_to_dtypes(converted: nn.Module, example: Tensor, monkeypatch: Any) -> None:
    given: list[Any] = []
    original = AutoQuantizationState.module_after_hook

    def call(self: Any, output: Any, run: Any) -> Any:
        made = original(self, output, run)
        given.append((self.path, type(output).__name__, type(made).__name__))
        return made

    monkeypatch.setattr(AutoQuantizationState, "module_after_hook", call)
    with torch.no_grad():
        found = converted(example)
    assert found.dtype is torch.float32
    assert [row[0] for row in given] == ["block", ""]
    assert given[-1][2] == "Tensor"
    assert hasattr(AutoQuantizationState, "module_before_hook")


def test_0_30_function_hooks_see_to_dtypes_and_observe(example: Tensor) -> None:
    torch.manual_seed(0)
    made = prepare(Capturable().eval(), torch.randn(2, 3, 16, 16))
    with torch.no_grad():
        made(torch.randn(2, 3, 16, 16))
    assert all(row.seen for row in trace_of(made).held.plan.statistics.values())


def test_0_31_function_replacement_hooks_put_kernels_in(prepared: nn.Module, example: Tensor, monkeypatch: Any) -> None:
    made = convert(prepared)
    replaced: list[Any] = []
    original = AutoQuantizationState.op_convert_function

    def call(self: Any, func: Any, site: Any, run: Any) -> Any:
        found = original(self, func, site, run)
        replaced.append((site.name, found is not None and found is not func))
        return found

    monkeypatch.setattr(AutoQuantizationState, "op_convert_function", call)
    with torch.no_grad():
        made(example)
    assert ("relu", True) in replaced
    kernels = {name for unit in trace_of(made).units.values() for row in unit.computes.values() for name in row.kernels}
    assert any("qconv" in name for name in kernels)
    assert any("qlinear" in name for name in kernels)


def test_0_32_files_are_split_as_in_the_document() -> None:
    assert Path(auto_trace.__file__).name == "auto_trace.py"
    assert Path(quantization_state.__file__).name == "quantization_state.py"
    assert AutoQuantizationState.__module__ == quantization_state.__name__


def test_0_33_it_says_that_the_name_was_never_decided() -> None:
    assert "prototype" in (flow.__doc__ or "")
    assert "name" in (flow.__doc__ or "")
