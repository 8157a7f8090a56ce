"""The API through which quantizers record decisions: claims on nodes, and outcomes for operands and outputs.

Conflicts raise here, at the second of two decisions about one site. Nodes that the user's config leaves float stay
float whatever a quantizer decides: it need not check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice

import torch
from torch import fx

from quantc.config.resolve import Resolution
from quantc.errors import AnnotationError
from quantc.ir.alias_analysis import Aliasing, operands_written
from quantc.ir.decisions import Float, TensorOutcome
from quantc.ir.dialect import is_opaque, writes
from quantc.ir.plan import Claim, Part, Plan
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.ir.sites import Site
from quantc.ir.subgraphs import run_in_unknown_ways
from quantc.ir.types import TensorType, dtype_of, type_of
from quantc.spec.formats import Role

QUANTIZABLE = (torch.float32,)
MAX_READERS = 64


class Annotator:
    """A program, its resolved config, and the decisions so far."""

    def __init__(self, program: Program, config: Resolution | None = None, plan: Plan | None = None) -> None:
        self.program = program
        self.config = config if config is not None else Resolution()
        self.plan = plan if plan is not None else program.plan
        self.places = Places(program)

    @cached_property
    def _aliasing(self) -> dict[fx.Graph, Aliasing]:
        return {graph: Aliasing(graph, self.program.owner(graph)) for graph in self.places.paths}

    # -- asking ----------------------------------------------------------------------------------------------

    def why_not_tensor(self, value: fx.Node) -> str | None:
        """The reason why a node's value cannot be quantized for any consumer; None if it can."""
        kind = type_of(value)
        if kind is None:
            return f"the dtype of {value.name} is unknown; capture with example inputs"
        if not isinstance(kind, TensorType) or kind.dtype not in QUANTIZABLE:
            return f"{value.name} is {kind}, and only float32 tensors are quantized"
        aliasing = self._aliasing[value.graph]
        if aliasing.has_writes and aliasing.is_written(value):
            return _why_written(value, aliasing)
        return None

    def why_not_read(self, node: fx.Node) -> str | None:
        """The reason why an op must read its operands unconverted at run time: one is written to in place, even if it
        is never quantized, as a bias. None if no operand is written to except by the op itself, as a norm updates its
        statistics."""
        aliasing = self._aliasing[node.graph]
        if not aliasing.has_writes:
            return None
        own = operands_written(node, aliasing.owner)
        found = (operand for operand in node.all_input_nodes if aliasing.is_written(operand) and operand not in own)
        return next((_why_written(operand, aliasing) for operand in found), None)

    @cached_property
    def left_out(self) -> dict[fx.Node, str]:
        """The nodes excluded from all rules: claimed by an earlier quantizer, left float by the config, in a nested graph
        that calibration cannot observe, or computing a weight from constants."""
        reasons = {node: f"{claim}" for node, claim in self.plan.claims.rows.items()}
        for graph, caller in run_in_unknown_ways(self.program).items():
            calls = (node for node in graph.nodes if node.op == "call_function")
            reasons |= dict.fromkeys(calls, f"skipped: nothing is known of how {caller} runs the graph it is in")
        for aliasing in self._aliasing.values():
            reasons |= dict.fromkeys(_computed_weights(aliasing), "skipped: it computes a weight from constants")
        return reasons | self.told_float

    @cached_property
    def told_float(self) -> dict[fx.Node, str]:
        """The nodes that the config leaves float in every role."""
        return {
            node: f"left float, as the config says: {settings[Role.ACT].rule}"
            for node, settings in self.config.nodes.items()
            if all(isinstance(setting.use, Float) for setting in settings.values()) and len(settings) == len(Role)
        }

    # -- deciding --------------------------------------------------------------------------------------------

    def claim(self, nodes: Iterable[fx.Node], claim: Claim) -> None:
        """Claim nodes for a rule, except those the config leaves float. AnnotationError if one is claimed already."""
        for node in nodes:
            if node in self.told_float:
                self.leave(node, self.told_float[node])
                continue
            earlier = self.plan.claims.get(node)
            if earlier is not None and earlier != claim:
                raise AnnotationError(
                    f"{node.name} is claimed twice: {earlier}, and {claim}",
                    where=self.program.describe(node),
                    advice="let one of the quantizers leave it alone",
                )
            self.plan.claims[node] = claim

    def operand(self, node: fx.Node, index: int, outcome: TensorOutcome) -> Site:
        """Decide an operand of a node; operands are numbered as in `places.operand_nodes`."""
        if not 0 <= index < len(self.places.operands(node)):
            raise AnnotationError(
                f"{node.name} has no operand {index}",
                where=self.program.describe(node),
                advice=f"it has {len(self.places.operands(node))}, counted from 0",
            )
        site, source = self.places.use(node, index), self.places.operands(node)[index]
        edge = self.config.edges.get((source, node))
        is_float = edge is not None and isinstance(edge.use, Float)
        return site if is_float or node in self.told_float else self._decide(site, outcome)

    def output(self, node: fx.Node, outcome: TensorOutcome) -> Site:
        """Decide the output of a node: every consumer reads the quantized tensor."""
        site = self.places.out(node)
        return site if node in self.told_float else self._decide(site, outcome)

    def leave(self, node: fx.Node, reason: str) -> None:
        """Record why a node was left float."""
        self.plan.left_float[node] = reason

    def _decide(self, site: Site, outcome: TensorOutcome) -> Site:
        earlier = self.plan.outcomes.setdefault(site, outcome)
        if earlier != outcome:
            raise AnnotationError(
                f"two decisions about {site}: {earlier}, and {outcome}",
                where=self.program.describe(self.places.node(site)),
                advice="let one of the quantizers or rules leave it alone",
            )
        return site


def _computed_weights(aliasing: Aliasing) -> Iterator[fx.Node]:
    """The calls that read float constants alone. Training keeps them, so that gradients reach the parameters."""
    weights: set[fx.Node] = set()
    for node in aliasing.graph.nodes:
        if dtype_of(node) not in QUANTIZABLE or (aliasing.has_writes and aliasing.is_written(node)):
            continue
        if node.op == "get_attr":
            weights.add(node)
        elif node.op == "call_function" and node.all_input_nodes and weights.issuperset(node.all_input_nodes):
            weights.add(node)
            yield node


def _why_written(value: fx.Node, aliasing: Aliasing) -> str:
    """The reason for a tensor that is, or may be, written to in place: opaque modules and functions may write to
    anything."""
    writers = aliasing.writers(value)
    if not writers or not all(is_opaque(node) and not writes(node.target) for node in writers):
        return f"{value.name} is written to in place"
    near = {value, *islice(value.users, MAX_READERS)}
    unknown = next((node for node in writers if node in near), writers[0])
    said = f"{unknown.name} is kept whole, and nothing is known of it: it may"
    if unknown is value:
        return f"{said} write to what it gives"
    if unknown in value.users:
        return f"{said} write to {value.name} in place; let the model give it a copy, {value.name}.clone()"
    return f"{said} write to what shares memory with {value.name}; let the model give it a copy, x.clone()"


__all__ = ["Annotator", "Claim", "Part"]
