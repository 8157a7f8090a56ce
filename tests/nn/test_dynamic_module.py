"""Dynamic modules compute what torch.ao's do, on the same scales; their state dicts go both ways."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.ao.nn.intrinsic as ao_intrinsic
import torch.ao.nn.intrinsic.quantized.dynamic as ao_intrinsic_dynamic
import torch.ao.nn.quantized as ao_quantized
import torch.ao.nn.quantized.dynamic as ao_dynamic
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from quantc.errors import MixedTensorsError, SpecError
from quantc.nn import intrinsic, quantize_per_tensor, quantized, torch_state_dict
from quantc.nn import qconfig as qconfigs
from quantc.nn.intrinsic.quantized import dynamic as intrinsic_dynamic
from quantc.nn.quantized import dynamic
from tests.support.nn_cases import engine, seeded

MODULES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(24, 10), (5, 24)),
    "Linear-3": (lambda: nn.Linear(24, 10, bias=False), (2, 5, 24)),
    "Linear-1": (lambda: nn.Linear(24, 10), (24,)),
    "LSTM": (lambda: nn.LSTM(8, 12, 2), (6, 3, 8)),
    "LSTM-both": (lambda: nn.LSTM(8, 12, batch_first=True, bidirectional=True), (3, 6, 8)),
    "GRU": (lambda: nn.GRU(8, 12), (6, 3, 8)),
    "LSTMCell": (lambda: nn.LSTMCell(8, 12), (3, 8)),
    "GRUCell": (lambda: nn.GRUCell(8, 12), (3, 8)),
    "RNNCell": (lambda: nn.RNNCell(8, 12), (3, 8)),
    "RNNCell-relu": (lambda: nn.RNNCell(8, 12, nonlinearity="relu"), (3, 8)),
}
QCONFIGS = {"int8": qconfigs.default_dynamic_qconfig, "half": qconfigs.float16_dynamic_qconfig}
ENGINES = [("x86", "int8"), ("x86", "half"), ("qnnpack", "int8")]


def _pair(name: str, kind: str) -> tuple[Any, Any, nn.Module]:
    made: nn.Module = seeded(MODULES[name][0])().eval()
    made.qconfig = QCONFIGS[kind]  # type: ignore[assignment]
    short = name.partition("-")[0]
    return getattr(dynamic, short).from_float(made), getattr(ao_dynamic, short).from_float(made), made


def flat(value: Any) -> list[Tensor]:
    return [tensor for item in value for tensor in flat(item)] if isinstance(value, tuple) else [value]


def furthest(ours: Any, theirs: Any) -> float:
    return max(float((mine - other).abs().max()) for mine, other in zip(flat(ours), flat(theirs), strict=True))


@pytest.mark.parametrize(("engine_name", "kind"), ENGINES)
@pytest.mark.parametrize("name", MODULES)
def test_results_are_torchs(name: str, engine_name: str, kind: str) -> None:
    with engine(engine_name):
        ours, theirs, made = _pair(name, kind)
        x = torch.randn(MODULES[name][1])
        found = ours(x)
        wanted = theirs(x) if x.dim() > 1 else theirs(x[None])[0]
        assert furthest(found, wanted) < 1e-5
        assert furthest(found, made(x)) < 0.1


@pytest.mark.parametrize(("engine_name", "kind"), ENGINES)
@pytest.mark.parametrize("name", MODULES)
def test_state_dicts_go_both_ways(name: str, engine_name: str, kind: str) -> None:
    with engine(engine_name):
        ours, theirs, _ = _pair(name, kind)
        x = torch.randn(MODULES[name][1] if name != "Linear-1" else (1, 24))
        wanted, their_wanted = ours(x), theirs(x)
        other, their_other = copy.deepcopy(ours), copy.deepcopy(theirs)
        for tensor in other.state_dict().values():
            tensor.fill_(1)
        other.kernels.clear()
        assert furthest(other(x), wanted) > 0
        other.load_state_dict(theirs.state_dict())
        assert furthest(other(x), wanted) == 0
        their_other.load_state_dict(torch_state_dict(ours))
        assert furthest(their_other(x), their_wanted) == 0


@pytest.mark.parametrize("kind", QCONFIGS)
@pytest.mark.parametrize("name", MODULES)
def test_files(name: str, kind: str, tmp_path: Path) -> None:
    ours, _, _ = _pair(name, kind)
    x = torch.randn(MODULES[name][1])
    wanted = ours(x)
    safetensors.torch.save_file(ours.state_dict(), tmp_path / "state.safetensors")
    other = copy.deepcopy(ours)
    for tensor in other.state_dict().values():
        tensor.fill_(1)
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "state.safetensors"))
    assert furthest(other(x), wanted) == 0


def test_a_file_of_int8_loads_into_a_module_of_halves() -> None:
    ints, _, _ = _pair("Linear", "int8")
    halves, _, _ = _pair("Linear", "half")
    x = torch.randn(5, 24)
    halves.load_state_dict(ints.state_dict())
    assert torch.equal(halves(x), ints(x))
    fresh = _pair("Linear", "half")[0]
    ints.load_state_dict(fresh.state_dict())
    assert torch.equal(ints(x), fresh(x))


@pytest.mark.parametrize("kind", QCONFIGS)
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences(name: str, kind: str, enforce_sorted: bool) -> None:
    with engine("x86"):
        ours, theirs, _ = _pair(name, kind)
        lengths = [6, 4, 1] if enforce_sorted else [1, 6, 4]
        x = pack_padded_sequence(torch.randn(6, 3, 8), lengths, enforce_sorted=enforce_sorted)
        layers = ours.num_layers
        state = [torch.randn(layers, 3, 12) for _ in range(ours.states)]
        hx = tuple(state) if len(state) > 1 else state[0]
        for args in ((x,), (x, hx)):
            (mine, last), (other, their_last) = ours(*args), theirs(*args)
            assert furthest(mine.data, other.data) < 1e-6
            assert furthest(last, their_last) < 1e-6


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize("kind", QCONFIGS)
def test_plain_recurrent_layers(nonlinearity: str, kind: str) -> None:
    """torch.ao has none: they are close to float, and a layer is its cell, step by step."""
    torch.manual_seed(0)
    layer = nn.RNN(8, 12, nonlinearity=nonlinearity).eval()
    layer.qconfig = QCONFIGS[kind]
    made = dynamic.RNNBase.from_float(layer)
    x = torch.randn(6, 3, 8)
    found, last = made(x)
    assert furthest(found, layer(x)[0]) < 0.05
    assert torch.equal(found[-1], last[0])
    assert made.mode == f"RNN_{nonlinearity.upper()}"


def test_linear_that_ends_in_a_relu() -> None:
    with engine("x86"):
        inner = nn.Linear(24, 10)
        inner.qconfig = qconfigs.per_channel_dynamic_qconfig  # type: ignore[assignment]
        pair: list[Any] = [kind(inner, nn.ReLU()) for kind in (intrinsic.LinearReLU, ao_intrinsic.LinearReLU)]
        mine, other = pair
        mine.qconfig = other.qconfig = inner.qconfig
        ours, theirs = intrinsic_dynamic.LinearReLU.from_float(mine), ao_intrinsic_dynamic.LinearReLU.from_float(other)
        x = torch.randn(5, 24)
        assert furthest(ours(x), theirs(x)) < 1e-5
        assert float(ours(x).min()) == 0


@pytest.mark.parametrize("name", ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d"])
def test_convolutions(name: str) -> None:
    """torch.ao's find other scales, so both are measured by float: ours are no further from it."""
    with engine("fbgemm"):
        torch.manual_seed(0)
        made = getattr(nn, name)(4, 6, 3)
        made.qconfig = qconfigs.default_dynamic_qconfig
        ours, theirs = getattr(dynamic, name).from_float(made), getattr(ao_dynamic, name).from_float(made)
        x = torch.randn(2, 4, *[7] * int(name[-2]))
        wanted = made(x)
        assert furthest(ours(x), wanted) <= 1.5 * furthest(theirs(x), wanted)
        ours.load_state_dict(theirs.state_dict())
        theirs.load_state_dict(torch_state_dict(ours))
        assert "dynamic" in repr(ours)


