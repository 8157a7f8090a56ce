"""Capture by observing a run: each torch call becomes ATen nodes, and Python decides what is called.

Control flow is not captured, only its outcome: a model with branches and loops yields the calls that were made. A
repeated call from the same call site (a loop, recursion) maps to the same nodes; where it then reads other tensors than
the first time, these become results of the program too, so that they are not treated as intermediates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from quantc.capture.assemble import SymbolNames, assemble, inputs_of
from quantc.capture.runtime.call_tracing import aims_of, tensors_in, trace_call
from quantc.capture.runtime.write_detection import Exact, Stamp
from quantc.errors import CaptureError
from quantc.ir.alias_analysis import in_place_operand
from quantc.ir.program import Program
from quantc.ir.signature import Signature
from quantc.ir.sites import Origin

INPUT = "input_"
"""Prefix of the names of the model's own inputs, before their number."""
ARITHMETIC = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "rsub",
        "add_",
        "sub_",
        "mul_",
        "div_",
        "__add__",
        "__sub__",
        "__mul__",
        "__truediv__",
        "__radd__",
        "__rsub__",
        "__rmul__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
    ]
)
"""Arithmetic of a tensor with another or a number: the number may come from data, if the model reads elements."""


@dataclass(frozen=True, slots=True)
class SeenAt(Origin):
    """Origin of a node, and the number of its call: rows of `origins` follow their nodes."""

    call: int = -1


@dataclass(slots=True)
class SeenCall:
    """One call site of the model: its operands, and the nodes it became."""

    number: int
    name: str
    reads: tuple[fx.Node, ...]
    """The node of each tensor among its arguments, in their flat order; where these differ from one time to the next, an
    input that stands for any of them."""
    makes: tuple[fx.Node | None, ...]
    """The node of each tensor that it gave."""
    writes_first: bool
    """True if it returned its first argument, changed in place."""
    writes: tuple[int, ...] = ()
    """The tensors that it was given and has changed, by position: their nodes come last in `makes`."""
    times: int = 1


@dataclass(slots=True)
class Value:
    """A known tensor, kept alive so that its id is not reused."""

    tensor: Tensor
    node: fx.Node
    stamp: Stamp
    """Its contents when the node was its value."""


