"""Reasons for the float ops of an exported graph: one for every op that computes floats and is not annotated."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from quantc.annotate.left_float import ops_of
from quantc.annotate.reasons import Reasons, Why
from quantc.flows.pt2e.exported_program import Correspondence
from quantc.flows.pt2e.graph_modules import PATH, loop_bodies
from quantc.flows.pt2e.quantizer import Q_ANNOTATION_KEY

NESTED = (
    "it is in a graph that {caller} calls; this flow quantizes the graph around it, and bodies of scan and while_loop"
)
UNPLACED = "the rule that took it annotates what the exported graph has no node for"


def why_left_float(graphs: Correspondence, unplaced: set[fx.Node]) -> dict[str, str]:
    """By node, or path and node for ops in graphs that the graph calls. `unplaced` holds the nodes of the Program that
    a rule took and that could not be annotated."""
    return dict(_rows(graphs, unplaced))


def _rows(graphs: Correspondence, unplaced: set[fx.Node]) -> Iterator[tuple[str, str]]:
    program = graphs.program
    reasons = Reasons(program)
    around = str(graphs.module.meta.get(PATH, ""))
    bodies = {name for name, _ in loop_bodies(graphs.module)}  # they are annotated each by itself
    callers = dict(_callers(graphs.module.graph))
    for path, node in ops_of(program):
        first = path.partition("/")[0]
        if first in bodies or (not path and _is_annotated(graphs, node) and node not in unplaced):
            continue
        if node in unplaced:
            text = UNPLACED
        elif node in program.plan.claims:
            text = NESTED.format(caller=callers.get(first, "another op"))
        else:
            reason = reasons(node)
            if reason.why is Why.INTEGER:
                continue
            text = reason.text
        yield "/".join(part for part in (around, path, node.name) if part), text


def _is_annotated(graphs: Correspondence, node: fx.Node) -> bool:
    exported = graphs.node(node)
    return node in graphs.program.plan.claims or (exported is not None and Q_ANNOTATION_KEY in exported.meta)


def _callers(graph: fx.Graph) -> Iterator[tuple[str, str]]:
    """The ops that call the graphs which a graph refers to."""
    for node in graph.find_nodes(op="get_attr"):
        for user in node.users:
            yield str(node.target), getattr(user.target, "__name__", str(user.target))
