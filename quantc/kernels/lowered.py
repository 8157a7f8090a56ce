"""`qc.lower`: a quantized program as a module on real kernels."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from quantc.constants import forget_unread
from quantc.errors import InputError, ModeError, QuantcError
from quantc.integer.library import op_of
from quantc.kernels.attention import fuse_attention
from quantc.kernels.choosing import Choice, by_table
from quantc.kernels.holding import Holdings
from quantc.kernels.joining import PREFIX, absorb_readers, in_usual_order, join_siblings, kernels_of
from quantc.kernels.packed import Kernel
from quantc.kernels.saturation import warn_of_saturation
from quantc.kernels.static_conv import settle_summands
from quantc.kernels.table import HIGHEST, Call, Maker, NoKernelError, Placement, highest_level, kernels_for
from quantc.kernels.tuning import tune
from quantc.macs import example_sizes
from quantc.passes.eliminate_dead import EliminateDead
from quantc.program import Program, Stage, check_program
from quantc.progress import Style
from quantc.terminal import plain_rows

MOST_ROWS = 40
"""How many ops the text shows."""
MOST_SHAPES = 256
"""How many shapes of inputs are remembered as fitting."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One op of the integer form, and what runs it."""

    node: str
    op: str
    kernel: str
    """Empty where it runs as it is written."""
    reason: str
    """Why no kernel took it, or why those that come first did not."""
    chosen: str = ""
    """What the choice among several kernels was made by: "table", "measured" or "remembered"."""
    work: str = ""
    """What it has to do, where there was a choice."""
    microseconds: dict[str, float] = field(default_factory=dict)
    """The time of each kernel that could have been taken; of the nearest shape, if chosen by the table."""

    @property
    def why(self) -> str:
        """The reason and the times, on one line."""
        times = ", ".join(f"{name} {time:.0f} µs" for name, time in self.microseconds.items())
        return "; ".join(part for part in (self.reason, f"{self.chosen}: {times}" if times else "") if part)

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.node} ({self.op}): {self.kernel or 'as written'}{why}"


@dataclass(frozen=True, slots=True)
class Choosing:
    """How kernels are chosen where several could run an op."""

    tune: bool | tuple[Any, ...] = False
    """Whether they are timed here, or the inputs to time them on."""
    allow_float: bool = False
    """Whether a product of bytes may be computed in float where that is faster."""
    progress: Style = "auto"


