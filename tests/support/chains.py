"""Programs of any size, built node by node without a model: for tests and benchmarks of growth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from quantc.ir.decisions import Quantize
from quantc.ir.plan import Source
from quantc.ir.program import Program, Stage
from quantc.ir.signature import Input, Signature
from quantc.ir.sites import ModeValue, Origin
from quantc.ir.types import TensorType, type_of_value
from quantc.observe import start

aten = torch.ops.aten

CHANNELS = 2
TRAINING = 5
"""Where batch_norm has its training flag."""
IMAGE = TensorType(torch.float32, (1, CHANNELS, 3, 3))
Spelling = Literal["raw", "canonical"]
Weights = Literal["own", "shared"]
Join = Literal["cat", "adds"]


class Builder:
    """Appends typed nodes to a graph of one input, every node with an origin."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = IMAGE
        self.origins: dict[fx.Node, Origin] = {}
        self.modes: dict[fx.Node, ModeValue] = {}
        self.counters: dict[fx.Node, str] = {}
        self.generator = torch.Generator().manual_seed(0)

    def constant(self, name: str, value: Tensor) -> fx.Node:
        self.root.register_buffer(name, value)
        node = self.graph.get_attr(name)
        node.meta["val"] = type_of_value(value)
        return node

    def call(self, target: Callable[..., Any], *args: Any, kind: TensorType = IMAGE, where: str = "") -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = kind
        self.origins[node] = Origin(where, "tests.Block", "chains.py", 1)
        return node

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator) * 0.5

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) + 0.5

    def program(self, result: fx.Node) -> Program:
        kind = result.meta["val"]
        output = self.graph.output((result,))
        output.meta["val"] = (kind,)
        signature = Signature(
            inputs=(Input("x", IMAGE),),
            in_spec=pytree.tree_structure(((0,), {})),
            out_spec=pytree.tree_structure(0),
        )
        program = Program(self.graph, self.root, signature, name=self.name, stage=Stage.CANONICAL)
        program.origins.rows.update(self.origins)
        program.modes.rows.update(self.modes)
        program.counters.rows.update(self.counters)
        program.example_inputs = (self.normal(1, CHANNELS, 3, 3),)
        return program


def chain(blocks: int, *, spelling: Spelling = "canonical", weights: Weights = "own") -> Program:
    """conv → batch norm → relu → add, `blocks` times, each block added to what it was given.

    "raw" writes as captures do before canonicalization: in place and with a no-op in each block. "shared" weights
    make one set of constants the operands of every block: hubs with thousands of users.
    """
    build = Builder(f"chain_{spelling}")
    x = build.x
    shared = _constants(build, "all") if weights == "shared" else None
    for index in range(blocks):
        w, gamma, beta, mean, var = shared or _constants(build, str(index))
        where = f"blocks.{index}"
        y = build.call(aten.conv2d.default, x, w, None, [1, 1], [0, 0], [1, 1], 1, where=where)
        y = build.call(aten.batch_norm.default, y, gamma, beta, mean, var, False, 0.1, 1e-5, True, where=where)
        build.modes[y] = ModeValue(TRAINING, train=True, eval=False)
        build.counters[y] = f"count_{'all' if shared else index}"
        if spelling == "raw":
            y = build.call(aten.contiguous.default, y, where=where)
            y = build.call(aten.relu_.default, y, where=where)
            x = build.call(aten.add_.Tensor, y, x, where=where)
        else:
            y = build.call(aten.relu.default, y, where=where)
            x = build.call(aten.add.Tensor, y, x, where=where)
    program = build.program(x)
    program.stage = Stage.CAPTURED if spelling == "raw" else Stage.CANONICAL
    return program


def _constants(build: Builder, name: str) -> tuple[fx.Node, ...]:
    build.root.register_buffer(f"count_{name}", torch.tensor(0))
    return (
        build.constant(f"w_{name}", build.normal(CHANNELS, CHANNELS, 1, 1) * 0.1),
        build.constant(f"gamma_{name}", build.positive(CHANNELS)),
        build.constant(f"beta_{name}", build.normal(CHANNELS) * 0.1),
        build.constant(f"mean_{name}", build.normal(CHANNELS) * 0.1),
        build.constant(f"var_{name}", build.positive(CHANNELS)),
    )


def star(width: int, *, join: Join = "cat", spelling: Spelling = "canonical") -> Program:
    """One input feeding `width` ops, joined by one `cat` or by a row of adds."""
    build = Builder(f"star_{spelling}")
    ray = (aten.relu.default, aten.neg.default, aten.sigmoid.default, aten.tanh.default)
    rays = [build.call(ray[index % 4], build.x, where=f"rays.{index}") for index in range(width)]
    if spelling == "raw":
        rays = [build.call(aten.contiguous.default, ray, where="contiguous") for ray in rays]
    program = build.program(_joined(build, rays, join))
    program.stage = Stage.CAPTURED if spelling == "raw" else Stage.CANONICAL
    return program


def _joined(build: Builder, rays: list[fx.Node], join: Join) -> fx.Node:
    if join == "cat":
        kind = TensorType(torch.float32, (1, CHANNELS * len(rays), 3, 3))
        return build.call(aten.cat.default, rays, 1, kind=kind, where="join")
    total = rays[0]
    for ray in rays[1:]:
        total = build.call(aten.add.Tensor, total, ray, where="join")
    return total


def blocks_for(nodes: int, *, spelling: Spelling = "canonical") -> int:
    """How many blocks make a chain of about that many nodes (with weights of their own)."""
    return max(1, nodes // (10 if spelling == "raw" else 9))


def pretend_calibrated(program: Program) -> None:
    """Statistics as if every tensor had held numbers from -1 to 1; long chains overflow when they are really run."""
    for group in program.plan.groups:
        if group.source is Source.DATA and isinstance(group.outcome, Quantize):
            observation = start(group.outcome.spec)
            observation.update(torch.linspace(-1, 1, 16))
            program.plan.statistics[group.name] = observation
    program.stage = Stage.CALIBRATED
