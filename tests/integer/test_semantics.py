"""The table of integer semantics: one row for each op and technique, and every row in a module that is loaded."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from quantc.integer import semantics
from quantc.integer.match_lowering import Task
from quantc.integer.semantics import MODULES, computes, load, semantics_of
from quantc.ir.dialect import BY_NAME
from quantc.spec.formats import Timing

aten = torch.ops.aten


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    monkeypatch.setattr(semantics, "SEMANTICS", {})
    monkeypatch.setattr(semantics, "DYNAMIC", {})


def call(target: object) -> fx.Node:
    graph = fx.Graph()
    return graph.create_node("call_function", target, (graph.placeholder("x"),))  # type: ignore[arg-type]


def _write(task: Task) -> None:
    """Writes nothing."""


def test_a_row_serves_all_the_ops_it_names(empty: None) -> None:
    assert computes("relu", "tanh", formula="out = 0", deviation="much")(_write) is _write
    row = semantics_of(call(aten.tanh.default))
    assert row is not None
    assert row is semantics_of(call(aten.relu.default))
    assert (row.ops, row.formula, row.deviation, row.write) == (("relu", "tanh"), "out = 0", "much", _write)
    assert semantics_of(call(aten.neg.default)) is None


def test_an_op_has_one_row_for_each_technique(empty: None) -> None:
    computes("relu", formula="static")(_write)
    computes("relu", formula="dynamic", timing=Timing.DYNAMIC)(_write)
    with pytest.raises(ValueError, match="relu has two rows"):
        computes("tanh", "relu", formula="again")(_write)
    formulas = [row.formula for timing in Timing if (row := semantics_of(call(aten.relu.default), timing)) is not None]
    assert sorted(formulas) == ["dynamic", "static", "static"]  # weight-only ops use the static rows


def test_every_row_comes_from_a_module_that_is_loaded() -> None:
    load()
    rows = {id(row): row for table in (semantics.SEMANTICS, semantics.DYNAMIC) for row in table.values()}
    written_in = {row.write.__module__.removeprefix("quantc.integer.") for row in rows.values()}
    assert written_in <= set(MODULES)
    assert {"lowerings.lower_products", "lowerings.lower_dynamic", "lowerings.lower_moves"} <= written_in
    for row in rows.values():
        assert row.formula
        assert all(name in BY_NAME or name.startswith("aten.") for name in row.ops), row.ops


def test_products_have_both_techniques_and_curves_the_static_one_alone() -> None:
    load()
    for name in ("linear", "conv2d", "matmul", "addmm"):
        assert semantics.SEMANTICS[name] is not semantics.DYNAMIC[name]
        assert semantics.DYNAMIC[name].timing is Timing.DYNAMIC
    assert "gelu" in semantics.SEMANTICS
    assert "gelu" not in semantics.DYNAMIC
