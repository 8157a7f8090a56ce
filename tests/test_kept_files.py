"""Programs, statistics and state dicts that an earlier version wrote are read, and give the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