@pytest.mark.parametrize("dtype", ["quint8", "quint4x2"])
def test_embeddings(dtype: str) -> None:
    with engine("x86"):
        torch.manual_seed(0)
        four = qconfigs.float_qparams_weight_only_qconfig_4bit
        qconfig = qconfigs.float_qparams_weight_only_qconfig if dtype == "quint8" else four
        indices, offsets = torch.randint(20, (13,)), torch.tensor([0, 4, 4, 9])
        table = nn.Embedding(20, 16)
        table.qconfig = qconfig  # type: ignore[assignment]
        ours = quantized.Embedding.from_float(table)
        step = ours.weight().q_per_channel_scales().max()
        assert float((ours(indices) - table(indices)).abs().max()) <= float(step) * 0.51
        if dtype == "quint8":
            theirs = ao_quantized.Embedding.from_float(table)  # type: ignore[no-untyped-call]
            assert torch.allclose(ours(indices), theirs(indices), atol=1e-6)
            other = quantized.Embedding(20, 16)
            other.load_state_dict(theirs.state_dict())
            assert torch.equal(other(indices), ours(indices))
            theirs.load_state_dict(torch_state_dict(ours))
        for mode in ("sum", "mean", "max"):
            bag = nn.EmbeddingBag(20, 16, mode=mode)
            bag.qconfig = qconfig  # type: ignore[assignment]
            made = quantized.EmbeddingBag.from_float(bag)
            copied = nn.EmbeddingBag(20, 16, mode=mode, _weight=made.weight().dequantize())
            assert torch.allclose(made(indices, offsets), copied(indices, offsets), atol=1e-5)
            assert torch.allclose(made(indices[:12].view(3, 4)), copied(indices[:12].view(3, 4)), atol=1e-5)


