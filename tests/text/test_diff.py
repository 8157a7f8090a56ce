"""Diffs of programs: what a pass did, renames, moves, and growth."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quantc.ir.program import Stage
from quantc.text.diff import Diff, diff
from quantc.text.parser import parse
from quantc.text.printer import dump
from tests.support.programs import Builder, Choice, aten, chain, exported, small_net


def kinds(difference: Diff) -> dict[str, int]:
    counts: dict[str, int] = {}
    for change in difference.changes:
        counts[change.kind] = counts.get(change.kind, 0) + 1
    return counts


def test_no_difference() -> None:
    program = small_net()
    difference = diff(program, program.clone())
    assert not difference
    assert str(difference) == "no difference (9 nodes)"
    assert difference.same == len(program.graph.nodes)


def test_origins_and_log_do_not_count() -> None:
    program, other = small_net(), small_net()
    other.origins.rows.clear()
    assert not program.diff(other)


def test_what_a_pass_did() -> None:
    before = small_net()
    after = before.clone()
    dropout = after.node("dropout")
    after.replace(dropout, after.node("batch_norm"))
    norm, relu = after.node("batch_norm"), after.node("relu")
    relu.args = (after.emit(aten.tanh.default, (norm,), before=relu, like=relu, name="tanh"),)
    after.stage = Stage.FUSED
    difference = diff(before, after)
    text = str(difference).splitlines()
    assert text[:3] == ["--- Net (canonical, 9 nodes)", "+++ Net (fused, 9 nodes)", "! stage: canonical -> fused"]
    assert [line for line in text if line[0] in "-+"][2:] == [
        "- %dropout : f32[2,2,4,4] = dropout(%batch_norm, p=0.5, train=False) {mode_arg=2, train=True, eval=False}",
        "+ %tanh : f32[2,2,4,4] = tanh(%batch_norm)",
        "- %relu : f32[2,2,4,4] = relu(%dropout)",
        "+ %relu : f32[2,2,4,4] = relu(%tanh)",
    ]
    assert text[3].startswith("  %batch_norm : ")
    assert text[-1] == "1 removed, 1 added, 1 changed, 7 the same"


def test_a_removed_node_changes_only_its_user() -> None:
    before = small_net()
    after = before.clone()
    after.replace(after.node("relu"), after.node("dropout"))
    difference = diff(before, after)
    assert kinds(difference) == {"removed": 1, "changed": 1}
    assert difference.of("changed")[0].before == "output (%relu,)"
    assert difference.of("changed")[0].after == "output (%dropout,)"


def test_a_type_or_argument_that_changes() -> None:
    before = small_net()
    after = before.clone()
    dropout = after.node("dropout")
    dropout.args = (dropout.args[0], 0.25, False)
    after.node("relu").meta["val"] = torch.empty(1, device="meta")
    (first, second) = diff(before, after).changes
    assert (first.kind, first.name) == ("changed", "dropout")
    assert "p=0.25" in str(first.after)
    assert (second.kind, second.name) == ("changed", "relu")
    assert "f32[1]" in str(second.after)


def test_a_constant_whose_numbers_change() -> None:
    before = small_net()
    after = before.clone()
    after.root.get_parameter("w").data.add_(1)
    (change,) = diff(before, after).changes
    assert (change.kind, change.name) == ("changed", "w")


def test_renames_are_only_counted() -> None:
    before = exported(Choice(), [torch.ones(2, 4)])
    after = parse(re.sub(r"%(\w+)", r"%n_\1_", dump(before)))
    difference = diff(before, after)
    assert set(kinds(difference)) == {"renamed"}
    assert not any(line[:1] in "-+" for line in str(difference).splitlines()[2:])
    assert " renamed, " in str(difference)


def test_a_rename_does_not_hide_a_change() -> None:
    before = small_net()
    text = dump(before).replace("%dropout", "%other").replace("p=0.5", "p=0.75").replace("%relu", "%last")
    difference = diff(before, parse(text))
    assert kinds(difference) == {"changed": 1, "renamed": 1}
    assert difference.of("changed")[0].name == "other"


def test_nested_graphs() -> None:
    before = exported(Choice(), [torch.ones(2, 4)])
    after = parse(dump(before).replace("= sub(%x, %linear_1)", "= sub(%linear_1, %x)"))
    difference = diff(before, after)
    (change,) = difference.changes
    assert (change.graph, change.kind) == ("false_graph_0", "changed")
    assert "@@ graph @false_graph_0" in str(difference)


def test_moved_nodes() -> None:
    build = Builder()
    x = build.input("x", 2)
    a, b = build.call(aten.relu.default, x), build.call(aten.tanh.default, x)
    before = build.program(build.call(aten.add.Tensor, a, b))
    after = before.clone()
    after.node("relu").prepend(after.node("tanh"))
    assert dump(before) != dump(after)
    difference = diff(before, after)
    assert kinds(difference) == {"moved": 1}


def test_facts_of_the_program() -> None:
    before = small_net()
    after = before.clone()
    after.note_inference_only("dropout was removed")
    after.training = True
    assert {fact for fact, _, _ in diff(before, after).header} == {"mode", "inference only"}


def test_json() -> None:
    before = small_net()
    after = before.clone()
    after.replace(after.node("relu"), after.node("dropout"))
    document = json.loads(diff(before, after).to_json())
    assert list(document) == ["before", "after", "header", "changes", "same"]
    assert document["changes"][0]["kind"] == "removed"
    assert document["changes"][0]["name"] == "relu"


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["drop", "insert"])), max_size=6))
def test_counts_add_up(edits: list[tuple[int, str]]) -> None:
    """Nodes before = removed + paired, nodes after = added + paired, whatever was done."""
    before = chain(20)
    after = before.clone()
    for place, action in edits:
        nodes = list(after.graph.find_nodes(op="call_function", target=aten.relu.default))
        node = nodes[place % len(nodes)]
        if action == "insert":
            after.emit(aten.tanh.default, (node.args[0],), before=node, like=node)
        elif len(nodes) > 1:
            after.replace(node, node.all_input_nodes[0])
    difference = diff(before, after)
    counts = kinds(difference)
    paired = difference.same + sum(counts.get(kind, 0) for kind in ("changed", "renamed", "moved"))
    assert len(before.graph.nodes) == paired + counts.get("removed", 0)
    assert len(after.graph.nodes) == paired + counts.get("added", 0)
    assert bool(difference) == (dump(before) != dump(after))


def test_cost_grows_linearly() -> None:
    seconds = []
    for length in (1_000, 10_000):
        before = chain(length)
        after = before.clone()
        for node in list(after.graph.nodes)[1:-1:10]:
            after.emit(aten.tanh.default, (node,), before=node.next, like=node)
        assert kinds(diff(before, after)) == {"added": length // 10}
        runs = []
        for _ in range(3):
            start = time.process_time()
            str(diff(before, after))
            runs.append(time.process_time() - start)
        seconds.append(min(runs))
    assert np.log10(seconds[1] / seconds[0]) < 1.35


@pytest.mark.parametrize("count", [0, 1])
def test_programs_with_nothing_in_common(count: int) -> None:
    build = Builder()
    x = build.input("other", 3)
    for _ in range(count):
        x = build.call(aten.neg.default, x)
    other = build.program(x)
    other.root.register_parameter("unused", nn.Parameter(torch.ones(1)))
    difference = diff(small_net(), other)
    assert difference
    assert len(difference.of("removed")) >= 6
