"""Training in the PT2 export flow, beside torchao; switching exported models; comparing models node by node."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quantc.flows.fake_quantize import disable_observer
from quantc.flows.pt2e import (
    XNNPACKQuantizer,
    allow_exported_model_train_eval,
    compare_results,
    convert_pt2e,
    extract_results_from_loggers,
    generate_numeric_debug_handle,
    get_symmetric_quantization_config,
    model_is_exported,
    move_exported_model_to_eval,
    move_exported_model_to_train,
    prepare_for_propagation_comparison,
    prepare_pt2e,
    prepare_qat_pt2e,
)
from quantc.flows.pt2e.trained_norms import close_norms, open_norms
from tests.support.oracles import differences, placement

aten = torch.ops.aten


class Trained(nn.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, bias=False)
        self.norm1 = nn.BatchNorm2d(6, eps=eps)
        self.conv2 = nn.Conv2d(6, 4, 3)
        self.norm2 = nn.BatchNorm2d(4, eps=eps)
        self.up = nn.ConvTranspose2d(4, 4, 3)
        self.norm3 = nn.BatchNorm2d(4, eps=eps)
        self.fc = nn.Linear(4 * 36, 5)

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = self.norm3(self.up(self.norm2(self.conv2(x))))
        return self.fc(x.flatten(1))


X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def model(eps: float = 1e-5) -> nn.Module:
    torch.manual_seed(0)
    return Trained(eps).train()


def captured(given: nn.Module) -> Any:
    return torch.export.export(given, (X,)).module()


def own() -> Any:
    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True, is_qat=True))


def theirs() -> Any:
    other = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    config = other.get_symmetric_quantization_config(is_per_channel=True, is_qat=True)
    return other.XNNPACKQuantizer().set_global(config)


def trained(prepared: Any, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = prepared(torch.randn(8, 3, 8, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
def test_training_and_result_are_those_of_torchao() -> None:
    from torchao.quantization.pt2e import move_exported_model_to_eval as their_move
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e as their_convert
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e as their_prepare

    ours, other = prepare_qat_pt2e(captured(model()), theirs()), their_prepare(captured(model()), theirs())
    assert trained(ours) == pytest.approx(trained(other), rel=1e-6)
    done, expected = convert_pt2e(move_exported_model_to_eval(ours)), their_convert(their_move(other))
    assert differences(placement(done), placement(expected)) == {}
    with torch.no_grad():
        assert torch.allclose(done(X), expected(X), atol=1e-5)


@pytest.mark.slow
def test_the_graph_has_the_form_of_torchao() -> None:
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e as their_prepare

    def calls(module: Any) -> list[tuple[str, list[str]]]:
        """Every op with the ops it reads."""
        kinds = {node: str(node.target) if node.op == "call_function" else node.op for node in module.graph.nodes}
        rows = [(kinds[node], [kinds[each] for each in node.all_input_nodes]) for node in module.graph.nodes]
        return sorted(rows)

    ours, other = prepare_qat_pt2e(captured(model()), theirs()), their_prepare(captured(model()), theirs())
    assert calls(ours) == calls(other)


def test_our_quantizer_places_as_theirs() -> None:
    """Its scales are 0.4 % smaller while it trains: those it is converted with."""
    ours, other = (prepare_qat_pt2e(captured(model()), make()) for make in (own, theirs))
    assert ours.code == other.code
    assert trained(ours) == pytest.approx(trained(other), rel=0.05)


def test_what_is_converted_is_what_was_trained() -> None:
    """In eval mode the prepared model gives what the converted one does, also with an eps that torchao ignores."""
    prepared = prepare_qat_pt2e(captured(model(eps=0.1)), own())
    trained(prepared)
    move_exported_model_to_eval(prepared)
    prepared.apply(disable_observer)
    converted = convert_pt2e(prepared)
    with torch.no_grad():
        assert torch.allclose(prepared(X), converted(X), atol=1e-5)
    assert not [node for node in converted.graph.nodes if node.target is aten.batch_norm.default]


def test_the_model_is_not_trained_behind_its_back() -> None:
    given = model()
    state = copy.deepcopy(given.state_dict())
    trained(prepare_qat_pt2e(captured(given), own()))
    assert all(torch.equal(value, state[name]) for name, value in given.state_dict().items())


def test_opening_and_closing_norms_keeps_the_function() -> None:
    given = model(eps=0.01)
    for _ in range(3):
        given(X + 1)
    module = captured(given.eval())
    with torch.no_grad():
        expected = module(X)
        assert len(open_norms(module)) == 5  # three weights and two biases
        module.recompile()
        assert torch.allclose(module(X), expected, atol=1e-5)
        assert close_norms(module) == 3
        module.recompile()
        assert torch.allclose(module(X), expected, atol=1e-5)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=0.3, eps=0.2)
        self.drop = nn.Dropout(0.7)

    def forward(self, x: Tensor) -> Any:
        return self.drop(self.norm(x))


def test_modes_follow_the_model() -> None:
    torch.manual_seed(0)
    given, x = Dropping(), torch.randn(6, 4)
    module: Any = torch.export.export(given.train(), (x,)).module()
    assert model_is_exported(module)
    assert not model_is_exported(given)
    move_exported_model_to_eval(module)
    given.load_state_dict(module.state_dict())
    assert torch.equal(module(x), given.eval()(x))
    move_exported_model_to_train(module)
    torch.manual_seed(1)
    found = module(x)
    torch.manual_seed(1)
    assert torch.equal(found, given.train()(x))
    allow_exported_model_train_eval(module)
    module.eval()
    assert torch.equal(module(x), module(x))
    module.train()
    assert not torch.equal(module(x), module(x))


# -- comparing ---------------------------------------------------------------------------------------------------


def loggers(module: fx.GraphModule, x: Tensor) -> Any:
    watched = prepare_for_propagation_comparison(module)
    with torch.no_grad():
        assert torch.equal(watched(x), module(x))
    return extract_results_from_loggers(watched)


def test_models_are_compared_node_by_node() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    exported = torch.export.export(network, (X,))
    generate_numeric_debug_handle(exported)
    handles = [
        node.meta["custom"]["numeric_debug_handle"] for node in exported.graph.nodes if node.op == "call_function"
    ]
    assert handles == sorted(set(handles))
    reference: Any = exported.module()
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    prepared = prepare_pt2e(reference, quantizer)
    with torch.no_grad():
        prepared(X)
    results = compare_results(loggers(reference, X), loggers(convert_pt2e(prepared), X))
    by_name = {info.name: summary for info, summary in results.items()}
    assert {"conv2d", "relu", "conv2d_1"} <= set(by_name)
    for summary in by_name.values():
        assert summary.results[0].sqnr > 25
        assert summary.results[0].mse_loss < 0.01
    assert by_name["conv2d"].ref_module_stack.endswith("0")


def test_the_comparison_agrees_with_torchao() -> None:
    other: Any = import_module("torchao.quantization.pt2e")
    torch.manual_seed(0)
    exported: Any = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), (torch.randn(3, 4),))
    x = torch.randn(3, 4)
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    prepared = prepare_pt2e(exported.module(), quantizer)
    prepared(x)
    pair = exported.module(), convert_pt2e(prepared)
    ours = compare_results(*(loggers(each, x) for each in pair))
    watched = [other.prepare_for_propagation_comparison(each) for each in pair]
    with torch.no_grad():
        for each in watched:
            each(x)
    results = other.compare_results(*map(other.extract_results_from_loggers, watched))
    found = {info.name: float(summary.results[0].sqnr) for info, summary in ours.items()}
    expected = {info.name: float(summary.results[0].sqnr) for info, summary in results.items()}
    assert found == pytest.approx(expected, rel=1e-4)


def test_handles_are_for_exported_programs() -> None:
    with pytest.raises(ValueError, match="ExportedProgram"):
        generate_numeric_debug_handle(nn.Linear(2, 2))  # type: ignore[arg-type]
