"""Generates one straight-line Python function for a lowered module.

The forward that torch.fx generates looks up each kernel by name and dispatches ATen ops by schema, at every call. The
function generated here binds kernels to their packed weights, holds constants as names, and calls ATen ops through
torch's Python bindings, at half the cost. Adjacent kernels exchange tensors of torch's quantized dtypes where both
support them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload

from quantc.ir.alias_analysis import operands_written
from quantc.ir.dialect import is_opaque
from quantc.ir.program import attribute
from quantc.ir.types import tensor_type
from quantc.targets.kernels.kernel import Kernel, KernelForm
from quantc.targets.kernels.kernel_nodes import is_image

ATEN: Any = torch.ops.aten
NN: Any = getattr(torch._C, "_nn")  # noqa: B009 - it has no stubs

BINDINGS: dict[Any, Callable[..., Any]] = {
    ATEN.adaptive_avg_pool2d.default: NN.adaptive_avg_pool2d,
    ATEN.add.Tensor: torch.add,
    ATEN.cat.default: torch.cat,
    ATEN.clamp.default: torch.clamp,
    ATEN.contiguous.default: Tensor.contiguous,
    ATEN.div.Tensor: torch.div,
    ATEN.embedding.default: torch.embedding,
    ATEN.expand.default: Tensor.expand,
    ATEN.flatten.using_ints: torch.flatten,
    ATEN.gelu.default: NN.gelu,
    ATEN.hardswish.default: NN.hardswish,
    ATEN.layer_norm.default: torch.layer_norm,
    ATEN.matmul.default: torch.matmul,
    ATEN.mul.Tensor: torch.mul,
    ATEN.permute.default: torch.permute,
    ATEN.relu.default: torch.relu,
    ATEN.reshape.default: torch.reshape,
    ATEN.scaled_dot_product_attention.default: NN.scaled_dot_product_attention,
    ATEN.select.int: torch.select,
    ATEN.sigmoid.default: torch.sigmoid,
    ATEN.silu.default: NN.silu,
    ATEN.softmax.int: torch.softmax,
    ATEN.sub.Tensor: torch.sub,
    ATEN.tanh.default: torch.tanh,
    ATEN.transpose.int: torch.transpose,
    ATEN.unbind.int: torch.unbind,
    ATEN.unsqueeze.default: torch.unsqueeze,
}
"""Torch's Python bindings of ATen ops: the same ops without schema dispatch, with the same argument names and
positions."""


def straight_line(module: fx.GraphModule) -> Callable[..., Sequence[Any]]:
    """Generated function equivalent to the module's forward; kernels without a packed weight are called as modules."""
    drawn = _Writing(module)
    source = "\n    ".join([f"def run({', '.join(drawn.inputs)}):", *drawn.lines])
    exec(compile(source, f"<{type(module).__name__} on kernels>", "exec"), drawn.bound)  # noqa: S102 - as fx does
    run: Callable[..., Sequence[Any]] = drawn.bound["run"]
    return run


