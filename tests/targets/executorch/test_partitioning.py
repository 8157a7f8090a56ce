"""Partitioners whose refusals leave no marks, and tell their reasons."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

import quantc as qc
from quantc.targets.executorch.partitioning import (
    IMPLICIT,
    LOGGERS,
    TRACE,
    give_name,
    guard_partitioners,
    is_implicit,
    name_of,
    reasons,
)
from tests.support.executorch_models import (
    STEP,
    conv,
    image,
    net,
    static,
    steps,
)


def test_a_refused_op_beside_taken_ones_leaves_their_numbers_alone() -> None:
    """XNNPACK's partitioner marks the ops around a product before it knows whether it takes the product."""
    from quantc.targets.executorch.weight_only_linear import xnnpack_partitioner

    x = image()
    quantized = static(net(lambda self, x: self.c(self.b(self.a(x).relu()).relu()), a=conv(), b=conv(), c=conv()), x)
    partitioner = xnnpack_partitioner()
    config = partitioner.target_partitioner_configs["convolution.default"]
    inner = config.check_constraints
    seen: list[str] = []

    def refuse_second(node: Any, exported: Any) -> bool:
        is_taken = bool(inner(node, exported))
        name = node.meta["custom"]["quantc"]
        seen.append(name)
        return is_taken and name != "conv2d_1"

    type(config).check_constraints, kept = refuse_second_as(refuse_second), type(config).check_constraints
    try:
        lowered = qc.lower(quantized, "executorch", partitioners=[partitioner])
    finally:
        type(config).check_constraints = kept
    assert "conv2d_1" in seen
    assert {row.node for row in lowered.delegation().fallen_back} >= {"conv2d_1"}
    assert max(steps(quantized, lowered, x)) <= STEP


def refuse_second_as(check: Any) -> Any:
    return lambda self, node, exported: check(node, exported)


def chain() -> list[fx.Node]:
    """x, and three ops one after the other."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for name in ("dequantize", "conv", "quantize"):
        nodes.append(graph.create_node("call_function", torch.relu, (nodes[-1],), name=name))
    for node in nodes:
        node.meta["val"] = torch.empty(2, 3, device="meta")
    return nodes


def test_an_op_carries_the_name_of_its_node() -> None:
    _, first, second, third = chain()
    assert name_of(first) == ""
    give_name(first, "conv2d")
    give_name(second, "")
    third.meta["custom"] = None
    assert [name_of(node) for node in (first, second, third)] == ["conv2d", "", ""]


class Config:
    """Marks the neighbours of an op, and then takes it or not."""

    def __init__(self, takes: bool) -> None:
        self.takes = takes
        self.asked: list[str] = []

    def check_constraints(self, node: fx.Node, exported: Any) -> bool:
        self.asked.append(node.name)
        for near in (*node.all_input_nodes, *node.users):
            near.meta[IMPLICIT] = True
        return self.takes


def careful(config: Config) -> Any:
    partitioner = SimpleNamespace(target_partitioner_configs={"conv": config})
    other = object()
    assert guard_partitioners([partitioner, other]) == [partitioner, other]
    check = vars(config)["check_constraints"]
    guard_partitioners([partitioner])
    assert vars(config)["check_constraints"] is check, "wrapped once, however often it is held"
    return check


def test_marks_of_a_refused_op_are_taken_away_but_for_those_of_others() -> None:
    _, before, conv, after = chain()
    before.meta[IMPLICIT] = True
    assert careful(Config(False))(conv, SimpleNamespace(graph=conv.graph)) is False
    assert [is_implicit(node) for node in (before, conv, after)] == [True, False, False]


def test_marks_of_an_op_that_is_taken_stay() -> None:
    _, before, conv, after = chain()
    assert careful(Config(True))(conv, SimpleNamespace(graph=conv.graph)) is True
    assert [is_implicit(node) for node in (before, conv, after)] == [True, False, True]


def test_numbers_and_ops_in_branches_are_not_even_asked_for() -> None:
    _, before, conv, _ = chain()
    config = Config(True)
    check = careful(config)
    assert not check(conv, SimpleNamespace(graph=fx.Graph()))
    before.meta["val"] = torch.empty((), device="meta")
    assert not check(conv, SimpleNamespace(graph=conv.graph))
    assert config.asked == []


def test_reasons_are_collected_by_node_and_logging_is_as_before() -> None:
    _, _, conv, other = chain()
    give_name(conv, "conv2d")
    loggers = [logging.getLogger(name) for name in (*LOGGERS, TRACE)]
    before = [(logger.level, logger.propagate, logger.disabled, list(logger.handlers)) for logger in loggers]
    with reasons() as found:
        assert logging.getLogger(TRACE).disabled
        logging.getLogger(LOGGERS[0]).debug(SimpleNamespace(node=conv, reason="too wide"))
        logging.getLogger(LOGGERS[1]).info(SimpleNamespace(node=other, reason="of nobody"))
        logging.getLogger(LOGGERS[2]).warning("a word of its own")
    assert found == {"conv2d": "too wide"}
    assert [(logger.level, logger.propagate, logger.disabled, list(logger.handlers)) for logger in loggers] == before
