"""What `quantc inspect` says of a program, counted by hand on small graphs."""

from __future__ import annotations

import json

import torch
from torch import nn

import quantc as qc
from quantc.cli.inspect_summary import OpCount, summarize
from tests.support import cli_sources as sources
from tests.support.programs import small_net


def test_nodes_ops_numbers_and_bytes_are_counted() -> None:
    found = summarize(small_net())
    assert (found.name, found.stage, found.mode) == ("Net", "canonical", "eval")
    # x, three constants, four calls, and the output
    assert found.nodes == 9
    assert found.ops == tuple(OpCount(op, 1, "canonical") for op in ("batch_norm", "conv2d", "dropout", "relu"))
    assert found.parameters == 54
    assert found.bytes == 54 * 4 + 2 * 4 + 2 * 4 + 8  # the weight, mean and variance, and a counter
    assert (found.opaque, found.graphs, found.warnings) == ((), (), ())


def test_the_commonest_op_comes_first() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Tanh(), nn.ReLU())
    found = summarize(qc.capture(model, (torch.randn(2, 3),), "fx"))
    assert [(row.op, row.count) for row in found.ops] == [("relu", 3), ("linear", 1), ("tanh", 1)]


def test_a_tied_weight_counts_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    found = summarize(qc.capture(model, (torch.randn(2, 3),), "fx"))
    assert (found.parameters, found.bytes) == (9, 36)


def test_ops_of_the_integer_form_are_known_as_such() -> None:
    prepared = qc.prepare(sources.any_size(), "qnnpack")
    qc.calibrate(prepared, sources.batches())
    found = summarize(qc.convert(prepared, "integer"))
    kinds = {row.op: row.kind for row in found.ops}
    assert "integer" in kinds.values()
    assert all("quantc" in op or "linear" in op for op, kind in kinds.items() if kind == "integer")


def test_modules_that_are_kept_whole_are_opaque() -> None:
    model, inputs = sources.plain()
    found = summarize(qc.capture(model, inputs, leaf="1"))
    (told,) = found.opaque
    assert "1" in told
    assert [row.kind for row in found.ops if row.kind == "opaque"] == ["opaque"]


def test_notes_of_the_capture_say_why_and_all_of_it_is_json() -> None:
    found = summarize(qc.capture(sources.alone))
    assert "no example inputs" in found.why
    data = json.loads(json.dumps(found.to_json()))
    assert data["why"] == found.why
    assert data["ops"][0] == {"op": "linear", "count": 1, "kind": "canonical"}
    assert summarize(small_net()).why == ""
