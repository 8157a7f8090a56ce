"""Replacements recorded during a walk: what is ahead reads the new value, what is behind keeps the old."""

from __future__ import annotations

import torch

from quantc.ir.program import Program
from quantc.ir.sites import Origin
from quantc.rewrite.replacements import Substitution
from tests.support.programs import Builder, aten


def chain() -> Program:
    """relu, neg of it, and the sum of both."""
    build = Builder()
    relu = build.call(aten.relu.default, build.input("x", 2))
    neg = build.call(aten.neg.default, relu)
    program = build.program(build.call(aten.add.Tensor, relu, neg))
    program.origins[relu] = Origin("act")
    return program


def walk(program: Program, substitution: Substitution, *names: str) -> None:
    for name in names:
        substitution.arrive(program.node(name))


def test_a_replacement_takes_over_name_rows_and_users() -> None:
    program = chain()
    relu = program.node("relu")
    substitution = Substitution(program)
    new = program.emit(aten.abs.default, relu.args, before=relu)
    substitution.replace(relu, new)
    walk(program, substitution, "neg", "add", "output")
    substitution.finish()
    assert program.node("relu") is new
    assert program.origins[new] == Origin("act")
    assert not program.has_node("abs")
    assert program(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 0.0]
    program.verify()


def test_nodes_behind_the_walk_keep_what_they_read() -> None:
    program = chain()
    relu, neg, add = (program.node(name) for name in ("relu", "neg", "add"))
    substitution = Substitution(program)
    walk(program, substitution, "relu", "neg")
    substitution.rename(relu, neg)
    walk(program, substitution, "add")
    substitution.finish()
    assert neg.args == (relu,)
    assert add.args == (neg, neg)


def test_replacements_of_replacements_are_followed() -> None:
    program = chain()
    x, relu, neg, add = (program.node(name) for name in ("x", "relu", "neg", "add"))
    substitution = Substitution(program)
    substitution.forward(relu, x)
    substitution.arrive(neg)
    substitution.forward(neg, relu)
    assert substitution.current(neg) is x
    walk(program, substitution, "add", "output")
    substitution.finish()
    assert add.args == (x, x)
    assert [node.name for node in program.graph.nodes] == ["x", "add", "output"]


def test_a_node_that_stands_for_itself_is_left() -> None:
    program = chain()
    relu = program.node("relu")
    substitution = Substitution(program)
    substitution.rename(relu, relu)
    assert substitution.current(relu) is relu
    module = program.module
    walk(program, substitution, "neg", "add", "output")
    assert program.module is module, "nothing has changed"
