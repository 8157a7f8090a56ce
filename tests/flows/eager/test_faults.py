"""What can be wrong with an eager model, by name: raised all together, or warned of where it is meant."""

from __future__ import annotations

import pytest

from quantc.errors import ConfigError
from quantc.flows import eager
from quantc.flows.eager.faults import MODE, REUSED, Fault, accepted_checks, as_error, settle
from tests.support.eager_small import small


def test_an_unknown_fault_cannot_be_accepted() -> None:
    for call in (eager.prepare, eager.convert):
        with pytest.raises(ConfigError, match="reused") as caught:
            call(small(), accept="reused")
        assert "reused-layer" in str(caught.value.advice)


def test_names_are_accepted_one_or_many() -> None:
    assert accepted_checks("mode") == {"mode"}
    assert accepted_checks(("mode", "no-data", "mode")) == {"mode", "no-data"}
    assert accepted_checks(()) == frozenset()
    assert set(eager.CHECKS) == {"reused-layer", "missing-stub", "no-data", "mode", "no-effect"}


def test_faults_of_the_first_kind_are_raised_together() -> None:
    found = [Fault(REUSED, "a", "ran twice"), Fault(MODE, "", "it learns"), Fault(REUSED, "b", "ran thrice")]
    with pytest.raises(eager.ReusedLayerError) as caught:
        settle(found)
    assert [fault.path for fault in caught.value.faults] == ["a", "b"]
    assert caught.value.where == "a, b"
    assert "a: ran twice; b: ran thrice" in str(caught.value)
    with pytest.raises(eager.EagerModeError, match="it learns") as other:
        settle(found, "reused-layer")
    assert other.value.where == "the model itself"


def test_faults_that_are_all_meant_are_one_warning_for_each_kind() -> None:
    found = [Fault(REUSED, "a", "ran twice"), Fault(MODE, "b", "it learns"), Fault(MODE, "c", "it learns")]
    with pytest.warns(eager.EagerWarning) as caught:
        settle(found, ("mode", "reused-layer"))
    assert [str(one.message) for one in caught] == [
        "reused-layer, accepted: a: ran twice",
        "mode, accepted: b: it learns; c: it learns",
    ]


def test_what_is_the_same_everywhere_is_said_once() -> None:
    error = as_error([Fault(MODE, "b", "it learns", "stop it"), Fault(MODE, "c", "it learns", "stop it")])
    assert str(error).count("it learns") == 1
    assert error.advice == "stop it; if it is meant, accept='mode'"
    assert as_error(error.faults, can_accept=False).advice == "stop it"
