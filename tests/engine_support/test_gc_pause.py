"""The garbage collector is paused in a context and as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from quantc.support.gc_pause import paused_collector


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    gc.enable()


def test_collection_is_off_inside_and_on_again_outside() -> None:
    gc.enable()
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            pass
        assert not gc.isenabled(), "the inner one leaves it as it found it"
    assert gc.isenabled()


def test_who_had_it_off_keeps_it_off() -> None:
    gc.disable()
    with paused_collector():
        pass
    assert not gc.isenabled()


def test_an_error_inside_turns_it_on_again() -> None:
    gc.enable()
    with pytest.raises(ValueError, match="inside"), paused_collector():
        raise ValueError("inside")
    assert gc.isenabled()
