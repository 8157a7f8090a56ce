"""Models that change Python attributes: what changed is listed, put back, and tried for its effect on results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.capture.statefulness import depends_on_earlier_calls, keep_attributes, watch


class Counted(nn.Module):
    """Counts its calls, which its results do not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[int] = []
        self.options: dict[str, Any] = {"deep": {"er": [0]}}
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        out: Tensor = self.inner(x)
        return out


class Scaled(Counted):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Cached(nn.Module):
    """Gives the mean of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before, self.last = self.last, x[0]
        return x if before is None else x + before


class Buffered(nn.Module):
    """State that a program can hold."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x * self.count


class Once(nn.Module):
    """Makes a table at the first call, always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(2.0)
        return x + self.table


X = torch.arange(6.0).reshape(3, 2)


@pytest.mark.parametrize(
    ("kind", "depends"), [(Counted, False), (Scaled, True), (Cached, True), (Buffered, False), (Once, False)]
)
def test_results_that_depend_on_earlier_calls_are_found(kind: type[nn.Module], depends: bool) -> None:
    model = kind()
    state = torch.get_rng_state()
    assert depends_on_earlier_calls(model, (X,), {}) is depends
    assert torch.equal(torch.get_rng_state(), state)
    if isinstance(model, Counted):
        assert model.calls == 0  # it was tried on copies


def test_random_results_are_drawn_alike_and_failing_models_depend_on_nothing() -> None:
    assert not depends_on_earlier_calls(nn.Dropout(0.5).train(), (X,), {})
    assert not depends_on_earlier_calls(nn.Linear(7, 2), (X,), {})


def test_attributes_that_a_call_changes_are_listed_by_name() -> None:
    model = nn.Sequential(Counted(), nn.ReLU())
    changed = watch(model)
    assert changed == []
    model(X)
    assert changed == ["0.calls", "0.seen"]
    model(X)
    assert changed == ["0.calls", "0.seen"]


def test_changes_deep_inside_are_found_and_equal_values_are_none() -> None:
    class Deep(Counted):
        def forward(self, x: Tensor) -> Tensor:
            self.options["deep"]["er"][0] = 1
            self.calls = 0  # as before
            return x

    model = Deep()
    changed = watch(model)
    model(X)
    assert changed == ["options"]


def test_plain_attributes_are_put_back_after_an_error_too() -> None:
    model = Counted()
    seen, inner = model.seen, model.inner
    with keep_attributes(model):
        model(X)
        model.fresh = 3  # type: ignore[assignment]
        del model.options["deep"]
    assert (model.calls, model.seen, model.options) == (0, [], {"deep": {"er": [0]}})
    assert model.seen is seen
    assert model.inner is inner
    assert not hasattr(model, "fresh")
    with pytest.raises(RuntimeError), keep_attributes(model):
        model(torch.ones(3, 7))
    assert (model.calls, model.seen) == (0, [])