def test_what_does_not_go_together() -> None:
    ours, _, _ = _pair("Linear", "int8")
    with pytest.raises(MixedTensorsError, match=r"(?s)Linear takes floats.*DeQuantStub"):
        ours(quantize_per_tensor(torch.randn(5, 24), 0.1, 3))
    projecting = nn.LSTM(4, 8, proj_size=2)
    with pytest.raises(SpecError, match="project"):
        dynamic.LSTM.from_float(projecting)
    with pytest.raises(SpecError, match="no recurrent layer 'RNN'"):
        dynamic.RNNBase("RNN", 1, 2)
    ours.train()
    assert not ours.training


@pytest.mark.parametrize("kind", QCONFIGS)
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_recurrent_layers_without_bias_of_one_sequence_from_a_state(name: str, kind: str) -> None:
    """What torch.ao refuses, held to float."""
    torch.manual_seed(0)
    layer = getattr(nn, name)(8, 12, 2, bias=False, dropout=0.5).eval()
    layer.qconfig = QCONFIGS[kind]
    made = getattr(dynamic, name).from_float(layer)
    state = [torch.randn(2, 3, 12) for _ in range(made.states)]
    for x, parts in ((torch.randn(6, 3, 8), state), (torch.randn(6, 8), [part[:, 0] for part in state])):
        hx = tuple(parts) if len(parts) > 1 else parts[0]
        assert furthest(made(x, hx), layer(x, hx)) < 0.1
        assert furthest(made(x), layer(x)) < 0.1
    cell = getattr(nn, f"{name}Cell")(8, 12, bias=False)
    cell.qconfig = QCONFIGS[kind]
    step = getattr(dynamic, f"{name}Cell").from_float(cell)
    assert furthest(step(torch.ones(8)), cell(torch.ones(8))) < 0.1


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("engine_name", ["x86", "qnnpack"])
def test_what_is_not_finite_shows(engine_name: str, value: float) -> None:
    """torch.ao's kernels take it for some number."""
    with engine(engine_name):
        ours, _, _ = _pair("Linear", "int8")
        x = torch.randn(5, 24)
        assert ours(x).isfinite().all()
        x[2, 3] = value
        assert not ours(x).isfinite().any()
        large = torch.full((1, 24), 3e38)
        large[0, 1] = -3e38
        assert not ours(large).isfinite().any()
