"""Training in the PT2 export flow, beside torchao; switching exported models; comparing models node by node."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.flows.fake_quantize import disable_observer
from quantc.flows.pt2e import (
    XNNPACKQuantizer,
    convert_pt2e,
    get_symmetric_quantization_config,
    move_exported_model_to_eval,
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
