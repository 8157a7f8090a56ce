"""Programs, statistics and state dicts that an earlier version wrote are read, and give the same bits."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import quantc as qc
from tests.support.kept_files import FOLDER, MODELS, PROGRAMS, STATISTICS, expected, images, prepared


@pytest.mark.parametrize("name", PROGRAMS)
@torch.no_grad()
def test_programs_are_read(name: str) -> None:
    loaded: Any = qc.load(FOLDER / f"{name}.qc")
    torch.testing.assert_close(loaded(images(9)), expected()[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", STATISTICS)
@torch.no_grad()
def test_statistics_are_used(name: str) -> None:
    made = prepared(name)
    qc.use_statistics(made, FOLDER / f"{name}.statistics")
    torch.testing.assert_close(qc.convert(made)(images(9)), expected()[f"{name}.statistics"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_state_dicts_are_loaded_into_a_model_of_other_weights(name: str) -> None:
    model = MODELS[name](1)
    wanted = expected()[f"{name}.pt"]
    assert not torch.allclose(model(images(9)), wanted, atol=1e-3)
    model.load_state_dict(torch.load(FOLDER / f"{name}.pt", weights_only=True))
    torch.testing.assert_close(model(images(9)), wanted, rtol=1e-6, atol=1e-6)


PICKLED: dict[str, bytes] = torch.load(FOLDER / "pickles.pt")


@pytest.mark.parametrize("name", PICKLED)
@pytest.mark.filterwarnings("ignore:quantc.* has moved:DeprecationWarning")
@torch.no_grad()
def test_pickles_are_read(name: str) -> None:
    """Models, programs, specs, configs and plans, pickled when their classes were elsewhere."""
    made: Any = pickle.loads(PICKLED[name])  # noqa: S301 - our own bytes
    if name == "onnx" or not callable(made) or isinstance(made, type):
        return
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(torch.as_tensor(made(x)), float_model()(x), rtol=0, atol=0.1)


def float_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
