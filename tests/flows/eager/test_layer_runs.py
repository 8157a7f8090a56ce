"""What a prepared model was seen to do: how often layers run, and which reads what another yields."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from quantc.flows import eager
from quantc.flows.eager.layer_runs import Ledger, ledger_of, unwatch, watch
from tests.support.eager_small import X, hooks, run, small


def test_prepared_models_copy_and_pickle() -> None:
    prepared = run(eager.prepare(small()))
    for twin in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):  # noqa: S301 - our own
        run(twin)
        assert torch.equal(eager.convert(twin)(X), eager.convert(prepared)(X))


class Loops(nn.Module):
    """Runs a layer as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(2, 2), nn.ReLU()

    def forward(self, x: Tensor, times: int = 1) -> Any:
        x = self.first(x)
        for _ in range(times):
            x = self.again(x)
        return x


def watched() -> tuple[Loops, Ledger]:
    model = Loops()
    return model, watch(model, dict(model.named_children()))


def test_calls_are_counted_for_each_run_of_the_model_and_the_most_is_kept() -> None:
    model, ledger = watched()
    for times in (1, 3, 2):
        model(torch.ones(1, 2), times=times)
    assert ledger.runs == 3
    assert ledger.most_calls == {"first": 1, "again": 3}
    assert ledger.calls["again"] == 2


def test_who_reads_what_another_yields_is_known() -> None:
    model, ledger = watched()
    model(torch.ones(1, 2), times=0)
    assert ledger.read_by == {}
    model(torch.ones(1, 2))
    assert ledger.read_by == {"first": "again"}


def test_a_tensor_of_an_earlier_run_is_nobodys() -> None:
    model, ledger = watched()
    kept = model(torch.ones(1, 2), times=0)
    model.again(kept)
    assert ledger.read_by == {"first": "again"}
    other, fresh = watched()
    kept = other(torch.ones(1, 2), times=0)
    fresh.begin((), {})
    other.again(kept)
    assert fresh.read_by == {}


def test_the_last_arguments_are_kept_and_copied_but_not_written_to_files() -> None:
    model, ledger = watched()
    x = torch.ones(1, 2)
    model(x, times=2)
    assert ledger.inputs == ((x,), {"times": 2})
    twin = copy.deepcopy(ledger)
    assert twin.inputs == ledger.inputs
    twin.most_calls["again"] = 9
    assert ledger.most_calls["again"] == 2
    read: Ledger = pickle.loads(pickle.dumps(ledger))  # noqa: S301 - our own
    assert read.inputs is None
    assert (read.runs, read.most_calls) == (1, ledger.most_calls)


def test_a_copy_of_a_watched_model_keeps_a_ledger_of_its_own() -> None:
    model, ledger = watched()
    twin = copy.deepcopy(model)
    twin(torch.ones(1, 2))
    found = ledger_of(twin)
    assert found is not ledger
    assert isinstance(found, Ledger)
    assert (ledger.runs, found.runs) == (0, 1)


def test_watching_ends_and_hooks_of_users_stay() -> None:
    model, ledger = watched()
    model.first.register_forward_hook(lambda *_: None)
    unwatch(model)
    model(torch.ones(1, 2))
    assert ledger.runs == 0
    assert ledger_of(model) is None
    assert hooks(model) == 1