@dataclass
class Recorder:
    """Records the calls of a model, in the order in which they are first made."""

    model: nn.Module
    graph: fx.Graph = field(default_factory=fx.Graph)
    calls: list[SeenCall] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Reasons why a straight-line program cannot repeat the model."""
    _values: dict[int, Value] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    """Of parameters and buffers, by id."""
    _constants: dict[str, Tensor] = field(default_factory=dict)
    _origins: dict[fx.Node, SeenAt] = field(default_factory=dict)
    _inputs: list[tuple[fx.Node, Any]] = field(default_factory=list)
    _given: list[fx.Node] = field(default_factory=list)
    """The placeholders of the model's own inputs, by position."""
    _read: dict[fx.Node, None] = field(default_factory=dict)
    """The nodes whose values are used in ways that the graph does not show, in order."""
    _first: fx.Node | None = None
    _versions: list[tuple[str, Tensor, int]] = field(default_factory=list)
    """Parameters and buffers, and how often torch had counted a write to them before the model ran."""

    def __post_init__(self) -> None:
        for name, tensor in [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]:
            self._names.setdefault(id(tensor), name)
            if not tensor.is_inference():
                self._versions.append((name, tensor, tensor._version))

    def written(self) -> frozenset[str]:
        """Parameters and buffers that the model has written to so far."""
        return frozenset(name for name, tensor, version in self._versions if tensor._version != version)

    # -- what comes in ---------------------------------------------------------------------------------------------

    def begin(self, leaves: Iterable[Any]) -> None:
        """Start one run of the model. Further runs read the inputs of the first where they are alike."""
        self._values.clear()
        for position, leaf in enumerate(leaves):
            if position >= len(self._given):
                self._given.append(self._placeholder(f"{INPUT}{position}", leaf))
                self._inputs.append((self._given[position], leaf))
            if isinstance(leaf, Tensor):
                self._values[id(leaf)] = Value(leaf, self._given[position], Stamp(leaf, Exact.YES))

    def _placeholder(self, name: str, leaf: Any) -> fx.Node:
        if self._first is not None:
            with self.graph.inserting_before(self._first):
                node = self.graph.placeholder(name)
        else:
            node = self.graph.placeholder(name)
        if isinstance(leaf, Tensor):
            node.meta["val"] = leaf
        return node

    def is_constant(self, tensor: Tensor) -> bool:
        """True for a parameter or buffer of the model."""
        return id(tensor) in self._names

    def _node_of(self, tensor: Tensor) -> fx.Node:
        known = self._values.get(id(tensor))
        if known is not None:
            return known.node
        if id(tensor) in self._names:
            node = self._attribute(self._names[id(tensor)], tensor)
        else:
            node = self._placeholder(f"outside_{len(self._inputs)}", tensor)
            self._inputs.append((node, tensor))
            self.reasons.append(f"a tensor of shape {tuple(tensor.shape)} comes from outside of the model")
        self._values[id(tensor)] = Value(tensor, node, Stamp(tensor, Exact.YES))
        return node

    def arrive(self, tensors: Sequence[Tensor]) -> list[Stamp]:
        """Announce the operands of a call. If one was written to since the call that made it, through an alias or
        outside torch, only its type is known. Returns their state before the call.
        """
        for tensor in tensors:
            known = self._values.get(id(tensor))
            if known is None or known.stamp.holds:
                continue
            if id(tensor) in self._names:
                raise self.changed(self._names[id(tensor)])
            self._read[known.node] = None
            known.node = self._placeholder(f"overwritten_{len(self._inputs)}", tensor)
            self._inputs.append((known.node, tensor))
            known.stamp.renew()
            self.reasons.append(
                f"a tensor of shape {tuple(tensor.shape)} is written to in other ways than by calls on it"
            )
        known_or_new = ((self._values.get(id(tensor)), tensor) for tensor in tensors)
        return [Stamp(tensor, Exact.YES) if value is None else value.stamp for value, tensor in known_or_new]

    def _find_writes(self, before: Sequence[Stamp], output: Any, aims: Collection[int] = ()) -> tuple[int, ...]:
        """Positions of the tensors that a call has written to, if the graph would not show it: those it does not return, that were read
        before, that come from outside, or whose memory others share. Tensors in `aims` count as written, even if their contents are
        unchanged this time."""
        changed = [index for index, stamp in enumerate(before) if index in aims or not stamp.holds]
        given_back = {id(tensor) for tensor in tensors_in(output)}
        return tuple(
            index
            for index in changed
            if id(before[index].tensor) not in given_back
            or self._node_of(before[index].tensor) in self._read
            or self._node_of(before[index].tensor).op == "placeholder"
            or any(
                value.tensor is not before[index].tensor and value.stamp.shares_memory(before[index].tensor)
                for value in self._values.values()
            )
        )

    def changed(self, name: str) -> CaptureError:
        """Error for a parameter or buffer that a quantized op reads and the model writes to."""
        return CaptureError(
            f"{name} is written to while the model runs, and what is quantized must stay as it is",
            where=f"{type(self.model).__name__}.{name}",
            advice="keep what changes in a tensor of its own, and give it to torch.nn.functional",
        )

    def _attribute(self, name: str, tensor: Tensor) -> fx.Node:
        found: fx.Node | None = next(
            (node for node in self.graph.find_nodes(op="get_attr") if node.target == name), None
        )
        if found is not None:
            return found
        node = self.graph.create_node("get_attr", name)
        self._first = self._first or node
        node.meta["val"] = tensor
        return node

    # -- calls -----------------------------------------------------------------------------------------------------

    def see(
        self,
        func: Callable[..., Any],
        given: tuple[Any, Any],
        output: Any,
        origin: Origin,
        before: Sequence[Stamp] = (),
    ) -> SeenCall:
        """Record a call from a new call site; `before` is the state of its arguments."""
        number = len(self.calls)
        reads = tuple(self._node_of(tensor) for tensor in tensors_in(given))
        row = SeenAt(origin.module_path, origin.module_type, origin.file, origin.line, call=number)
        writes = self._find_writes(before, output)
        traced = trace_call(func, given, writes)
        if traced is not None and (seen := self._find_writes(before, output, aims_of(traced))) != writes:
            writes = seen
            traced = trace_call(func, given, writes)
        made = None if traced is None else self._inline(traced, reads, row)
        if any(reads[index].name.startswith(INPUT) for index in writes):
            self.reasons.append(f"the model writes to its input ({origin})")
        results = tensors_in(output)
        if made is None or len(made) != len(results) + len(writes):
            made = self._whole(func, reads, row, [*results, *(tensors_in(given)[index] for index in writes)])
        first = tensors_in(given)[:1]
        call = SeenCall(
            number,
            str(getattr(func, "__name__", func)).partition(".")[0],
            reads,
            tuple(made),
            bool(first) and bool(results) and results[0] is first[0],
            writes,
        )
        self.calls.append(call)
        self._learn(call, given, output)
        return call

    def again(self, call: SeenCall, given: tuple[Any, Any], output: Any) -> None:
        """Record a call from a known call site."""
        call.times += 1
        reads = [self._node_of(tensor) for tensor in tensors_in(given)]
        if len(reads) != len(call.reads):
            self._read.update(dict.fromkeys(reads))
        for position, (node, first) in enumerate(zip(reads, call.reads, strict=False)):
            if node is not first:
                self._read[node] = None
                self._merge(call, position, first)
        self._learn(call, given, output)

    def _merge(self, call: SeenCall, position: int, first: fx.Node) -> None:
        """A call reads one tensor this time and another the next: nothing is known of it but what it is like."""
        if first.name.startswith("merged_"):
            return
        self._read[first] = None
        node = self._placeholder(f"merged_{call.number}_{position}", first.meta.get("val"))
        self._inputs.append((node, first.meta.get("val")))
        for reader, origin in self._origins.items():
            if origin.call == call.number:
                reader.replace_input_with(first, node)
        call.reads = (*call.reads[:position], node, *call.reads[position + 1 :])

    def read(self, tensors: Iterable[Tensor], why: str = "") -> None:
        """Record tensors whose values Python reads."""
        for tensor in tensors:
            if id(tensor) in self._values:
                self._read[self._values[id(tensor)].node] = None
                if why and why not in self.reasons:
                    self.reasons.append(why)

    def parameter(self, node: fx.Node) -> str:
        """Name of a node's parameter or buffer in the model; empty if it is none."""
        is_own = node.op == "get_attr" and str(node.target) not in self._constants
        return str(node.target) if is_own else ""

    def sources(self, node: fx.Node) -> tuple[str, ...]:
        """Parameters and buffers that a node is computed from, if from nothing else."""
        found: dict[fx.Node, None] = {}
        pending = list(node.all_input_nodes)
        while pending:
            read = pending.pop()
            if read in found:
                continue
            found[read] = None
            if read.op != "get_attr" and not read.all_input_nodes:
                return ()
            pending.extend(read.all_input_nodes)
        return tuple(dict.fromkeys(name for read in found if (name := self.parameter(read))))

    def _guard_numbers(self) -> None:
        """If the model reads elements, keep the tensors it scales as operands: its scalars may come from data, so are no constants."""
        if any("looks at numbers" in reason for reason in self.reasons):
            scaled = [call for call in self.calls if call.name in ARITHMETIC and len(call.reads) == 1]
            self._read.update({node: None for call in scaled for node in call.reads if node.op != "get_attr"})

    def _keep_ends(self) -> None:
        """If the model takes paths that the graph does not show, keep unread results: those paths may read them."""
        if self.reasons:
            ends = (node for call in self.calls for node in call.makes if node is not None and not node.users)
            self._read.update({node: None for node in ends if node.op == "call_function"})

    @property
    def _is_in_order(self) -> bool:
        """True if every call was made once, so that graph order is call order."""
        return not self.reasons and all(call.times == 1 for call in self.calls)

    def _operands(self, node: fx.Node, nodes: Mapping[fx.Node, fx.Node], graph: fx.Graph) -> Mapping[fx.Node, fx.Node]:
        """Operands of a node in another graph. Where call order is unknown, in-place ops write to a copy: other calls
        read the earlier value, though the graph has them later.
        """
        place = in_place_operand(node) if node.op == "call_function" and isinstance(node.target, OpOverload) else None
        if place is None:
            return nodes
        own = graph.call_function(torch.ops.aten.clone.default, (nodes[place],))
        own.meta = dict(place.meta)
        return {**nodes, place: own}

    def _learn(self, call: SeenCall, given: Any, output: Any) -> None:
        read = tensors_in(given)
        written = [read[index] for index in call.writes if index < len(read)]
        for tensor, node in zip([*tensors_in(output), *written], call.makes, strict=False):
            if node is not None:
                self._values[id(tensor)] = Value(tensor, node, Stamp(tensor, Exact.YES))

    def _inline(self, traced: fx.GraphModule, reads: tuple[fx.Node, ...], origin: SeenAt) -> list[fx.Node | None]:
        nodes: dict[fx.Node, fx.Node] = {}
        inputs = iter(reads)
        made: list[fx.Node | None] = []
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                nodes[node] = next(inputs)
            elif node.op == "get_attr":
                nodes[node] = self._constant(getattr(traced, str(node.target)))
            elif node.op == "output":
                made = [nodes.get(item) for item in pytree.tree_leaves(node.args)]
            else:
                nodes[node] = self._add(self.graph.node_copy(node, nodes.__getitem__), origin)
                nodes[node].meta = {"val": node.meta.get("val")}
        return made

    def _constant(self, tensor: Tensor) -> fx.Node:
        name = f"_traced_constant_{len(self._constants)}"
        self._constants[name] = tensor
        return self._attribute(name, tensor)

    def _add(self, node: fx.Node, origin: SeenAt) -> fx.Node:
        self._first = self._first or node
        self._origins[node] = origin
        return node

    def _whole(
        self, func: Callable[..., Any], reads: tuple[fx.Node, ...], origin: SeenAt, results: Sequence[Tensor]
    ) -> list[fx.Node | None]:
        """The call as something that is not known: what it gives comes from outside, and nothing is known of it but what it is like."""
        self.reasons.append(f"{getattr(func, '__name__', func)} has no form in ATen ({origin})")
        self._read.update(dict.fromkeys(reads))
        made: list[fx.Node | None] = []
        for index, result in enumerate(results):
            node = self._placeholder(f"made_{origin.call}_{index}", result)
            self._inputs.append((node, result))
            made.append(node)
        return made

    # -- what comes out --------------------------------------------------------------------------------------------

    def program(self, name: str, outputs: Iterable[Tensor], *, is_straight: bool = False) -> Program:
        """All calls as one program. Its results are `outputs`, and everything that is read in ways it does not show.

        Tensors that the model creates from nothing may differ in the next run, and so are inputs, unless the program
        `is_straight`: then it is what the model did, once.
        """
        results = dict.fromkeys(self._node_of(tensor) for tensor in outputs)
        self._read.update(results)
        if not is_straight:
            self._guard_numbers()
            self._keep_ends()
        made_of_nothing = {node for call in self.calls if not call.reads for node in call.makes} - {None}
        graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
        inputs = dict(self._inputs)
        is_in_order = is_straight or self._is_in_order
        if not is_straight:
            inputs |= {node: node.meta.get("val") for node in made_of_nothing if node is not None}
        for node in self.graph.nodes:
            if node in inputs:
                nodes[node] = graph.placeholder(node.name)
                nodes[node].meta = dict(node.meta)
        for node in self.graph.nodes:
            if node not in nodes:
                read = nodes if is_in_order else self._operands(node, nodes, graph)
                nodes[node] = graph.node_copy(node, read.__getitem__)
                nodes[node].meta = dict(node.meta)
        extra = [node for node in self._read if node not in results and node.op != "get_attr"]
        made = tuple(nodes[node] for node in (*results, *extra))
        graph.output(made)
        leaves = [inputs[node] for node in self.graph.nodes if node in inputs]
        in_spec = pytree.tree_flatten((tuple(leaves), {}))[1]
        out_spec = pytree.tree_flatten(list(made))[1]

        def signature(names: SymbolNames) -> Signature:
            placeholders = graph.find_nodes(op="placeholder")
            return Signature(inputs_of(placeholders, leaves, names), in_spec, out_spec)

        origins: Mapping[fx.Node, SeenAt] = {
            nodes[node]: row for node, row in self._origins.items() if node not in inputs
        }
        return assemble(
            graph,
            self.model,
            signature,
            name=name,
            method="tracing",
            is_training=self.model.training,
            constants=self._constants,
            origin_of=origins.get,
            mode_source=self.model,
        )
