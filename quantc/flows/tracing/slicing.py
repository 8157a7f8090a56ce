"""The part of a program that was seen in one module, as a program of its own with its part of the plan."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx, nn
from torch.utils import _pytree as pytree

from quantc.capture.assemble import place
from quantc.capture.runtime.tracing import SeenAt
from quantc.ir.program import Program, attribute
from quantc.ir.signature import Input, Signature
from quantc.ir.types import TensorType, type_of


def subgraph(program: Program, calls: Collection[int], name: str) -> Program:
    """The nodes of some calls: what they read from elsewhere are inputs, and what is read elsewhere are results."""
    own = [
        node
        for node in program.graph.nodes
        if isinstance(origin := program.origins.get(node), SeenAt) and origin.call in calls
    ]
    members = set(own)
    graph, root = fx.Graph(), nn.Module()
    copied: dict[fx.Node, fx.Node] = {}
    inputs: list[Input] = []
    outside = dict.fromkeys(value for node in own for value in node.all_input_nodes if value not in members)
    for value in (value for value in outside if value.op != "get_attr"):
        copied[value] = graph.placeholder(value.name)
        copied[value].meta = dict(value.meta)
        kind = type_of(value)
        inputs.append(Input(value.name, kind if isinstance(kind, TensorType) else None))
    for value in (value for value in outside if value.op == "get_attr"):
        copied[value] = graph.node_copy(value)
        copied[value].meta = dict(value.meta)
        place(root, str(value.target), attribute(program.root, str(value.target)))
    for node in own:
        copied[node] = graph.node_copy(node, copied.__getitem__)
        copied[node].meta = dict(node.meta)
        if node.op == "call_module":
            place(root, str(node.target), attribute(program.root, str(node.target)))
    results = [copied[node] for node in own if not node.users or any(user not in members for user in node.users)]
    graph.output(tuple(results))
    in_spec = pytree.tree_flatten((tuple(row.name for row in inputs), {}))[1]
    signature = Signature(tuple(inputs), in_spec, pytree.tree_flatten(list(results))[1])
    made = Program(graph, root, signature, name=name, method=program.method, stage=program.stage)
    made.training = program.training
    made.origins = program.origins.renamed(copied)
    names = {node.name for node in own}
    made.plan = program.plan.renamed(copied)
    made.plan.outcomes = {site: use for site, use in program.plan.outcomes.items() if site.node in names}
    made.plan.groups = tuple(group for group in program.plan.groups if any(site.node in names for site in group.places))
    return made
