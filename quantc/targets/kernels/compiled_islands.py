"""`qc.lower(..., compile=True)`: torch.compile fuses the float ops between kernels.

A run of adjacent kernels is an island: one custom op, `quantc::run_island`, opaque to the compiler. Everything between
islands stays visible to it, including quantize and dequantize, which it fuses.
"""

from __future__ import annotations

import itertools
import operator
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from quantc.errors import MissingDependencyError, QuantcError
from quantc.ir.placements import StandIn
from quantc.ir.program import Program, attribute
from quantc.ir.size_expressions import evaluate
from quantc.ir.types import TensorType, tensor_type
from quantc.qdq.ops import is_dequantize, is_quantize
from quantc.targets.kernels.codegen import straight_line
from quantc.targets.kernels.int8_elementwise import Dequantize, QuantizeKernel
from quantc.targets.kernels.kernel import Kernel

_LIBRARY = torch.library.Library("quantc", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("run_island(Tensor[] inputs, str key) -> Tensor[]")  # type: ignore[no-untyped-call]
RUN_ISLAND: Any = torch.ops.quantc.run_island.default
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The order in memory that tensors may have instead of the usual one, by their number of axes."""

_NUMBERS = itertools.count()


def check_compiler() -> None:
    """Raise MissingDependencyError unless inductor's C++ compiler is installed."""
    from torch._inductor import config

    wanted: Any = config.cpp.cxx
    names = [name for name in (wanted if isinstance(wanted, list | tuple) else (wanted,)) if name]
    if not any(shutil.which(name) for name in names):
        raise MissingDependencyError(
            f"there is no C++ compiler: {' or '.join(names)} is not on the path",
            where="qc.lower(..., compile=True)",
            advice="install g++ or clang, or name one in the environment variable CXX; or lower without compile=True",
        )


@dataclass(frozen=True, slots=True)
class Yield:
    """Type and memory format of one result of an island."""

    kind: TensorType
    order: torch.memory_format
    """Memory format, as the first run of the module had it."""

    def empty(self, sizes: Mapping[str, int]) -> Tensor:
        shape = [size if isinstance(size, int) else cast("int", evaluate(size, sizes)) for size in self.kind.shape]
        return torch.empty(shape, dtype=self.kind.dtype, memory_format=self.order)


class Island:
    """A run of adjacent kernels, executed as one opaque op."""

    def __init__(
        self, module: fx.GraphModule, kinds: Sequence[TensorType], yields: Sequence[Yield], written: frozenset[int]
    ) -> None:
        self.module, self.kinds, self.yields, self.written = module, kinds, yields, written
        """`kinds` are those of the inputs; `written` says which of these a kernel writes over."""
        self.line = straight_line(module)
        self.key = f"island_{next(_NUMBERS)}"
        _ISLANDS[self.key] = self

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        given = [tensor.clone() if index in self.written else tensor for index, tensor in enumerate(inputs)]
        taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        results: list[Tensor] = []
        for tensor, made in zip(self.line(*given), self.yields, strict=True):
            # results must own their memory, in the memory format that the compiler was told
            laid = tensor.contiguous(memory_format=made.order)
            results.append(laid.clone() if laid.untyped_storage().data_ptr() in taken else laid)
            taken.add(results[-1].untyped_storage().data_ptr())
        return results

    def shapes(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        sizes: dict[str, int] = {}
        for kind, tensor in zip(self.kinds, inputs, strict=True):
            sizes.update({str(name): size for name, size in zip(kind.shape, tensor.shape, strict=True)})
        return [made.empty(sizes) for made in self.yields]


_ISLANDS: WeakValueDictionary[str, Island] = WeakValueDictionary()
torch.library.impl("quantc::run_island", "cpu", lambda inputs, key: _ISLANDS[key].run(inputs), lib=_LIBRARY)
torch.library.register_fake("quantc::run_island", lambda inputs, key: _ISLANDS[key].shapes(inputs), lib=_LIBRARY)


def _is_symbol(size: int | str) -> bool:
    return isinstance(size, str) and size.isidentifier()


class _Runs(Protocol):
    def __call__(self, *leaves: Any) -> Sequence[Any]: ...


class CompiledIslands:
    """A lowered module whose ops between kernels are compiled at the first call."""

    def __init__(self, program: Program, module: fx.GraphModule, stand_ins: Mapping[str, StandIn]) -> None:
        check_compiler()
        self.program, self.module, self.stand_ins = program, module, stand_ins
        self.islands: list[Island] = []
        self._ready: _Runs | None = None
        self._compiling = threading.Lock()

    def __call__(self, *leaves: Any) -> Sequence[Any]:
        with torch.no_grad():
            ready = self._ready
            if ready is None:
                with self._compiling:  # several threads may come here at once
                    ready = self._ready = self._ready or self._compile(leaves)
            return ready(*leaves)

    def _compile(self, leaves: Sequence[Any]) -> _Runs:
        seen = _Seen(self.module)
        seen.run(*leaves, enable_io_processing=False)
        drawing = _Drawing(self.program, self.module, seen.orders, self.stand_ins)
        graph = drawing.drawn()
        self.islands = drawing.islands
        is_dynamic = any(not item.type.is_static for item in self.program.signature.inputs if item.type is not None)
        made = torch.compile(fx.GraphModule(self.module, graph), dynamic=is_dynamic, fullgraph=True)
        made(*leaves)  # within the lock
        return cast("_Runs", made)


class _Seen(fx.Interpreter):
    """Runs a module and records the memory format of tensors."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.orders: dict[fx.Node, torch.memory_format] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        last = FORMATS.get(value.dim()) if isinstance(value, Tensor) else None
        is_last = last is not None and not value.is_contiguous() and value.is_contiguous(memory_format=last)
        self.orders[n] = last if is_last and last is not None else torch.contiguous_format
        return value


class _Drawing:
    """The graph of a module with its kernels in islands."""

    def __init__(
        self,
        program: Program,
        module: fx.GraphModule,
        orders: Mapping[fx.Node, torch.memory_format],
        stand_ins: Mapping[str, StandIn],
    ) -> None:
        self.module, self.orders, self.stand_ins = module, orders, stand_ins
        self.written_in: dict[str, fx.Node] = {node.name: node for node in program.graph.nodes}
        """The nodes of the program, as it is written."""
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.islands: list[Island] = []

    def drawn(self) -> fx.Graph:
        for is_island, group in _groups(self.module.graph, self._is_closed):
            if is_island:
                self._island(group)
                continue
            for node in group:
                open_form = self._open_form(node)
                if open_form is None:
                    self.made[node] = self.graph.node_copy(node, self.made.__getitem__)
                else:
                    x = self.made[node.args[0]]  # type: ignore[index]
                    self.made[node] = self.graph.call_function(
                        cast("Any", open_form.target), (x, *open_form.args[1:]), dict(open_form.kwargs)
                    )
        return self.graph

    def _kernel(self, node: fx.Node) -> Kernel | None:
        found = attribute(self.module, str(node.target)) if node.op == "call_module" else None
        return found if isinstance(found, Kernel) else None

    def _is_closed(self, node: fx.Node) -> bool:
        """True if a node is opaque to the compiler: kernels, and branches, which may contain some."""
        has_branches = any(self._is_branch(source) for source in node.all_input_nodes)
        return has_branches or self._is_branch(node) or self._is_opaque(node)

    def _is_opaque(self, node: fx.Node) -> bool:
        """True if a node is a kernel that the compiler cannot replace; one without inputs is a weight that is made once."""
        return self._kernel(node) is not None and bool(node.all_input_nodes) and not self._open_form(node)

    def _is_branch(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and isinstance(attribute(self.module, str(node.target)), fx.GraphModule)

    def _open_form(self, node: fx.Node) -> fx.Node | None:
        """The program's node for a quantize or dequantize kernel: the compiler fuses it with its neighbours."""
        if not isinstance(self._kernel(node), QuantizeKernel | Dequantize):
            return None  # other kernels may replace a quantize op together with ops before it
        found = self.written_in.get(str(self.stand_ins.get(node.name, node.name)))
        is_grid = found is not None and (is_quantize(found) or is_dequantize(found))
        return found if is_grid and found is not None and len(found.all_input_nodes) == 1 else None

    def _island(self, group: Sequence[fx.Node]) -> None:
        inside = set(group)
        sources = dict.fromkeys(source for node in group for source in node.all_input_nodes if source not in inside)
        results = [node for node in group if any(user not in inside for user in node.users)]
        yields = [Yield(self._kind(node), self.orders[node]) for node in results]
        inputs = [*sources, *self._that_have_sizes(list(sources), yields)]
        graph = fx.Graph()
        copies = {source: graph.placeholder(source.name) for source in inputs}
        for node in group:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output([copies[node] for node in results])
        written = [
            node.args[kernel.written_over]
            for node in group
            if (kernel := self._kernel(node)) is not None and kernel.written_over is not None
        ]
        island = Island(
            fx.GraphModule(self.module, graph),
            [self._kind(source) for source in inputs],
            yields,
            frozenset(index for index, source in enumerate(inputs) if source in written),
        )
        self.islands.append(island)
        call = self.graph.call_function(RUN_ISLAND, ([self.made[source] for source in inputs], island.key))
        for index, node in enumerate(results):
            self.made[node] = self.graph.call_function(operator.getitem, (call, index))

    def _kind(self, node: fx.Node) -> TensorType:
        kind = tensor_type(node)
        if kind is None:
            raise QuantcError(
                f"{node.name} is no tensor, and kernels read or make it",
                where="qc.lower(..., compile=True)",
                advice="lower without compile=True",
            )
        return kind

    def _that_have_sizes(self, sources: list[fx.Node], yields: Sequence[Yield]) -> Iterator[fx.Node]:
        """Inputs of the module that determine the sizes of results, where the island's own inputs do not."""
        known = {size for source in sources for size in self._kind(source).shape}
        wanted = {size for made in yields for size in made.kind.shape if isinstance(size, str)}
        if all(_is_symbol(size) and size in known for size in wanted):
            return
        for node in self.module.graph.find_nodes(op="placeholder"):
            kind = tensor_type(node)
            if kind is not None and not kind.is_static and node not in sources:
                yield node


def _groups(graph: fx.Graph, is_closed: Any) -> Iterator[tuple[bool, list[fx.Node]]]:
    """The nodes of a graph in order, those that are closed and follow on each other together."""
    group: list[fx.Node] = []
    for node in graph.nodes:
        is_part = node.target is operator.getitem and node.args[0] in group
        if is_closed(node) or is_part:
            group.append(node)
            continue
        if group:
            yield True, group
            group = []
        yield False, [node]
    if group:
        yield True, group


def compile_islands(program: Program, module: fx.GraphModule, stand_ins: Mapping[str, StandIn]) -> CompiledIslands:
    """Lowered module to be compiled at its first call. MissingDependencyError without a C++ compiler."""
    return CompiledIslands(program, module, stand_ins)
