"""Dynamic modules compute what torch.ao's do, on the same scales; their state dicts go both ways."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from quantc.errors import MixedTensorsError, SpecError
from quantc.nn import quantize_per_tensor, torch_state_dict
from quantc.nn.quantized import dynamic
from tests.support.dynamic_cases import ENGINES, MODULES, QCONFIGS, furthest, pair_of
from tests.support.nn_cases import engine


@pytest.mark.parametrize(("engine_name", "kind"), ENGINES)
@pytest.mark.parametrize("name", MODULES)
def test_results_are_torchs(name: str, engine_name: str, kind: str) -> None:
    with engine(engine_name):
        ours, theirs, made = pair_of(name, kind)
        x = torch.randn(MODULES[name][1])
        found = ours(x)
        wanted = theirs(x) if x.dim() > 1 else theirs(x[None])[0]
        assert furthest(found, wanted) < 1e-5
        assert furthest(found, made(x)) < 0.1


@pytest.mark.parametrize(("engine_name", "kind"), ENGINES)
@pytest.mark.parametrize("name", MODULES)
def test_state_dicts_go_both_ways(name: str, engine_name: str, kind: str) -> None:
    with engine(engine_name):
        ours, theirs, _ = pair_of(name, kind)
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
    ours, _, _ = pair_of(name, kind)
    x = torch.randn(MODULES[name][1])
    wanted = ours(x)
    safetensors.torch.save_file(ours.state_dict(), tmp_path / "state.safetensors")
    other = copy.deepcopy(ours)
    for tensor in other.state_dict().values():
        tensor.fill_(1)
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "state.safetensors"))
    assert furthest(other(x), wanted) == 0


def test_a_file_of_int8_loads_into_a_module_of_halves() -> None:
    ints, _, _ = pair_of("Linear", "int8")
    halves, _, _ = pair_of("Linear", "half")
    x = torch.randn(5, 24)
    halves.load_state_dict(ints.state_dict())
    assert torch.equal(halves(x), ints(x))
    fresh = pair_of("Linear", "half")[0]
    ints.load_state_dict(fresh.state_dict())
    assert torch.equal(ints(x), fresh(x))


def test_what_does_not_go_together() -> None:
    ours, _, _ = pair_of("Linear", "int8")
    with pytest.raises(MixedTensorsError, match=r"(?s)Linear takes floats.*DeQuantStub"):
        ours(quantize_per_tensor(torch.randn(5, 24), 0.1, 3))
    projecting = nn.LSTM(4, 8, proj_size=2)
    with pytest.raises(SpecError, match="project"):
        dynamic.LSTM.from_float(projecting)
    with pytest.raises(SpecError, match="unknown recurrent layer 'RNN'"):
        dynamic.RNNBase("RNN", 1, 2)
    ours.train()
    assert not ours.training
