"""Removal of batch norms for quantization-aware training."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import torch
from torch import fx

from quantc.ir.dialect import argument
from quantc.ir.program import Program, Stage
from quantc.ir.sites import SetAside
from quantc.patterns.fusions import NORMS
from quantc.patterns.rule import Match
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.rewrite.affine_folding import Channels
from quantc.rewrite.constant_order import order_constants


class DetachNorms(Pass):
    """Remove batch norms after convolutions and linears, and record them.

    What is left has the structure of the inference program, so rules match as they do there; `insert-fake-quantize`
    puts the norms back for training, and `remove-fake-quantize` folds them. In between the program does not compute the
    model's results.

    A norm stays in the graph, and is not folded later either, if another op reads the same weight: the two could no
    longer share it.
    """

    name: ClassVar[str] = "detach-norms"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage | None] = Stage.FUSED
    before: ClassVar[Stage | None] = Stage.ANNOTATED
    preserves: ClassVar[Preserves] = Preserves.NOTHING

    def run(self, program: Program) -> Outcome:
        readers = _readers(program)
        stayed: list[str] = []
        done = 0
        for match in NORMS.match(program):
            weight = match.node("w")
            if readers[id(program.tensor(weight))] > 1:
                stayed.append(f"{program.describe(match.root)} stays: others read {weight.target} too")
                continue
            _detach(program, match)
            done += 1
        if done:
            for _, graph in program.graphs():
                order_constants(program, graph)
        return Outcome(done > 0, (*((f"set {done} batch norms aside",) if done else ()), *stayed))


def _readers(program: Program) -> Counter[int]:
    """Number of users of each tensor, by id."""
    found: Counter[int] = Counter()
    for _, graph in program.graphs():
        for node in graph.find_nodes(op="get_attr"):
            if (tensor := program.tensor(node)) is not None:
                found[id(tensor)] += len(node.users)
    return found


def _detach(program: Program, match: Match) -> None:
    norm, producer = match.root, match.node("conv" if "conv" in match.bindings else "linear")
    names = {
        part: str(match[part].target) if isinstance(match[part], fx.Node) else None
        for part in ("gamma", "beta", "mean", "var")
    }
    program.set_aside[producer] = SetAside(
        names["gamma"],
        names["beta"],
        str(names["mean"]),
        str(names["var"]),
        float(argument(norm, "eps")),
        float(argument(norm, "momentum")),
        program.counters.get(norm),
        norm in program.modes,
        norm.name,
    )
    if match["b"] is None:
        _give_bias(program, producer, match.node("w"))
    program.forward(norm, producer)
    for part in ("gamma", "beta", "mean", "var"):
        node = match[part]
        if isinstance(node, fx.Node) and not node.users:
            program.erase(node)


def _give_bias(program: Program, producer: fx.Node, weight: fx.Node) -> None:
    """A bias of zero, in the place of the one that folding the norm will make."""
    tensor = program.tensor(weight)
    if tensor is None:
        return
    parent = str(weight.target).rpartition(".")[0]
    zero = torch.zeros(Channels.of(producer).count(tensor), dtype=tensor.dtype)
    args: list[Any] = list(producer.args)
    args[2:3] = [program.constant(f"{parent}.bias" if parent else "bias", zero, before=weight.next)]
    producer.args = tuple(args)
    program.touch()
