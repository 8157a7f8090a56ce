"""All contenders on one model, beside those that fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.bench.contender_build import Built
from quantc.bench.contenders import Contender, chosen
from quantc.bench.measure import Outcome, measure, why
from quantc.bench.models import Task
from quantc.bench.race import EAGER
from quantc.errors import QuantcError
from tests.support.bench_tasks import tiny_task


def silent(_: str) -> None:
    """Nobody wants to know."""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    def broken(_: Task) -> Built:
        raise ValueError("first line\nsecond line")

    def elsewhere(task: Task) -> Built:
        return Built(lambda *inputs: task.model(*inputs)[:1], None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTC_CACHE", str(tmp_path_factory.mktemp("cache")))
        contenders = {
            **chosen(["quantc", "quantc-tuned", "quantc-dynamic", "fx-x86", "fx-fbgemm", "torch-dynamic"]),
            "broken": Contender("raises", broken),
            "elsewhere": Contender("yields half of it", elsewhere),
            "absent": Contender("needs more", broken, ("no_such_package",)),
        }
        return measure(tiny_task(), contenders, 2, tell=silent, with_floor=True)


def test_contenders_run_beside_those_that_fail(outcome: Outcome) -> None:
    rows = {row.contender: row for row in outcome.rows}
    assert rows["broken"].reason == "ValueError: first line"
    assert "another form or shape" in rows["elsewhere"].reason
    assert rows["absent"].reason == "no_such_package is not installed; pip install 'quantc[bench]'"
    failed = {"broken", "elsewhere", "absent"}
    for name, row in rows.items():
        assert (row.speed is None) == (name in failed)
        assert bool(row.reason) == (name in failed), row.reason
    for name in rows.keys() - failed - {EAGER}:
        sqnr, best = rows[name].sqnr, rows[name].milliseconds
        assert best is not None
        assert best > 0
        assert sqnr is not None
        assert sqnr > 20, name
    assert rows[EAGER].speed == rows[EAGER].size == 1.0
    assert set(outcome.floors) == {"quantc", "quantc-tuned", "quantc-dynamic"}
    sizes = [rows[name].size for name in ("quantc", "fx-x86")]
    assert all(size is not None and 0.2 < size < 0.5 for size in sizes), sizes


def test_a_model_that_does_not_run_is_an_error() -> None:
    task = Task("odd", nn.Linear(3, 4), [(torch.ones(2, 5),)], [(torch.ones(2, 5),)])
    with pytest.raises(QuantcError, match="the model itself does not run"):
        measure(task, chosen(["quantc"]), 1, tell=silent)


def test_tools_that_quantize_nothing_say_so() -> None:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.sin(x)

    inputs = [(torch.randn(2, 3),)]
    found = measure(Task("sine", Sine(), inputs, inputs), chosen(["quantc", "fx-x86", "torch-dynamic"]), 1, tell=silent)
    reasons = {row.contender: row.reason for row in found.rows}
    assert not reasons.pop(EAGER)
    assert all(reasons.values()), reasons
    assert "quantized nothing" in reasons["fx-x86"]
    assert "quantized nothing" in reasons["torch-dynamic"]


def test_errors_are_one_line() -> None:
    assert why(ValueError()) == "ValueError"
    assert why(QuantcError("what\nis it", advice="do  that")) == "what is it; do that"
    assert len(why(ValueError("x" * 999))) == 160
