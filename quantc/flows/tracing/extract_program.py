"""One fused op of a program as a small program of its own, to be run where the model calls the op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from quantc.capture.assemble import place
from quantc.errors import QuantcError
from quantc.flows.tracing.traced_tensor import Grid
from quantc.ir.placements import Placed
from quantc.ir.plan import Plan
from quantc.ir.program import Program, attribute
from quantc.ir.signature import Input, Signature
from quantc.ir.types import TensorType, type_of
from quantc.pipeline.pipeline import Pipeline
from quantc.qdq.ops import is_dequantize, is_quantize
from quantc.targets.kernels.kernel import Kernel, KernelForm
from quantc.targets.kernels.running_form import Choosing, run_on_kernels
from quantc.targets.target_table import KERNEL_FORM


def grid_of(node: fx.Node) -> Grid | None:
    """The grid that a node rounds onto, or comes from; None if it is not known before it runs."""
    if not (is_quantize(node) or is_dequantize(node)) or len(node.args) != 6:
        return None
    scale, zero_point, qmin, qmax, dtype = node.args[1:]
    is_known = isinstance(scale, float) and isinstance(zero_point, int) and isinstance(dtype, torch.dtype)
    return Grid(scale, zero_point, qmin, qmax, dtype) if is_known else None  # type: ignore[arg-type]


def grid_read(node: fx.Node) -> tuple[fx.Node, Grid] | None:
    """For what comes from a grid: the float tensor that was rounded onto it, and the grid."""
    if not is_dequantize(node) or (grid := grid_of(node)) is None:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or not is_quantize(source) or not isinstance(source.args[0], fx.Node):
        return None
    return source.args[0], grid


def grid_made(node: fx.Node) -> Grid | None:
    """The one grid that all who read a tensor have it on; None if some read floats."""
    grids = {grid_of(user) if is_quantize(user) else None for user in node.users}
    return grids.pop() if len(grids) == 1 else None


def extract_program(
    program: Program, root: str, operands: Sequence[str], on_grids: Mapping[str, Grid], out: Grid | None, name: str
) -> Program:
    """The part of a program that computes `root` from `operands`, by names. Those in `on_grids` are given as bytes; with
    `out` the result is bytes."""
    nodes = {node.name: node for node in program.graph.nodes}
    last = nodes[root]
    if out is not None:
        last = next(user for user in last.users if is_quantize(user))
    graph, root_module = fx.Graph(), nn.Module()
    copied: dict[fx.Node, fx.Node] = {}
    as_bytes: dict[fx.Node, fx.Node] = {}
    for operand in operands:
        made = graph.placeholder(operand)
        old = nodes[operand]
        made.meta["val"] = type_of(old)
        if operand in on_grids:
            kind = type_of(old)
            if isinstance(kind, TensorType):
                made.meta["val"] = TensorType(on_grids[operand].dtype, kind.shape)
            as_bytes[old] = made
        else:
            copied[old] = made
    for node in _nodes_between(last, {nodes[operand] for operand in operands}, on_grids, program):
        found = grid_read(node)
        if found is not None and found[0] in as_bytes and found[1] == on_grids.get(found[0].name):
            copied[node] = graph.node_copy(node, dict.fromkeys(node.all_input_nodes, as_bytes[found[0]]).__getitem__)
        else:
            copied[node] = graph.node_copy(node, copied.__getitem__)
        copied[node].meta = dict(node.meta)
        if node.op in ("get_attr", "call_module") and attribute(root_module, str(node.target)) is None:
            place(root_module, str(node.target), attribute(program.root, str(node.target)))
    graph.output((copied[last],))
    spec = pytree.tree_flatten((tuple(operands), {}))[1]
    signature = Signature(tuple(Input(operand) for operand in operands), spec, pytree.tree_flatten([0])[1])
    made_of = Program(graph, root_module, signature, name=name, method="tracing", stage=program.stage)
    made_of.training = program.training
    made_of.plan = _part_of(program.plan, copied)
    made_of.origins = program.origins.renamed(copied)
    return made_of


def _nodes_between(
    last: fx.Node, operands: set[fx.Node], on_grids: Mapping[str, Grid], program: Program
) -> list[fx.Node]:
    """The nodes between operands and the last node, in topological order."""
    found: set[fx.Node] = set()
    pending = [last]
    while pending:
        node = pending.pop()
        if node in found or node in operands:
            continue
        if node.op == "placeholder":
            raise QuantcError(f"{last.name} reads {node.name}, which no call of its own does", where=program.name)
        found.add(node)
        read = grid_read(node)
        if read is not None and read[0] in operands and on_grids.get(read[0].name) == read[1]:
            continue
        pending.extend(node.all_input_nodes)
    return [node for node in program.graph.nodes if node in found]


def _part_of(plan: Plan, nodes: Mapping[fx.Node, fx.Node]) -> Plan:
    names = {node.name for node in nodes.values()}
    made = plan.renamed(nodes)
    made.outcomes = {site: outcome for site, outcome in plan.outcomes.items() if site.node in names}
    made.groups, made.statistics, made.qparams = (), {}, {}
    return made


class Compute:
    """A small program, ready to be called with its operands."""

    def __init__(self, program: Program, target: str | None) -> None:
        self.placed: tuple[Placed, ...] = ()
        if target is None:
            graph_module = fx.GraphModule(program.root, program.graph)
        else:
            program.root.requires_grad_(False)
            running = run_on_kernels(Pipeline.parse(KERNEL_FORM).run(program), target, Choosing())
            graph_module, self.placed = running.module, running.placed
        graph_module.training = program.training  # not those inside: the program that is trained has them too
        self.body = graph_module
        self.kernel = _only_kernel(graph_module)
        self.in_order = tuple(
            not all(_takes_any_order(graph_module, user) for user in node.users)
            for node in graph_module.graph.find_nodes(op="placeholder")
        )
        self.wants_order = any(self.in_order)

    def on_kernel(self, *operands: Tensor) -> Any:
        """Call the single kernel, bound with its packed weights. Newly loaded weights are packed and bound again."""
        kernel = self.kernel
        packed = kernel._packed
        if packed is not None and packed is self.packed:
            return with_elements(self.step(*operands), operands)
        made = kernel.forward(*operands)
        packed = kernel._packed
        self.step, self.packed = kernel.bound(packed, KernelForm.PLAIN, KernelForm.PLAIN), packed
        return with_elements(made, operands)

    step: Any = None
    packed: Any = None
    """The packed weights that `step` is bound with."""

    def leave_order(self) -> None:
        """Leave results in the kernel's memory format: their readers here accept any."""
        last = self.body.graph.output_node().all_input_nodes[0]
        if last.op == "call_module" and isinstance(kernel := self.body.get_submodule(str(last.target)), Kernel):
            kernel.in_order = False

    def forward(self, *operands: Tensor) -> Any:
        if self.wants_order:
            operands = tuple(
                x.contiguous() if is_asked else x for x, is_asked in zip(operands, self.in_order, strict=True)
            )
        if self.kernel is not None:
            return self.on_kernel(*operands)
        return with_elements(self.body.forward(*operands)[0], operands)

    @property
    def kernels(self) -> list[str]:
        """The kernels it runs, by name."""
        return [module.name for module in self.body.modules() if isinstance(module, Kernel)]


