"""The list of behaviours names tests that there are."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.support.fx_behaviour_list import FLOAT, REFUSED, TESTED, UNTESTED


@pytest.mark.parametrize("place", sorted(set(TESTED.values())))
def test_a_behaviour_is_tested_where_the_list_says(place: str) -> None:
    module, _, name = place.partition("::")
    assert callable(getattr(import_module(f"tests.flows.fx.{module}"), name))


def test_every_behaviour_is_listed_once() -> None:
    assert not set(TESTED) & set(UNTESTED)
    assert set(REFUSED) | set(FLOAT) <= set(TESTED)
    assert len(TESTED) - len(REFUSED) - len(FLOAT) >= 150
