"""LSTM and GRU layers with weights that float16 holds exactly, over whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import InputError
from quantc.integer.ops.recurrent import Layout
from quantc.targets.kernels import fp16_recurrent
from quantc.targets.kernels.fp16_recurrent import HalfSequences
from quantc.targets.kernels.stored_weight import StoredWeight
from tests.support.stored_weights import kernels, lowered, needs_fbgemm

pytestmark = needs_fbgemm
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU}


def layer(kind: str, **options: Any) -> nn.RNNBase:
    """A recurrent layer whose weights float16 holds."""
    torch.manual_seed(0)
    made: nn.RNNBase = KINDS[kind](5, 3, **options).eval()
    for parameter in made.parameters():
        parameter.data = parameter.data.half().float()
    return made


def kernel_of(kind: str, of: nn.RNNBase) -> HalfSequences:
    weights = [value.detach() for name, value in of.named_parameters() if "weight" in name]
    biases = [value.detach() for name, value in of.named_parameters() if "bias" in name]
    stored = [StoredWeight(weight.half(), None, None, None, None) for weight in weights]
    return HalfSequences(kind, Layout(of.num_layers, of.bidirectional, of.batch_first), stored, biases)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2}, {"bidirectional": True}, {"batch_first": True}, {"bias": False}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_sequences_are_those_of_torch_in_float(kind: str, options: dict[str, Any]) -> None:
    of = layer(kind, **options)
    count = of.num_layers * (2 if of.bidirectional else 1)
    x, state = torch.randn(4, 2, 5), [torch.randn(count, 4 if of.batch_first else 2, 3) for _ in range(2)]
    state = state if kind == "lstm" else state[:1]
    with torch.no_grad():
        sequence, last = of(x, tuple(state) if kind == "lstm" else state[0])
        found = kernel_of(kind, of)(x, *state)
    for one, other in zip(found, (sequence, *(last if kind == "lstm" else (last,))), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert one.is_contiguous()


def test_other_columns_are_refused_since_the_kernels_do_not_count() -> None:
    kernel, state = kernel_of("gru", layer("gru")), torch.zeros(1, 2, 3)
    with pytest.raises(InputError, match="5 columns"):
        kernel(torch.zeros(4, 2, 6), state)
    with pytest.raises(InputError, match="3 columns"):
        kernel(torch.zeros(4, 2, 5), torch.zeros(1, 2, 4))


def test_weights_that_float16_does_not_hold_cannot_be_loaded() -> None:
    kernel = kernel_of("gru", layer("gru"))
    state = kernel.state_dict()
    loaded = {name: value.float() + 1e-6 if name.endswith(".w") else value for name, value in state.items()}
    for held in kernel.stored:
        held.register_buffer("w", held.get_buffer("w").float())
    kernel.load_state_dict(loaded)
    with pytest.raises(ValueError, match="not exact in float16"):
        kernel(torch.zeros(4, 2, 5), torch.zeros(1, 2, 3))


def reason(of: nn.Module, spec: qc.QuantSpec = qc.FP16_WEIGHT) -> str:
    _, module = lowered(of, torch.randn(4, 2, 5), spec)
    assert not any(isinstance(kernel, HalfSequences) for kernel in kernels(module))
    return "; ".join(row.reason for row in module.placed)


def test_large_layers_of_a_program_run_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp16_recurrent, "MIN_WEIGHTS", 1)
    x: Tensor = torch.randn(4, 2, 5)
    of = layer("lstm")
    program, module = lowered(of, x, qc.FP16_WEIGHT)
    assert sum(isinstance(kernel, HalfSequences) for kernel in kernels(module)) == 1
    with torch.no_grad():
        expected = of(x)[0]
    torch.testing.assert_close(module(x)[0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(program(x)[0].detach(), expected, rtol=1e-4, atol=1e-5)


def test_small_layers_are_faster_in_float() -> None:
    assert "weights of the state float is faster" in reason(layer("lstm"))


def test_weights_with_a_scale_for_each_row_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp16_recurrent, "MIN_WEIGHTS", 1)
    assert "without a scale for each row" in reason(layer("gru"), qc.INT8_WEIGHT_ONLY)


def test_layers_that_project_their_state_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp16_recurrent, "MIN_WEIGHTS", 1)
    assert "projects its state" in reason(layer("lstm", proj_size=2))
