"""Observers of a graph as data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import LoadError
from quantc.ir.program import Program
from quantc.observe.module import observer_nodes
from quantc.passes.insert_observers import InsertObservers
from quantc.pipeline.pipeline import Pipeline
from quantc.store.stored_observers import ObserverData, observer_data, put_observers, with_observed
from quantc.text.digests import constants

X = torch.linspace(-1, 2, 8).reshape(2, 4)


@pytest.fixture
def observed() -> Program:
    prepared = qc.prepare(qc.capture(nn.Linear(4, 4).eval(), (X,)), "x86")
    return Pipeline((InsertObservers(),)).run_on_copy(prepared)


def rows(program: Program) -> dict[str, ObserverData]:
    return observer_data(program, {node: node.name for node in program.nodes()})


def test_observers_come_back_with_what_they_saw(observed: Program) -> None:
    observed(X)
    modules = {node.name: module for node, module in observer_nodes(observed).items()}
    next(iter(modules.values())).enabled = False
    assert {name: (row.group, row.enabled) for name, row in rows(observed).items()} == {
        name: (module.group, module.enabled) for name, module in modules.items()
    }
    assert all(seen.seen > 0 for seen in with_observed(observed).statistics.values())
    twin = qc.parse(str(observed), constants(observed))
    assert rows(twin) == rows(observed)
    again = {node.name: module for node, module in observer_nodes(twin).items()}
    assert all(again[name].observation.seen == module.observation.seen for name, module in modules.items())


def test_observers_of_nothing_are_refused(observed: Program) -> None:
    (name, row), *_ = rows(observed).items()
    nodes = {node.name: node for node in observed.nodes()}
    with pytest.raises(LoadError, match="no node calls this observer"):
        put_observers(observed, {"nowhere": row}, nodes)
    with pytest.raises(LoadError, match="no statistics of the group 'other'"):
        put_observers(observed, {name: row.model_copy(update={"group": "other"})}, nodes)
    with pytest.raises(LoadError, match="two nodes call the observer"):
        put_observers(observed, {name: row}, nodes)  # it is there already
