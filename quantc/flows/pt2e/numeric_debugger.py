"""Compare a quantized model with its float origin, node by node, by torch's provenance of nodes.

    results = compare_results(extract_results_from_loggers(reference), extract_results_from_loggers(quantized))

where both went through `prepare_for_propagation_comparison` and were run on the same data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from quantc.errors import InputError
from quantc.flows.pt2e.graph_modules import check_graph_module

CUSTOM_KEY = "custom"
NUMERIC_DEBUG_HANDLE_KEY = "numeric_debug_handle"
FROM_NODE_KEY = "from_node"
UNLIFTED = "ExportedProgram.module().unlift()"
"""The step of torch.export that makes nodes for parameters: they were no nodes before."""


class NotComparableError(InputError, ValueError):
    """Results that cannot be compared; also a ValueError, as in torchao."""


@dataclass(frozen=True)
class NodeSourceDebugInfo:
    """The node that another goes back to, in the graph that torch.export captured."""

    name: str
    graph_id: int


Recorded = tuple[str | None, object, list[Any]]
"""The name of a node, the modules around it, and what it yielded each time."""


def generate_numeric_debug_handle(ep: ExportedProgram) -> None:
    """Number the nodes of an exported program, in `node.meta["custom"]["numeric_debug_handle"]`; numbers that are
    there stay."""
    if not isinstance(ep, ExportedProgram):
        raise NotComparableError(
            f"a {type(ep).__name__} was given, and handles are for an ExportedProgram",
            where="generate_numeric_debug_handle",
            advice="write ep = torch.export.export(model, example_inputs) first",
        )
    graphs = [part.graph for part in ep.graph_module.modules() if isinstance(part, fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if node.op not in ("placeholder", "output")]
    known = [node.meta.get(CUSTOM_KEY, {}).get(NUMERIC_DEBUG_HANDLE_KEY, 0) for node in nodes]
    number = max(known, default=0)
    for node in nodes:
        custom = node.meta.setdefault(CUSTOM_KEY, {})
        if NUMERIC_DEBUG_HANDLE_KEY not in custom:
            number += 1
            custom[NUMERIC_DEBUG_HANDLE_KEY] = number


def source_of(node: fx.Node) -> NodeSourceDebugInfo | None:
    """The captured node that a node goes back to; None if it goes back to none."""
    sources = node.meta.get(FROM_NODE_KEY)
    if node.op in ("placeholder", "output") or not sources or sources[-1].pass_name == UNLIFTED:
        return None
    source = sources[-1]
    while source.from_node:
        source = source.from_node[-1]
    return NodeSourceDebugInfo(source.name, source.graph_id)


class OutputLogger(nn.Module):
    """Keeps what a node yields."""

    _is_impure = True  # fx then leaves calls of it in place

    def __init__(self, debug_info: NodeSourceDebugInfo, node_name: str | None = None, nn_module_stack: object = None):
        super().__init__()
        self.debug_info = debug_info
        self.node_name = node_name
        self.nn_module_stack = nn_module_stack
        self.stats: list[Any] = []

    def forward(self, x: Any) -> Any:
        self.stats.append(pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), x))
        return x


def prepare_for_propagation_comparison(model: fx.GraphModule) -> fx.GraphModule:
    """A copy of a model that keeps what every node yields which goes back to a captured one."""
    check_graph_module(model, "prepare_for_propagation_comparison")
    model = copy.deepcopy(model)
    for node in list(model.graph.nodes):
        source = source_of(node)
        if source is None:
            continue
        name = f"{node.name}_logger0"
        model.add_module(name, OutputLogger(source, node.name, node.meta.get("nn_module_stack")))
        with model.graph.inserting_after(node):
            logger = model.graph.call_module(name, (node,))
        node.replace_all_uses_with(logger, lambda user, logger=logger: user is not logger)
    model.recompile()
    return model


def extract_results_from_loggers(model: fx.GraphModule) -> dict[NodeSourceDebugInfo, Recorded]:
    """The logged values by captured node. If several nodes come from one, the last counts."""
    loggers = [part for part in model.children() if isinstance(part, OutputLogger) and part.stats]
    return {part.debug_info: (part.node_name, part.nn_module_stack, part.stats) for part in loggers}


@dataclass(frozen=True)
class QuantizationComparisonResult:
    """A node's results in the quantized model and in the reference."""

    actual: Any
    ref: Any

    def __post_init__(self) -> None:
        mine, others = (pytree.tree_flatten(side) for side in (self.actual, self.ref))
        shapes = [[getattr(leaf, "shape", leaf) for leaf in side[0]] for side in (mine, others)]
        if mine[1] != others[1] or shapes[0] != shapes[1]:
            raise NotComparableError(
                f"results of different shapes cannot be compared: {shapes[0]} and {shapes[1]}",
                advice="compare models that come from one exported program",
            )

    @property
    def mse_loss(self) -> Any:
        return self.loss(torch.nn.functional.mse_loss)

    @property
    def sqnr(self) -> Any:
        """Signal over error, in dB."""
        return self.loss(lambda actual, ref: 20 * torch.log10(actual.norm() / (actual - ref).norm()))

    def loss(self, loss_function: Callable[[Tensor, Tensor], Tensor]) -> Any:
        """A loss of every tensor, in the structure that the node yields."""

        def of(actual: Any, ref: Any) -> Any:
            return loss_function(actual.float(), ref.float()) if isinstance(actual, Tensor) else None

        return pytree.tree_map(of, self.actual, self.ref)

    def __repr__(self) -> str:
        return f"QuantizationComparisonResult(mse_loss={self.mse_loss}, sqnr={self.sqnr})"


@dataclass(frozen=True)
class NodeAccuracySummary:
    """The comparisons of one captured node."""

    debug_info: NodeSourceDebugInfo
    actual_node_name: str
    actual_module_stack: str
    ref_node_name: str
    ref_module_stack: str
    results: Sequence[QuantizationComparisonResult]


def compare_results(
    ref_results: dict[NodeSourceDebugInfo, Recorded], actual_results: dict[NodeSourceDebugInfo, Recorded]
) -> dict[NodeSourceDebugInfo, NodeAccuracySummary]:
    """Compare what two models kept, for every captured node that both have."""
    return {
        info: NodeAccuracySummary(
            info,
            actual_name or "",
            _module_path(actual_stack),
            ref_name or "",
            _module_path(ref_stack),
            _compare_pairs(zip(actual_stats, ref_stats, strict=False)),
        )
        for info, (ref_name, ref_stack, ref_stats) in ref_results.items()
        if info in actual_results
        for actual_name, actual_stack, actual_stats in [actual_results[info]]
    }


def _compare_pairs(pairs: Iterable[tuple[Any, Any]]) -> list[QuantizationComparisonResult]:
    return [QuantizationComparisonResult(actual, ref) for actual, ref in pairs]


def _module_path(stack: Any) -> str:
    return str(list(stack.values())[-1][0]) if isinstance(stack, dict) and stack else str(stack)
