"""One op of the integer form on the best kernel of a target, outside of any program.

The kernels are offered for calls of a program. So there is one: of a single op, whose weights are constants. What no
kernel takes runs as the integer form writes it, which is exact.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from quantc.errors import MissingDependencyError
from quantc.integer import semantics
from quantc.integer.library import OPS
from quantc.ir.program import Program, Stage
from quantc.ir.signature import Input, Signature
from quantc.ir.types import TensorType
from quantc.targets.kernels.kernel_table import Call, candidates, kernels_for
from quantc.targets.kernels.selection import by_table

TARGETS = {"x86": "x86", "fbgemm": "x86", "onednn": "x86", "qnnpack": "qnnpack"}
"""The kernels for each of torch's engines."""
Run = Callable[..., Any]


def target() -> str:
    """The kernels that `torch.backends.quantized.engine` asks for."""
    engine = torch.backends.quantized.engine
    found = TARGETS.get(str(engine))
    if found is None:
        raise MissingDependencyError(
            f"quantized modules have no kernels for the engine {engine!r}",
            where="torch.backends.quantized.engine",
            advice=f"set it to one of {', '.join(TARGETS)}",
        )
    return found


engine_number: Callable[[], int] = torch._C._get_qengine
"""torch's engine as a number, which takes a tenth of the time of its name: what kernels are remembered by."""


def on_kernel(target: str, op: str, inputs: Sequence[Tensor | Sequence[Tensor]], arguments: Mapping[str, Any]) -> Run:
    """A function that runs an op of the integer form on inputs like these.

    `arguments` are the others of its schema, in order. Only dtypes and shapes of the inputs matter here; the function takes
    inputs flat, also those in lists.
    """
    semantics.load()
    call = _call(op, inputs, arguments)
    found, _ = candidates(kernels_for(target).get(call.op, []), call, allow_float=False)
    if not found:
        return _as_written(op, pytree.tree_structure(list(inputs)), tuple(arguments.values()))
    alike = [item.kernel for item in found if item.inputs == found[0].inputs]
    kernel = by_table(target, alike, found[0].inputs, {}).taken
    kernel.in_order = False  # results lie as the kernel makes them: those who read them take them so
    return kernel.forward


def _as_written(op: str, form: pytree.TreeSpec, rest: tuple[Any, ...]) -> Run:
    """The op itself, of the same flat inputs that a kernel takes."""
    op_target: Any = OPS[op].target
    return lambda *inputs: op_target(*pytree.tree_unflatten(inputs, form), *rest)


def _call(op: str, inputs: Sequence[Any], arguments: Mapping[str, Any]) -> Call:
    """A program of one op."""
    graph, root = fx.Graph(), nn.Module()

    def given(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [given(item) for item in value]
        node = graph.placeholder(f"x_{len(graph.nodes)}")
        node.meta["val"] = TensorType(value.dtype, tuple(value.shape))
        return node

    def constant(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [constant(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        name = f"c_{len(graph.nodes)}"
        root.register_buffer(name, value)
        node = graph.create_node("get_attr", name)
        node.meta["val"] = TensorType(value.dtype, tuple(value.shape))
        return node

    read = [given(value) for value in inputs]
    node = graph.call_function(OPS[op].target, (*read, *(constant(value) for value in arguments.values())))
    graph.output(node)
    leaves, spec = pytree.tree_flatten((tuple(inputs), {}))
    named = tuple(Input(f"x_{index}", TensorType(x.dtype, tuple(x.shape))) for index, x in enumerate(leaves))
    out = pytree.tree_structure(0)
    return Call(Program(graph, root, Signature(named, spec, out), name=op, stage=Stage.LOWERED), node)


class KernelCache:
    """A cache of a module's kernels, left out of copies and pickles."""

    MAX_KEPT = 4
    """A module mostly sees one grid; more are forgotten, the oldest first."""

    def __init__(self) -> None:
        self._made: OrderedDict[Hashable, Run] = OrderedDict()

    def get(self, key: Hashable) -> Run | None:
        return self._made.get(key)

    def made(self, key: Hashable, make: Callable[[], Run]) -> Run:
        """The kernel for a key, which is made if there is none. Two threads may make the same: one is used in the end."""
        found = self._made.get(key)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = make()
            self._made[key] = found
            while len(self._made) > self.MAX_KEPT:
                self._made.popitem(last=False)
        return found

    def clear(self) -> None:
        self._made.clear()

    def __deepcopy__(self, memo: Any) -> KernelCache:
        return KernelCache()

    def __reduce__(self) -> Any:
        return KernelCache, ()