class _Writing:
    """The lines of the function, and what its names stand for."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.bound: dict[str, Any] = {}
        self.inputs: list[str] = []
        self.lines: list[str] = []
        self.names: dict[fx.Node, str] = {}
        self.kernels = {node: kernel for node in module.graph.nodes if (kernel := self._kernel(node)) is not None}
        self.forms = {node: self._form(node) for node in self.kernels}
        last = _last_readers(module.graph)
        for index, node in enumerate(module.graph.nodes):
            self.names[node] = f"v{index}"
            self._write(node)
            if node.op != "output" and (done := [self.names[item] for item in last.get(node, [])]):
                self.lines.append(f"del {', '.join(done)}")

    def _kernel(self, node: fx.Node) -> Kernel | None:
        found = attribute(self.module, str(node.target)) if node.op == "call_module" else None
        return found if isinstance(found, Kernel) and found._packed is not None else None

    def _form(self, node: fx.Node) -> KernelForm:
        """Tensor form in which a kernel's result is passed on."""
        kind = tensor_type(node)
        if kind is None or not node.users or not self.kernels[node].gives_quantized:
            return KernelForm.PLAIN
        readers = [self.kernels.get(user) for user in node.users]
        is_taken = all(reader is not None and reader.takes_quantized(kind.rank) for reader in readers)
        return KernelForm.QUANTIZED if is_taken else KernelForm.PLAIN

    def _write(self, node: fx.Node) -> None:
        name = self.names[node]
        if node.op == "placeholder":
            self.inputs.append(name)
        elif node.op == "get_attr":
            self.bound[name] = attribute(self.module, str(node.target))
        elif node.op == "output":
            self.lines.append(f"return {self._text(node.args[0])}")
        else:
            self.lines.append(f"{name} = {self._call_text(node)}")

    def _call_text(self, node: fx.Node) -> str:
        target: Any = node.target
        if target is operator.getitem:
            return f"{self._text(node.args[0])}[{self._text(node.args[1])}]"
        if target is ATEN.add.Tensor and (written := self._summand_to_overwrite(node)) is not None:
            return f"{self.names[written[0]]}.add_({self.names[written[1]]})"
        given = [self._text(value) for value in node.args]
        given += [f"{name}={self._text(value)}" for name, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{given[0]}.{target}({', '.join(given[1:])})"
        return f"{self._bind(self._step(node))}({', '.join(given)})"

    def _step(self, node: fx.Node) -> Callable[..., Any]:
        target: Any = node.target
        if node.op == "call_function":
            found: Any = BINDINGS.get(target)
            step: Callable[..., Any] = target if found is None else found
            return step
        kernel = self.kernels.get(node)
        if kernel is None:
            return self.module.get_submodule(target)
        reads = [self.forms.get(item, KernelForm.PLAIN) for item in node.all_input_nodes]
        return kernel.bound(kernel._packed, reads[0] if reads else KernelForm.PLAIN, self.forms[node])

    def _summand_to_overwrite(self, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """The summand that a sum may be written into, and the other: memory that a kernel has made for this sum alone."""
        summands = node.all_input_nodes
        if len(summands) != 2 or len(node.args) != 2 or node.kwargs or not _is_alike(node, *summands):
            return None
        for own, rest in (summands, reversed(summands)):
            if own is not node.args[0] and is_image(node):
                continue  # a sum has the strides of its first summand, and reductions depend on them
            kernel = self.kernels.get(own)
            if kernel is not None and kernel.makes_memory and len(own.users) == 1:
                return own, rest
        return None

    def _text(self, value: Any) -> str:
        """A value as an expression."""
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, list | tuple) and any(True for _ in _nodes_in(value)):
            inner = ", ".join(self._text(item) for item in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if value else ''})"
        if isinstance(value, slice) and any(True for _ in _nodes_in([value.start, value.stop, value.step])):
            return f"slice({self._text(value.start)}, {self._text(value.stop)}, {self._text(value.step)})"
        return repr(value) if value is None or isinstance(value, bool | int) else self._bind(value)

    def _bind(self, value: Any) -> str:
        name = f"c{len(self.bound)}"
        self.bound[name] = value
        return name


def why_not_repeated(module: fx.GraphModule) -> str | None:
    """Reason why two calls of a module may differ, so that it must not be run for timing or recording; None if they do not.

    The module writes to its own or its caller's tensors, or contains opaque user code.
    """
    for part, node in _nodes_of_all(module):
        if _is_foreign(part, node):
            called = node.target if node.op == "call_module" else node.name
            return f"{called} is code of its own, which was kept whole"
    return why_it_writes(module)


def why_not_recorded(module: fx.GraphModule) -> str | None:
    """Reason why one call's dispatch trace does not hold for all calls, as far as the graph shows; None if it may.

    Branches and loops depend on data. They must not even be tried: torch compiles them as they are called, and an
    aborted attempt breaks torch.cond for other programs as well.
    """
    for _, node in _nodes_of_all(module):
        if isinstance(node.target, HigherOrderOperator):
            return f"{node.name} looks at numbers"
    return why_not_repeated(module)


def why_it_writes(module: fx.GraphModule) -> str | None:
    """The write to persistent memory that a module of known ops performs; None if there is none."""
    for part, node in _nodes_of_all(module):
        if isinstance(node.target, OpOverload) and (node.target._schema.is_mutable or operands_written(node, part)):
            return f"{node.name} writes to a tensor that stays"
    return None


def _nodes_of_all(module: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, fx.Node]]:
    """The nodes of a module and of its branches, each with whose it is."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from ((part, node) for node in part.graph.nodes)


def _is_foreign(owner: fx.GraphModule, node: fx.Node) -> bool:
    """True if a node calls opaque user Python."""
    if node.op == "call_module":
        return not isinstance(attribute(owner, str(node.target)), Kernel | fx.GraphModule)
    return node.op == "call_function" and not isinstance(node.target, OpOverload) and is_opaque(node)


def _nodes_in(values: Any) -> Iterator[fx.Node]:
    for value in values:
        if isinstance(value, fx.Node):
            yield value
        elif isinstance(value, list | tuple):
            yield from _nodes_in(value)
        elif isinstance(value, slice):
            yield from _nodes_in([value.start, value.stop, value.step])


def _last_readers(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Values by the node of their last use; an unused result dies at its own node."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        done = [item for item in (*node.all_input_nodes, *((node,) if not node.users else ())) if item not in seen]
        seen.update(done)
        kept = [item for item in dict.fromkeys(done) if item.op != "get_attr" and node.op != "output"]
        if kept:
            found[node] = kept
    return found


def _is_alike(*nodes: fx.Node) -> bool:
    """True if all tensors have the same type: an in-place add keeps the type of the operand it overwrites."""
    kinds = {tensor_type(node) for node in nodes}
    return len(kinds) == 1 and None not in kinds
