"""The registry of statistics, open to other packages."""

from __future__ import annotations

import pytest

from quantc.errors import PluginError
from quantc.observe.statistic_registry import STATISTICS
from quantc.spec.statistic import Statistic


def test_all_of_quantcs_own_are_there() -> None:
    assert set(STATISTICS.names()) >= {"moments", "gram", "cross-gram", "fisher", "reservoir", "tokens"}
    for name in STATISTICS.names():
        kind = STATISTICS[name]
        assert kind.statistics == name
        assert isinstance(kind.empty({}), Statistic)


def test_what_is_no_statistic_is_refused() -> None:
    with pytest.raises(PluginError, match="it lacks empty"):
        STATISTICS.register("mine", object)  # type: ignore[arg-type]
