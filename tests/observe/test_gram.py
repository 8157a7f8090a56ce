"""Gram matrices against float64 ones of NumPy, of the very rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from quantc.errors import LoadError, ObservationError, SpecError
from quantc.observe.gram import Gram
from quantc.observe.outer_products import PANEL
from quantc.spec.observation import State
from tests.support.laws import law
from tests.support.statistics import Batch, batches, statistic


def reference(data: list[Batch]) -> np.ndarray:
    rows = np.concatenate([x.numpy().astype(np.float64) for _, x in data], axis=1)
    found: np.ndarray = np.matmul(rows.transpose(0, 2, 1), rows)
    return found


@law(60)
@given(batches())
def test_the_relative_error_is_that_of_15_bits(data: list[Batch]) -> None:
    found = statistic("gram", data)
    assert isinstance(found, Gram)
    if not found.seen:
        return
    expected = reference(data)
    norms = np.sqrt(np.einsum("gii->gi", expected))
    most = max(x.shape[1] for _, x in data)
    # each value is off by at most 2^-15 of its channel's largest, which the norm of the channel bounds
    bound = norms[:, :, None] * norms[:, None, :] * (len(data) * most * 2.0**-14 + 2.0**-20)
    assert (np.abs(found.matrix().numpy() - expected) <= bound).all()


def test_a_stated_error_on_heavy_tails() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_t(2, (1, 20000, 300)).astype(np.float32) * np.logspace(-3, 3, 300, dtype=np.float32)
    data = [(n, torch.from_numpy(part.copy())) for n, part in enumerate(np.array_split(rows, 7, axis=1))]
    found = statistic("gram", data)
    assert isinstance(found, Gram)
    matrix = found.matrix().numpy()
    expected = reference(data)
    norms = np.sqrt(np.einsum("gii->gi", expected))
    assert (np.abs(matrix - expected) / (norms[:, :, None] * norms[:, None, :])).max() < 1e-4
    assert (matrix == matrix.transpose(0, 2, 1)).all()
    assert np.allclose(found.mean().numpy(), rows.mean(1, dtype=np.float64), atol=1e-4 * np.abs(rows).max(1))
    covariance = np.cov(rows[0].astype(np.float64), rowvar=False, bias=True)
    error = np.abs(found.covariance()[0].numpy() - covariance)
    assert (error / np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))).max() < 1e-4


def test_more_channels_than_a_panel() -> None:
    generator = torch.Generator().manual_seed(0)
    width = 2 * PANEL + 3
    data = [(n, torch.randn(2, 20, width, generator=generator) * 10.0 ** (3 * n)) for n in range(3)]
    parts = [statistic("gram", [row]) for row in data]
    found = parts[2].merge(parts[0]).merge(parts[1])
    assert isinstance(found, Gram)
    expected = reference(data)
    norms = np.sqrt(np.einsum("gii->gi", expected))
    assert (np.abs(found.matrix().numpy() - expected) / (norms[:, :, None] * norms[:, None, :])).max() < 2e-4


def test_memory_is_that_of_one_matrix() -> None:
    found = statistic("gram", [(0, torch.randn(1, 4, 2000))])
    assert sum(x.nbytes for x in found.to_state().tensors.values()) < 1.1 * 8 * 2000**2


def test_refusals() -> None:
    with pytest.raises(ObservationError, match="nothing was observed"):
        Gram.empty({}).matrix()
    with pytest.raises(SpecError, match="no option"):
        Gram.empty({"rows": 3})
    found = statistic("gram", [(0, torch.randn(1, 4, 6))])
    with pytest.raises(ObservationError, match="6 channels cannot take in 8 channels"):
        found.update(torch.randn(1, 4, 8), batch=1)
    with pytest.raises(ObservationError, match="cannot be merged with moments"):
        found.merge(statistic("moments", []))


def test_damaged_states() -> None:
    state = statistic("gram", [(0, torch.randn(1, 4, 6))]).to_state()
    digits = state.tensors["lower"]
    for damaged in (digits + 0.5, digits * float("nan"), digits[:, :6], digits.float()):
        with pytest.raises(LoadError, match="lower"):
            Gram.from_state(State({**state.tensors, "lower": damaged}, state.values))
    with pytest.raises(LoadError, match="exponents"):
        Gram.from_state(State({**state.tensors, "exponents": state.tensors["exponents"] + 1000}, state.values))
    with pytest.raises(LoadError, match="no tensors"):
        Gram.from_state(State({}, {"seen": 3}))
