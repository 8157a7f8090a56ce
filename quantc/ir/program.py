"""Program: a captured model as one fx graph in one dialect, with typed side tables and the log of passes.

It runs like the model it was captured from. Passes change it through `quantc.ir.program_graph`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from quantc.errors import AnnotationError, InputError, LoadError, ModeError
from quantc.ir.dialect import arguments
from quantc.ir.finite_inputs import Watch, check_has_numbers, why_no_range
from quantc.ir.graph_tree import attribute
from quantc.ir.lift_constants import lift_constants, with_checked_norms
from quantc.ir.module_copy import copy_module
from quantc.ir.program_graph import ProgramGraph
from quantc.ir.signature import as_tensors
from quantc.ir.stage import LogEntry, Stage
from quantc.ir.types import ValueType

if TYPE_CHECKING:
    import networkx as nx

    from quantc.inspect.coverage import Coverage
    from quantc.inspect.explain import NodeExplanation
    from quantc.inspect.recovery_report import RecoveryReport
    from quantc.rewrite.partition import Partition
    from quantc.text.diff import Diff

NO_GRADIENT = "out=... arguments don't support automatic differentiation"
"""torch's error for writes with `out=` to a tensor that requires grad."""
TRAINED = "_fake_quantizers"
"""The submodule that holds the fake quantizers of a graph."""
DumpFormat = Literal["text", "table", "json", "dot", "graphml"]


