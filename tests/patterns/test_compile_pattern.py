"""Compilation of patterns: what can start a match, how large matches are, and which parts are one."""

from __future__ import annotations

import pytest
import torch

from quantc.errors import PatternError
from quantc.patterns import Pattern, Rule, any_of, const, op, optional, result, shared
from quantc.patterns import aten as v
from quantc.patterns.compile_pattern import children, compile_pattern, reachable
from quantc.patterns.matcher_nodes import OpCore

aten = torch.ops.aten


def test_many_optional_steps_compile_in_linear_time() -> None:
    pattern: Pattern = v.conv
    for _ in range(15):
        pattern = pattern >> optional(shared(v.relu) >> v.sigmoid)
    assert Rule("rule", pattern).compiled.required == 1


@pytest.mark.parametrize(
    ("pattern", "required", "largest"),
    [
        (v.relu, 1, 1),
        (v.conv >> optional(v.relu), 1, 2),
        (v.conv >> optional(v.relu) >> v.tanh, 2, 3),
        (v.add(v.relu, v.relu), 2, 2),  # equal parts stand for one node
        (v.add(v.relu.named("a"), v.relu.named("b")), 3, 3),
        (any_of(v.conv >> v.relu >> v.tanh, v.conv >> v.relu), 2, 3),
        (result(v.split, 0) >> v.relu, 3, 3),
        (op("cat")([v.relu, v.tanh]), 3, 3),
    ],
    ids=str,
)
def test_the_smallest_and_the_largest_match_are_counted(pattern: Pattern, required: int, largest: int) -> None:
    compiled = compile_pattern(pattern)
    assert (compiled.required, compiled.largest) == (required, largest)


def test_names_of_values_are_told_from_names_of_nodes() -> None:
    compiled = compile_pattern(v.conv("x", const("w"), "b?").named("conv") >> v.add("_", "y"))
    assert compiled.names == ("x", "w", "b", "conv", "y")
    assert compiled.value_names == ("x", "w", "b", "y")


def test_a_root_starts_only_where_the_ops_it_needs_feed_it() -> None:
    compiled = compile_pattern(v.add(v.relu, any_of(v.tanh, v.sigmoid)))
    relu, tanh, sigmoid = aten.relu.default, aten.tanh.default, aten.sigmoid.default
    add = aten.add.Tensor
    assert compiled.may_start(add, frozenset({relu, tanh}))
    assert compiled.may_start(add, frozenset({relu, sigmoid, add}))
    assert not compiled.may_start(add, frozenset({relu}))
    assert not compiled.may_start(relu, frozenset({relu, tanh}))
    assert compiled.targets == {relu, tanh, sigmoid, add}
    by_a_value = compile_pattern(v.add(optional(v.relu), "y"))
    assert by_a_value.may_start(add, frozenset())


def test_an_optional_last_step_leaves_two_roots() -> None:
    compiled = compile_pattern(v.linear >> optional(v.relu))
    assert set(compiled.roots) == {aten.linear.default, aten.relu.default}


def test_users_inside_a_match_are_bounded_by_the_ops_that_read_the_node() -> None:
    def users(pattern: Pattern, target: object) -> set[int]:
        cores = (core for core in reachable(compile_pattern(pattern).root) if isinstance(core, OpCore))
        return {core.max_users for core in cores if target in core.rows}

    relu = aten.relu.default
    assert users(v.relu >> v.tanh, relu) == {1}
    assert users(v.mul(v.relu, v.sigmoid(v.relu)), relu) == {2}
    assert users(v.mul(v.relu.named("r"), v.sigmoid("r")), relu) == {2}
    assert users(v.add(v.relu, v.relu), relu) == {1}  # one op that reads it twice


def test_every_part_is_reached_once() -> None:
    relu = v.relu
    cores = reachable(compile_pattern(v.mul(relu, v.sigmoid(relu))).root)
    assert len({core.id for core in cores}) == len(cores)
    assert sum(isinstance(core, OpCore) for core in cores) == 3
    leaves = [core for core in cores if not children(core)]
    assert len(leaves) == 1  # `x`, which relu reads


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (optional(v.relu), "without any node"),
        (shared(v.relu), "claim nothing"),
    ],
    ids=str,
)
def test_patterns_that_claim_nothing_are_refused(pattern: Pattern, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        compile_pattern(pattern)