class Lowered(nn.Module):
    """A quantized program on the kernels of a target. Called like the model; `placed` says what runs each op.

    Several threads may call it at once. Weights are plain until the first call, which packs them; from then on only
    the packed ones are held, where they can be unpacked again.
    """

    def __init__(self, program: Program, target: str, choosing: Choosing | None = None) -> None:
        super().__init__()
        self._program = program
        self.target = target
        self.choosing = Choosing() if choosing is None else choosing
        self.module, self.placed = _on_kernels(program, target, self.choosing)
        """The module takes the flat inputs and gives the flat outputs: trees take as long as a small layer."""
        self._holdings = Holdings(program, self.module)
        self._is_settled = False
        """Whether plain weights were let go of."""
        self._settling = threading.Lock()
        self._digest = _digest(program)
        self._checked: set[Any] = set()
        """The shapes that are known to fit: looking at every input each time takes as long as a small layer."""
        self.eval()

    @property
    def program(self) -> Program:
        """The portable form: the program in integer form, on plain tensors. It can be saved, copied, exported and
        compiled. Weights that only kernels hold are unpacked for it each time it is asked for."""
        return self._holdings.whole()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else None for x in args)
        leaves: Sequence[Any] = args
        signature = self._program.signature
        if kwargs or shapes not in self._checked:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            signature.check(leaves, spec)
            if not kwargs and None not in shapes and len(self._checked) < MOST_SHAPES:
                self._checked.add(shapes)
        made = self.module.forward(*leaves)
        if not self._is_settled:
            self._settle()
        return made[0] if signature.out_spec.is_leaf() else pytree.tree_unflatten(made, signature.out_spec)

    def _settle(self) -> None:
        with self._settling:
            if not self._is_settled:
                self._holdings.release()
                self._is_settled = True

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._is_settled = False

    def train(self, mode: bool = True) -> Lowered:
        """`eval()`, or an error: kernels have no gradients."""
        if mode:
            raise ModeError(
                f"{self._program.name} runs on kernels, which cannot be trained",
                where=f"lowered for {self.target}",
                advice="train the model itself, and quantize it again",
            )
        return super().train(False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program to a file, with nothing packed: `qc.lower(qc.load(path), target)` packs it again."""
        self.program.save(path)

    def get_extra_state(self) -> Tensor:
        """What tells programs apart that differ in scales and zero points alone: many of those are no tensors."""
        return self._digest

    def set_extra_state(self, state: Tensor) -> None:
        if not torch.equal(state, self._digest):
            raise InputError(
                "this is the state of another program: its scales and zero points differ",
                where=f"load_state_dict of {self._program.name} on {self.target}",
                advice="load the program it comes from, qc.lower(qc.load(path), target), and not its tensors alone",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Lowered:
        return Lowered(self.program.clone(), self.target, self._again())

    def _again(self) -> Choosing:
        """How a copy chooses: what was timed once is remembered."""
        return replace(self.choosing, progress="silent")

    def __reduce__(self) -> Any:
        """Pickled as the file that `save` writes: code is never part of it, nor anything packed."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "program"
            self.save(path)
            return _lowered_from, (path.read_bytes(), self.target, self._again())

    @property
    def headline(self) -> str:
        on_kernels = sum(bool(row.kernel) for row in self.placed)
        return f"{self._program.name} on {self.target}: {on_kernels} of {len(self.placed)} ops on kernels"

    def to_data(self) -> dict[str, Any]:
        """What runs each op, for machines."""
        return {"program": self._program.name, "target": self.target, "ops": [asdict(row) for row in self.placed]}

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        rows = [(row.node, row.op, row.kernel or "as written", row.why) for row in self.placed[:MOST_ROWS]]
        more = [f"  … and {len(self.placed) - MOST_ROWS} more"] if len(self.placed) > MOST_ROWS else []
        return "\n".join([self.headline, *(plain_rows(("node", "op", "runs on", "why"), rows) if rows else []), *more])

    def __repr__(self) -> str:
        return f"<Lowered {self.headline}>"


def _digest(program: Program) -> Tensor:
    """Of a program without its tensors."""
    text = "\n".join(f"{node.name} {node.target} {node.args} {node.kwargs}" for node in program.nodes())
    return torch.frombuffer(bytearray(sha256(text.encode()).digest()), dtype=torch.uint8)


def _lowered_from(content: bytes, target: str, choosing: Choosing) -> Lowered:
    """The module that was pickled."""
    from quantc.store.programs import load

    with TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        path.write_bytes(content)
        return Lowered(load(path), target, choosing)


def lower(
    program: Program,
    target: str,
    *,
    tune: bool | tuple[Any, ...] = False,
    allow_float: bool = False,
    progress: Style = "auto",
) -> Lowered:
    """A quantized program as a module on the kernels of a target: "x86" or "qnnpack".

    `program` is what `qc.convert` gave, in Q/DQ or in integer form; it is not changed. Kernels compute what the integer
    form does, within one step; ops for which the target has none run as the integer form writes them, and
    `lowered.placed` says why.

    Where several kernels could run an op, the choice goes by a table of times. `tune=True` times them on this machine,
    on the program's example inputs, or on the inputs that are given: `tune=(x,)`; what was measured is remembered for
    the next time. `allow_float=True` lets products of bytes be computed in float where that is faster.
    """
    from quantc import pipelines

    check_program(program, "lower", "qc.convert(prepared), or take result.program of qc.quantize(...),")
    kernels_for(target)
    if program.stage < Stage.FOLDED:
        raise QuantcError(
            f"{program.name} is not quantized",
            where=f"its stage is {program.stage.label}",
            advice="call qc.convert(prepared) first, or qc.quantize",
        )
    own = program.clone() if program.stage >= Stage.LOWERED else pipelines.lower().run_on_copy(program)
    made = Lowered(own, target, Choosing(tune, allow_float, progress))
    if made.placed and not any(row.kernel for row in made.placed):
        warnings.warn(
            f"{target} has a kernel for none of the {len(made.placed)} quantized ops of {own.name}, so that they run as "
            "the integer form writes them, which is slow: print(lowered) says why",
            stacklevel=2,
        )
    return made


def _on_kernels(program: Program, target: str, choosing: Choosing) -> tuple[fx.GraphModule, tuple[Placed, ...]]:
    """The module of a program with kernels in the place of ops; the program itself is not changed."""
    draft = program.draft()
    _share_tensors(draft.root, program.root)
    placed, choices = _place(draft, target, choosing.allow_float)
    EliminateDead().run(draft)
    if choosing.tune is not False:
        inputs = program.example_inputs if choosing.tune is True else _leaves(program, choosing.tune)
        choices = tune(_flat(draft.module), choices, inputs, partial(_exchange, draft), choosing.progress)
    for node, choice in choices.items():
        times = {name: round(time, 1) for name, time in choice.microseconds.items()}
        placed[node] = replace(placed[node], chosen=choice.by, work=str(choice.work or ""), microseconds=times)
    absorb_readers(draft)
    for _, graph in draft.graphs():
        for node, kernel in kernels_of(draft, graph):
            placed[node] = replace(placed[node], kernel=kernel.extra_repr())
    left = set(draft.nodes())
    placed = {node: row for node, row in placed.items() if node in left}
    warn_of_saturation(
        (placed[node].node, kernel) for _, graph in draft.graphs() for node, kernel in kernels_of(draft, graph)
    )
    for node, count in join_siblings(draft).items():
        placed[node] = replace(placed[node], kernel=f"{placed[node].kernel}; {count} in one")
    fuse_attention(draft)
    in_usual_order(draft)
    EliminateDead().run(draft)
    settle_summands(draft)
    forget_unread(draft)
    return _flat(draft.module), tuple(placed.values())


def _flat(module: fx.GraphModule) -> fx.GraphModule:
    """A module that takes flat inputs and gives flat outputs."""
    module.graph.set_codegen(CodeGen())
    module.recompile()
    return module


def _leaves(program: Program, inputs: tuple[Any, ...]) -> list[Any]:
    leaves, spec = pytree.tree_flatten((inputs, {}))
    program.signature.check(leaves, spec)
    return leaves


def _place(draft: Program, target: str, allow_float: bool) -> tuple[dict[fx.Node, Placed], dict[fx.Node, Choice]]:
    """Put kernels in the place of ops; what became of each, by the node that now computes it."""
    makers = kernels_for(target)
    sizes = example_sizes(draft)
    placed: dict[fx.Node, Placed] = {}
    choices: dict[fx.Node, Choice] = {}
    for _, graph in draft.graphs():
        for node in list(graph.nodes):
            call = Call(draft, node)
            if node.op != "call_function" or (call.op not in makers and op_of(node.target) is None):
                continue
            found, reason = _candidates(makers.get(call.op, []), call, allow_float)
            if not found:
                placed[node] = Placed(node.name, call.op, "", reason)
                continue
            # kernels that do the work of other ops too come first, and are not compared with those that do not
            alike = [item.kernel for item in found if item.inputs == found[0].inputs]
            choice = by_table(target, alike, found[0].inputs, sizes)
            running = _put(draft, graph, call, Placement(choice.taken, found[0].inputs))
            placed[running] = Placed(node.name, call.op, choice.taken.name, reason)
            choices[running] = choice
    return placed, choices


def _exchange(draft: Program, node: fx.Node, kernel: Kernel) -> None:
    """Have another kernel run a node."""
    path, _, name = str(node.target).rpartition(".")
    owner = draft.owner(node.graph)
    (owner.get_submodule(path) if path else owner).add_module(name, kernel)


def _share_tensors(copy: nn.Module, root: nn.Module) -> None:
    """Let a copy have the tensors of what it was copied from: there is no need to hold weights twice."""
    for (_, to), (_, source) in zip(copy.named_modules(), root.named_modules(), strict=True):
        to._buffers.update(source._buffers)
        to._parameters.update(source._parameters)


def _candidates(makers: list[Maker], call: Call, allow_float: bool) -> tuple[list[Placement], str]:
    """The kernels that could run a call, and why the others cannot."""
    found: list[Placement] = []
    reasons: list[str] = []
    for maker in makers:
        try:
            made = maker(call)
        except NoKernelError as refusal:
            reasons.append(str(refusal))
            continue
        placement = made if isinstance(made, Placement) else Placement(made, call.inputs)
        if allow_float or not placement.kernel.computes_in_float:
            found.append(placement)
    return found, "; ".join(dict.fromkeys(reasons)) or ("" if found else "there is no kernel for it")


def _put(draft: Program, graph: fx.Graph, call: Call, placement: Placement) -> fx.Node:
    name = f"{PREFIX}{call.node.name}"
    draft.owner(graph).add_module(name, placement.kernel)
    with graph.inserting_before(call.node):
        made = graph.call_module(name, placement.inputs)
    made.meta = {**call.node.meta, HIGHEST: highest_level(call.node)}
    call.node.replace_all_uses_with(made)
    before = call.node.all_input_nodes
    graph.erase_node(call.node)
    for node in before:
        is_kernel = node.op == "call_module" and isinstance(draft.owner(graph).get_submodule(str(node.target)), Kernel)
        if is_kernel and not node.users:  # made a weight that the new kernel reads as it is stored
            graph.erase_node(node)
    draft.touch()
    return made
