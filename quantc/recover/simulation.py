"""Runs a calibrated program as its plan would have it, on the float graph, with some of the grids left out.

Converting a program for each question takes longer than the answer. Here a tensor is rounded where the plan has a grid for
it, by its op or for a reader, as `quantize` would insert the ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from quantc.calibration.qparams import find_qparams
from quantc.calibration.state_isolation import Isolation
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.ir.plan import Part, Plan, Source, spec_of
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.ir.sites import Site
from quantc.pipeline.numeric_guard import NodeByNode
from quantc.spec.numerics import QParams, fake_quantize
from quantc.spec.spec import QuantSpec
from quantc.support.sqnr import Noise

Use = tuple[fx.Node, int]
"""A reader, and the number of its operand."""


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The grid of one group."""

    qparams: QParams
    spec: QuantSpec
    asking: frozenset[str]
    """The matches, by root, that ask for it, rather than hand it on."""


@dataclass(frozen=True, slots=True)
class Left:
    """Grids to leave out."""

    matches: frozenset[str] = frozenset()
    """Matches that are float, by root: what they read, and what they yield."""
    tensors: frozenset[fx.Node] = frozenset()
    """Tensors that are float for all readers."""


@dataclass(eq=False)
class Simulation:
    """The grids of a plan, by place, and runs with them."""

    program: Program
    outs: dict[fx.Node, Grid] = field(default_factory=dict)
    uses: dict[Use, Grid] = field(default_factory=dict)
    match_of: dict[fx.Node, str] = field(default_factory=dict)
    """The root of the match that claims a node."""
    rounded: dict[Use, Tensor] = field(default_factory=dict)
    """Constants, rounded once for all runs."""
    fitted: dict[Use, Tensor] = field(default_factory=dict)
    """Other values of constants that are not rounded."""
    isolation: Isolation = field(init=False)

    def __post_init__(self) -> None:
        self.isolation = Isolation(self.program)

    @staticmethod
    def of(program: Program, reduce_range: RangeReduction = "auto") -> Simulation:
        """The simulation of a calibrated program."""
        draft = program.draft()
        qparams, _ = find_qparams(draft, reduce_range)
        return Simulation.with_qparams(program, draft.plan, qparams)

    @staticmethod
    def with_qparams(program: Program, plan: Plan, qparams: dict[str, QParams]) -> Simulation:
        """The simulation of a program by the groups of a plan for it."""
        places = Places(program)
        found = Simulation(program)
        claims = {node: claim for node, claim in program.plan.claims.rows.items() if node.graph is program.graph}
        found.match_of = {node: claim.root for node, claim in claims.items()}
        for group in plan.groups:
            if group.source is Source.RUN_TIME or group.name not in qparams:
                continue
            if any(site.graph for site in group.places):
                continue  # nested graphs run in float
            nodes = [places.node(site) for site in group.places]
            asking = frozenset(
                claim.root for node in nodes if (claim := claims.get(node)) is not None and claim.part is Part.QUANTIZED
            )
            grid = Grid(qparams[group.name], spec_of(group, qparams[group.name]), asking)
            for site, node in zip(group.places, nodes, strict=True):
                if site.operand is None:
                    found.outs[node] = grid
                else:
                    found.uses[node, site.operand] = grid
        for site, tensor in program.plan.fitted.items():
            if not site.graph:
                found._put_fitted(places, site, tensor)
        return found

    def _put_fitted(self, places: Places, site: Site, tensor: Tensor) -> None:
        node = places.node(site)
        use = node, site.operand or 0
        grid = self.uses.get(use)
        if grid is None:
            self.fitted[use] = tensor
        else:
            self.rounded[use] = fake_quantize(tensor, grid.qparams, grid.spec)

    def grid_out(self, node: fx.Node, left: Left) -> Grid | None:
        """The grid on which an op yields its result."""
        return self._kept(self.outs.get(node), node, node, left)

    def grid_in(self, reader: fx.Node, operand: int, value: fx.Node, left: Left) -> Grid | None:
        """The grid on which an op reads an operand."""
        return self._kept(self.uses.get((reader, operand)), reader, value, left)

    def _kept(self, grid: Grid | None, owner: fx.Node, value: fx.Node, left: Left) -> Grid | None:
        if grid is None or value in left.tensors or self.match_of.get(owner) in left.matches:
            return None
        return None if grid.asking and grid.asking <= left.matches else grid

    def constant(self, use: Use, grid: Grid, value: Tensor) -> Tensor:
        """A constant on its grid."""
        if use not in self.rounded:
            self.rounded[use] = fake_quantize(value.detach(), grid.qparams, grid.spec)
        return self.rounded[use]

    @torch.no_grad()
    def run(self, leaves: Sequence[Any], left: Left | None = None) -> Any:
        """The outputs on one batch, given as flat inputs; of the float program for None."""
        with self.isolation.batch(0, leaves) as inputs:
            return _Run(self, left).run(*inputs, enable_io_processing=False)

    def own_errors(self, leaves: Sequence[Any]) -> dict[fx.Node, float]:
        """The error that grids make of each tensor on one batch, relative to its power; of several grids the largest."""
        run = _Run(self, Left())
        run.errors = {}
        with torch.no_grad(), self.isolation.batch(0, leaves) as inputs:
            run.run(*inputs, enable_io_processing=False)
        return run.errors

    def error(self, batches: Sequence[Sequence[Any]], expected: Sequence[Any], left: Left) -> float:
        """Power of the error of all outputs, relative to theirs."""
        noise = Noise()
        for leaves, reference in zip(batches, expected, strict=True):
            noise.add(reference, self.run(leaves, left))
        return noise.noise / noise.signal if noise.signal else 0.0


class _Run(NodeByNode):
    """One run of the graph."""

    def __init__(self, simulation: Simulation, left: Left | None) -> None:
        super().__init__(simulation.program)
        self.simulation, self.left = simulation, left
        self.errors: dict[fx.Node, float] | None = None

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        if self.left is None:
            return super().fetch_args_kwargs_from_env(n)
        numbers, left = count(), self.left

        def read(value: fx.Node) -> Any:
            index, found = next(numbers), self.env[value]
            grid = self.simulation.grid_in(n, index, value, left)
            if (fitted := self.simulation.fitted.get((n, index))) is not None:
                return found if self.simulation.match_of.get(n) in left.matches else fitted
            if grid is None or not isinstance(found, Tensor):
                return found
            if value.op == "get_attr":
                return self._noted(value, found, self.simulation.constant((n, index), grid, found))
            return self._noted(value, found, fake_quantize(found, grid.qparams, grid.spec))

        return map_arg((n.args, n.kwargs), read)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        grid = None if self.left is None else self.simulation.grid_out(n, self.left)
        if grid is None or not isinstance(value, Tensor) or n.op == "get_attr":
            return value
        return self._noted(n, value, fake_quantize(value, grid.qparams, grid.spec))

    def _noted(self, node: fx.Node, value: Tensor, rounded: Tensor) -> Tensor:
        if self.errors is not None and (power := float(value.double().square().sum())):
            error = float((rounded.double() - value.double()).square().sum()) / power
            self.errors[node] = max(error, self.errors.get(node, 0.0))
        return rounded