def with_elements(made: Any, operands: Sequence[Tensor]) -> Any:
    """The result of an op, which is refused if it is empty and the operands are not. torch refuses inputs that are smaller than a
    window, and some kernels do not."""
    if isinstance(made, Tensor) and not made.numel() and all(x.numel() for x in operands):
        shapes = ", ".join(str(list(x.shape)) for x in operands)
        raise RuntimeError(f"the input is smaller than the kernel: {shapes} gives {list(made.shape)}")
    return made


def _only_kernel(module: fx.GraphModule) -> Any:
    """The kernel that does it all, if one does."""
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    rest = nodes[len(inputs) :]
    if len(rest) != 2 or rest[0].op != "call_module" or list(rest[0].args) != inputs or rest[0].kwargs:
        return None
    if list(rest[1].args[0]) != [rest[0]]:
        return None
    found = module.get_submodule(str(rest[0].target))
    return found if isinstance(found, Kernel) else None


def _takes_any_order(module: fx.GraphModule, reader: fx.Node) -> bool:
    """True if a node accepts any memory format."""
    if reader.op == "call_module":
        kernel = module.get_submodule(str(reader.target))
        return isinstance(kernel, Kernel) and kernel.any_order
    return isinstance(reader.target, OpOverload) and reader.target.namespace == "aten"
