"""Recordings keep every tensor, and `none` keeps nothing but a count."""

from __future__ import annotations

import pytest
import torch

from quantc.errors import DataError, LoadError, ObservationError, SpecError
from quantc.observe import Nothing, Recording, State
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.numerics import qparams_of
from quantc.spec.spec import INT8
from tests.support.observations import observed


def test_recordings_keep_the_tensors() -> None:
    spec = INT8.but(observe="recording")
    x = torch.randn(4)
    recording = observed(spec, [x, x + 1])
    x.zero_()
    kept = recording.to_state().tensors
    assert len(kept) == 2
    assert torch.equal(kept["0"] + 1, kept["1"])


def test_nothing_keeps_nothing() -> None:
    spec = INT8.but(observe="none")
    nothing = observed(spec, [torch.ones(3)]).merge(observed(spec, [torch.ones(4)]))
    assert nothing.seen == 7
    with pytest.raises(ObservationError, match="keeps no statistics"):
        nothing.qparams(spec)


def test_the_range_of_a_recording_is_that_of_all_its_tensors() -> None:
    spec = INT8.but(observe="recording")
    first, second = torch.tensor([[1.0, 2.0]]), torch.tensor([-3.0, 0.5, 1.0])
    both = torch.cat([first.reshape(-1), second])
    assert observed(spec, [first, second]).qparams(spec).equals(qparams_of(both, INT8))
    merged = observed(spec, [first]).merge(observed(spec, [second]))
    assert merged.qparams(spec).equals(qparams_of(both, INT8))
    assert [tuple(x.shape) for x in merged.to_state().tensors.values()] == [(1, 2), (3,)]


def test_a_recording_is_read_back_tensor_by_tensor() -> None:
    recording = observed(INT8.but(observe="recording"), [torch.tensor([1.0]), torch.tensor([[2.0, 3.0]])])
    loaded = Recording.from_state(PerTensor(), recording.to_state())
    assert [x.tolist() for x in loaded.tensors] == [[1.0], [[2.0, 3.0]]]
    assert (loaded.seen, loaded.non_finite) == (3, 0)


def test_a_recording_that_lost_a_tensor_is_refused() -> None:
    state = observed(INT8.but(observe="recording"), [torch.ones(1), torch.ones(2)]).to_state()
    with pytest.raises(LoadError, match="'records'"):
        Recording.from_state(PerTensor(), State({"0": state.tensors["0"]}, state.values))
    with pytest.raises(LoadError, match="'1'"):
        Recording.from_state(PerTensor(), State({"0": torch.ones(1), "2": torch.ones(1)}, {"records": 2}))


def test_integers_are_not_recorded() -> None:
    recording = Recording.empty(PerTensor(), {})
    with pytest.raises(DataError, match="int64"):
        recording.update(torch.ones(2, dtype=torch.int64), where="argmax:out0")
    assert recording.tensors == []


def test_neither_has_options_or_merges_with_another_granularity() -> None:
    for kind in (Recording, Nothing):
        with pytest.raises(SpecError, match="'rate'"):
            kind.empty(PerTensor(), {"rate": 0.5})
    with pytest.raises(ObservationError, match="cannot be merged"):
        Nothing.empty(PerTensor(), {}).merge(Nothing.empty(PerChannel(axis=0), {}))


def test_a_count_is_all_that_is_read_back_of_nothing() -> None:
    assert Nothing.from_state(PerTensor(), State({}, {"seen": 12})).seen == 12
    with pytest.raises(LoadError, match="'seen'"):
        Nothing.from_state(PerTensor(), State({}, {"seen": -1}))