@dataclass(eq=False)
class Program(ProgramGraph):
    """A captured model.

    `graph` is the top graph and `root` the module that owns everything the graphs refer to: parameters, buffers, nested
    graphs of higher-order ops, and opaque modules.
    """

    # -- running ---------------------------------------------------------------------------------------------

    @property
    def module(self) -> fx.GraphModule:
        """A `torch.fx.GraphModule` with the model's own calling convention."""
        if self._module is None:
            self._module = self._build()
        return self._module

    def _build(self) -> fx.GraphModule:
        graph, root = self._as_given()
        info = _PyTreeInfo(self.signature.parameters, self.signature.in_spec, self.signature.out_spec)
        graph.set_codegen(_PyTreeCodeGen(info))
        module = fx.GraphModule(root, graph, class_name=self.name.rpartition(".")[2] or "Program")
        for name, _ in self.root.named_buffers():
            # GraphModule copies attributes one by one and forgets which buffers are not saved
            parent, _, leaf = name.rpartition(".")
            if leaf in self.root.get_submodule(parent)._non_persistent_buffers_set:
                target = module.get_submodule(parent) if _has_submodule(module, parent) else None
                if target is not None and leaf in target._buffers:
                    target._non_persistent_buffers_set.add(leaf)
        module.train(self.training)
        return module

    def _as_given(self) -> tuple[fx.Graph, nn.Module | dict[str, Any]]:
        """The graph to build the module from, and the attributes it refers to; constants of nested graphs are
        lifted."""
        learns = self.training or self.is_live
        if any(path for path, _ in self.graphs()):
            return lift_constants(self, learns)
        return (with_checked_norms(self.graph) if learns and self.modes.rows else self.graph), self.root

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = self.signature.flatten(args, kwargs)
        leaves = as_tensors(leaves) or leaves
        self.signature.check(leaves, spec)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        check_has_numbers(self.name, self.root, leaves)
        module = self.module
        if (self.stage >= Stage.QUANTIZED or self.is_live) and not torch.compiler.is_compiling():
            self._watch_of(module).check(leaves)
        try:
            return module(*args, **kwargs)
        except RuntimeError as error:
            if NO_GRADIENT in str(error):
                raise InputError(
                    f"{self.name} writes with out=, which torch does not do while gradients are recorded",
                    where=str(error),
                    advice="call it under torch.no_grad() or torch.inference_mode()",
                ) from error
            if (found := why_no_range(self.name, self.nodes(), error)) is not None:
                raise found from error
            raise

    def _watch_of(self, module: fx.GraphModule) -> Watch:
        """The inputs that are checked for NaN, cached for the current module."""
        if self._watched is None or self._watched[0] is not module:
            self._watched = module, Watch.of(self.graph, self.signature)
        return self._watched[1]

    def run_flat(self, leaves: Iterable[Any]) -> list[Any]:
        """Run on flat inputs and return the flat outputs."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.signature.in_spec)
        return pytree.tree_leaves(self.module(*args, **kwargs))

    def train(self, mode: bool = True) -> Program:
        """Switch dropout, batch norm and the like to training; `train(False)` is `eval()`. Changes this Program."""
        if mode and self.inference_only:
            raise ModeError(
                f"{self.name} cannot be trained any more: {self.inference_only[0]}",
                where="; ".join(self.inference_only),
                advice="capture the model in training mode and prepare it with qat=True",
            )
        if mode != self.training and self.fixed_mode:
            raise ModeError(
                f"{self.name} cannot change its mode: {self.fixed_mode}",
                where=self.fixed_mode,
                advice=f"capture the model again in {'training' if mode else 'eval'} mode",
            )
        if self.is_live:
            return self._switch_modules(mode)
        for node, value in self.modes.rows.items():
            args = list(node.args)
            if value.position >= len(args) and isinstance(node.target, OpOverload):
                args += [row.default for row in arguments(node.target)[len(args) : value.position + 1]]
            args[value.position] = value.value(mode)
            node.args = tuple(args)
        if mode != self.training:
            self._switch_counters(mode)
        self.training = mode
        self.root.train(mode)
        self.touch()
        return self

    def eval(self) -> Program:
        return self.train(False)

    @property
    def is_live(self) -> bool:
        """True if it was prepared with `qat=True`: fake quantizers are in its graphs, and it follows the mode of its
        module at run time."""
        return TRAINED in self.root._modules

    def _switch_modules(self, mode: bool) -> Program:
        """Switch the mode without a rebuild: the module, which may be compiled or distributed, stays the same
        object."""
        self.training = mode
        self.root.train(mode)
        if self._module is not None:
            self._module.train(mode)
        return self

    def parameters(self) -> Iterator[nn.Parameter]:
        """The trainable parameters, for an optimizer. Transformations of the program keep the tensor objects."""
        return self.root.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trainable parameters with their names."""
        return self.root.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Parameters, buffers, and in training the ranges and the frozen state: everything `load_state_dict` needs to
        resume."""
        return self.root.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict` of this program, or of another that was prepared alike."""
        try:
            self.root.load_state_dict(state)
        except RuntimeError as error:
            raise LoadError(
                f"this is not the state of {self.name}: {error}",
                where=f"its stage is {self.stage.label}",
                advice="prepare the same model in the same way first, then load the state",
            ) from error

    def _switch_counters(self, training: bool) -> None:
        """Insert or remove the increments of the batch counters: batch norms count batches in training only."""
        add = torch.ops.aten.add_.Tensor
        nodes = {
            (id(graph), node.target): node for _, graph in self.graphs() for node in graph.find_nodes(op="get_attr")
        }
        for norm, target in self.counters.rows.items():
            counter = nodes.get((id(norm.graph), target))
            if training:
                if counter is None:
                    counter = nodes[id(norm.graph), target] = self.read(target, before=norm)
                self.emit(add, (counter, 1), before=norm, like=counter)
            elif counter is not None:
                for user in list(counter.users):
                    if user.target is add and not user.users:
                        self.erase(user)
                if not counter.users:
                    self.erase(counter)
                    del nodes[id(norm.graph), target]  # a module called twice has two norms with one counter

    # -- copying ---------------------------------------------------------------------------------------------

    def clone(self) -> Program:
        """An independent copy: neither graph nor tensors nor statistics are shared."""
        twin = self.draft()
        twin.plan.statistics = copy.deepcopy(twin.plan.statistics)
        twin.plan.collected = copy.deepcopy(twin.plan.collected)
        return twin

    __copy__ = clone

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        memo[id(self)] = twin = self.clone()
        return twin

    def __reduce__(self) -> Any:
        """Pickle as the file that `save` writes: never contains code. SaveError if a file cannot hold the program."""
        from quantc.store.bytes_form import as_bytes, program_of

        return program_of, (as_bytes(self.save),)

    def draft(self) -> Program:
        """A copy that shares the statistics, which may be large: for callers that only read them."""
        root = copy_module(self.root)
        nodes: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        results = graph.graph_copy(self.graph, nodes)
        old_output = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        nodes[old_output] = graph.output(results)
        twin = Program(graph, root, self.signature)
        for (_, old), (_, new) in zip(self.graphs(), twin.graphs(), strict=True):
            if old is not self.graph:
                nodes.update(zip(old.nodes, new.nodes, strict=True))
        for old_node, new_node in nodes.items():
            new_node.meta = copy.copy(old_node.meta)
            new_node.name = old_node.name  # fx renames nodes that shadow builtins; keep the names
            new_node.graph._graph_namespace._used_names.add(old_node.name)
        for attr in ("name", "method", "training", "stage", "inference_only", "fixed_mode", "example_inputs"):
            setattr(twin, attr, getattr(self, attr))
        twin.log = list(self.log)
        for table in ("origins", "modes", "counters", "set_aside", "plan", "placements"):
            setattr(twin, table, getattr(self, table).renamed(nodes))
        return twin

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the Program atomically to a file that `qc.load` reads. SaveError, naming the node, if a file cannot
        hold it."""
        from quantc.store import save

        save(self, path)

    # -- inspecting (each is a module of its own; these are the doors) ---------------------------------------

    def slice(self, part: str | fx.Node | Iterable[fx.Node | str]) -> Program:
        """A part as a Program, on copies of its tensors: a module by its path, a range `first..last`, or nodes of the top
        graph. Its inputs and outputs are the values that cross its boundary."""
        from quantc.rewrite.partition import slice_program

        return slice_program(self, part)

    def partition(
        self, claimed: Callable[[fx.Node], bool] | str | fx.Node | Iterable[fx.Node | str] | None = None
    ) -> Partition:
        """Regions of claimed nodes, each a Program, and the host, which computes the rest and calls them. Claimed are by
        default the nodes that a quantizer has claimed."""
        from quantc.rewrite.partition import partition_program

        return partition_program(self, claimed)

    def dump(
        self,
        format: DumpFormat = "text",  # noqa: A002 - as users know it
        *,
        only: str | None = None,
        plan: bool = True,
    ) -> str:
        """The Program as text. "text" parses back with `quantc.parse`; without `plan` it is that of the graphs alone.
        `only` prints a part: a module by its path, or nodes from one to another, `"first..last"`."""
        from quantc.text.printer import dump

        return dump(self, format, only, plan)

    def diff(self, other: Program) -> Diff:
        """The changes from this Program to `other`."""
        from quantc.text.diff import diff

        return diff(self, other)

    def coverage(self) -> Coverage:
        """The outcome for every op of a prepared program: quantized, propagated, or float with the reason."""
        from quantc.inspect.coverage import coverage

        return coverage(self)

    def recovery(self) -> RecoveryReport:
        """Report of the passes that fit weights, site by site."""
        from quantc.inspect.recovery_report import RecoveryReport

        return RecoveryReport.of(self.log)

    def explain(self, node: fx.Node | str) -> NodeExplanation:
        """The outcome for one node, or for the ops of a module given by its path; every rule tried on it, and the
        smallest change that would make one fit."""
        from quantc.inspect.explain import explain

        return explain(self, node)

    def verify(self) -> None:
        """Check every invariant of the IR; raise one VerifyError that lists all faults."""
        from quantc.verify.verify import verify

        verify(self)

    def to_networkx(self, *, only: str | None = None) -> nx.MultiDiGraph[str]:
        """The graph for networkx: one vertex a node, one edge an operand; or a part of it, as in `dump`."""
        from quantc.text.printer import to_networkx

        return to_networkx(self, only)

    def __str__(self) -> str:
        return self.dump("text")

    def __repr__(self) -> str:
        return f"<Program {self.name}: {len(self.graph.nodes)} nodes, {self.stage.label}, by {self.method}>"


def check_has_plan(program: Program, verb: str) -> None:
    """Raise AnnotationError if a prepared program has lost its plan: all of it would be treated as float."""
    if Stage.ANNOTATED <= program.stage < Stage.LOWERED and program.plan.says_nothing:
        raise AnnotationError(
            f"{program.name} has no plan, so qc.{verb} would leave all of it float",
            where=f"its stage is {program.stage.label}; what was decided is in the section `plan` of its text, if that has one",
            advice="write it with program.dump(), or program.save and qc.load; or prepare the float program again",
        )


def check_program(given: object, verb: str, first: str) -> None:
    """Raise InputError if `given` is not a Program, such as the model itself."""
    if not isinstance(given, Program):
        raise InputError(
            f"qc.{verb} was given a {type(given).__name__}, and takes a Program",
            where=f"the first argument of qc.{verb}",
            advice=f"write {first} first",
        )


def _has_submodule(root: nn.Module, path: str) -> bool:
    return not path or isinstance(attribute(root, path), nn.Module)


__all__ = [
    "DumpFormat",
    "InputError",
    "LogEntry",
    "Program",
    "Stage",
    "ValueType",
    "attribute",
    "check_program",
]
