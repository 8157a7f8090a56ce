"""`qc.lower`: a quantized program as a module on CPU kernels."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from quantc.errors import InputError, LoadError, ModeError, QuantcError, UnknownNameError
from quantc.ir.finite_inputs import Watch
from quantc.ir.placements import Placed, StandIn
from quantc.ir.program import LogEntry, Program, Stage, check_has_plan, check_program
from quantc.ir.signature import as_tensors
from quantc.pipeline.pipeline import Hook, Pipeline, hooks_of
from quantc.store.bytes_form import as_bytes, from_bytes
from quantc.store.programs import Lowering, read, save
from quantc.support.progress import Style
from quantc.support.terminal import plain_rows
from quantc.targets.kernels.codegen import straight_line, why_not_recorded, why_not_repeated
from quantc.targets.kernels.compiled_islands import compile_islands
from quantc.targets.kernels.input_checks import check_device, check_gradients
from quantc.targets.kernels.kernel_table import kernels_for
from quantc.targets.kernels.memory import Memory, memory_of
from quantc.targets.kernels.module_as_op import RUN_LOWERED, portable_module, register_module
from quantc.targets.kernels.program_race import fastest, race
from quantc.targets.kernels.replay import Replayed
from quantc.targets.kernels.running_form import PLACING, Choosing, run_on_kernels, split
from quantc.targets.kernels.weight_ownership import Holdings
from quantc.targets.target_table import KERNEL_FORM

MAX_ROWS = 40
"""Maximum number of ops that the text shows."""
STATE = "module."
"""Prefix of names in a state dict."""
MAX_SHAPES = 256
"""Maximum number of input shapes remembered as valid."""


class Lowered(nn.Module):
    """A quantized program on the kernels of a target. Called like the model; `placed` lists the kernel of each op.

    Thread-safe. Weights are plain until the first call, which packs them; from then on only packed weights are held,
    where they can be unpacked again.
    """

    def __init__(
        self,
        program: Program,
        target: str,
        choosing: Choosing | None = None,
        compile: bool = False,  # noqa: A002 - the keyword of qc.lower
    ) -> None:
        super().__init__()
        self._program = program
        program.root.requires_grad_(False)
        self.target = target
        self.choosing = Choosing() if choosing is None else choosing
        self._running = run_on_kernels(program, target, self.choosing)
        self.is_compiled = compile
        self.gain: float | None = None
        """Speedup of the compiled form, once measured; where it is below one, the module does not use that form."""
        self._run: Callable[..., Sequence[Any]] = (
            compile_islands(program, self.module, self._running.stand_ins) if compile else self.module.forward
        )
        self._line: Callable[..., Sequence[Any]] | None = None
        """The same as one function, once kernels are packed."""
        self._why_not_recorded = ""
        self._holdings = Holdings(program, self.module)
        self._settling = threading.Lock()
        self._digest = _digest(program)
        self._checked: set[Any] = set()
        """The shapes that are known to fit: looking at every input each time takes as long as a small layer."""
        self._watch = Watch.of(program.graph, program.signature)
        self._takes_tensors = _is_flat(program.signature.in_spec)
        """True if the arguments are the flat inputs, so that no unflattening is needed."""
        self._yields_one = program.signature.out_spec.is_leaf()
        self._key = register_module(self)
        self.eval()

    @property
    def module(self) -> fx.GraphModule:
        """The lowered module, from flat inputs to flat outputs. Not a submodule, or torch.export would take its tensors
        along with those of the portable program.
        """
        return self._running.module

    @property
    def placed(self) -> tuple[Placed, ...]:
        """Kernel, or reason for none, of each op."""
        return self._running.placed

    @property
    def choices(self) -> dict[str, str]:
        """Selected kernel of each op, by name."""
        return self._running.choices

    @property
    def log(self) -> tuple[LogEntry, ...]:
        """The passes that brought the portable form onto kernels."""
        return self._running.log

    def stands_for(self, node: fx.Node, graph: str = "") -> StandIn:
        """Node of the portable form, by name, whose value a node of `module` computes; several for merged kernels."""
        name = f"{graph}/{node.name}" if graph else node.name
        return self._running.stand_ins.get(name, node.name)

    @property
    def program(self) -> Program:
        """The portable form: the program in integer form, on plain tensors. It can be saved, copied, exported and
        compiled. Weights that only kernels hold are unpacked at each access.
        """
        with self._settling:
            return self._holdings.whole()

    # -- running -------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._call_traced(args, kwargs)
        line = self._line
        run = line.recording(args) if self._takes_tensors and not kwargs and isinstance(line, Replayed) else None
        if run is not None:  # inputs like these have been looked at before
            if torch.is_grad_enabled():
                check_gradients(args, self._program.signature)
            return self._unflatten(run(*args))
        return self._check_and_call(args, kwargs)

    def _unflatten(self, made: Sequence[Any]) -> Any:
        """Flat outputs in the form that the model has them in."""
        return made[0] if self._yields_one else pytree.tree_unflatten(list(made), self._program.signature.out_spec)

    def _check_and_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shapes = tuple(
            (x.shape, x.dtype, x.device, x.layout) if isinstance(x, Tensor) and not x.is_nested else None for x in args
        )
        leaves: Sequence[Any] = args
        signature = self._program.signature
        if kwargs or shapes not in self._checked:
            leaves, spec = signature.flatten(args, kwargs)
            if (tensors := as_tensors(leaves)) is not None:
                given, named = pytree.tree_unflatten(tensors, spec)
                return self._check_and_call(given, named)
            signature.check(leaves, spec)
            check_device(leaves, signature)
            if any(isinstance(leaf, Tensor) and not leaf.numel() for leaf in leaves):
                return self.program(*args, **kwargs)  # not every kernel supports empty inputs
            if not kwargs and None not in shapes and len(self._checked) < MAX_SHAPES:
                self._checked.add(shapes)
        if torch.is_grad_enabled():
            check_gradients(leaves, signature)
        return self._unflatten(self.run_flat(leaves))

    def run_flat(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run on valid flat inputs; flat outputs."""
        line = self._line
        if isinstance(line, Replayed):
            return line(*leaves)
        self._watch.check(leaves)
        if line is not None:
            return line(*leaves)
        made = self._run(*leaves)
        self._settle(leaves)
        return made

    def _call_traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Traced form: one opaque op for torch.compile, the portable program for torch.export."""
        signature = self._program.signature
        leaves, spec = signature.flatten(args, kwargs)
        signature.check(leaves, spec)
        if torch.compiler.is_exporting():
            return portable_module(self)(*args, **kwargs)
        check_gradients(leaves, signature)
        made = RUN_LOWERED([leaf for leaf in leaves if isinstance(leaf, Tensor)], self._key)
        return pytree.tree_unflatten(made, signature.out_spec)

    def _settle(self, leaves: Sequence[Any]) -> None:
        """Let go of plain weights, and from now on run kernels with their packed ones."""
        with self._settling:
            if self._line is not None:
                return
            self._holdings.release()
            line: Callable[..., Sequence[Any]] = straight_line(self.module)
            self._why_not_recorded = why_not_recorded(self.module) or ""
            if not self._why_not_recorded:
                line = Replayed(line, self._watch.places, self._watch.check)
            if self.is_compiled and why_not_repeated(self.module) is not None:
                line = self._run  # it cannot be called for nothing
            elif self.is_compiled:
                times = race({"plain": line, "compiled": self._run}, leaves)
                self.gain = times["plain"] / times["compiled"]
                line = line if fastest(times) == "plain" else self._run
            self._line = line

    # -- torch's own ways ----------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        with self._settling:
            self.module.state_dict(destination=destination, prefix=f"{prefix}{STATE}", keep_vars=keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, False, missing_keys, unexpected_keys, error_msgs
        )
        inner = f"{prefix}{STATE}"
        own = {name.removeprefix(inner): value for name, value in state_dict.items() if name.startswith(inner)}
        with self._settling:
            found = self.module.load_state_dict(own, strict=False)
            self._line = None
            if self.is_compiled:
                self._run = compile_islands(
                    self._program, self.module, self._running.stand_ins
                )  # compiled code has the old weights
        missing_keys.extend(f"{inner}{name}" for name in found.missing_keys)
        if strict:
            others = {name for name in state_dict if name.startswith(prefix) and not name.startswith(inner)}
            unexpected_keys.extend(sorted(others - {f"{prefix}_extra_state"}))
            unexpected_keys.extend(f"{inner}{name}" for name in found.unexpected_keys)

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """This module and the lowered one's modules."""
        yield self
        yield from self.module.modules()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Lowered:
        """`.to("cpu")` and the like, or an error: kernels are for the processor, and for the numbers they were made of."""
        for sample in (torch.zeros(1), torch.zeros(1, dtype=torch.int8)):
            made = fn(sample)
            if (made.device, made.dtype) != (sample.device, sample.dtype):
                self._refuse(f"which are not for {made.dtype} on {made.device}", "keep it as it is, on the CPU")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._line = None
        return self

    def train(self, mode: bool = True) -> Lowered:
        """`eval()`, or an error: kernels have no gradients."""
        if mode:
            self._refuse("which cannot be trained", "train the model itself, and quantize it again")
        return super().train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Lowered:
        if requires_grad:
            self._refuse("which have no gradients", "train the model itself, and quantize it again")
        return super().requires_grad_(False)

    def _refuse(self, what: str, advice: str) -> NoReturn:
        raise ModeError(
            f"{self._program.name} runs on kernels, {what}", where=f"lowered for {self.target}", advice=advice
        )

    def get_extra_state(self) -> Tensor:
        """Digest that distinguishes programs that differ in scales and zero points only, many of which are not tensors."""
        return self._digest

    def set_extra_state(self, state: Tensor) -> None:
        if not torch.equal(state, self._digest):
            raise InputError(
                "this is the state of another program: its scales and zero points differ",
                where=f"load_state_dict of {self._program.name} on {self.target}",
                advice="load the program it comes from, qc.lower(qc.load(path), target), and not its tensors alone",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Lowered:
        return lower_again(self.program.clone(), self.lowering)

    def __reduce__(self) -> Any:
        """Pickled as the file that `save` writes: code is never part of it, nor anything packed."""
        return _unpickled, (as_bytes(self.save),)

    # -- saving --------------------------------------------------------------------------------------------------------

    @property
    def lowering(self) -> Lowering:
        """Lowering record of a saved file: enough to lower the program again in the same way, without timing."""
        return Lowering(
            target=self.target,
            choices=self.choices,
            allow_float=self.choosing.allow_float,
            compile=self.is_compiled,
            pipeline="" if self.choosing.pipeline is None else str(self.choosing.pipeline),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program and its kernel selection to a file. Packed weights are not saved: `qc.load` gives a module
        that packs its weights again, on the same kernels, without timing anything.
        """
        save(self.program, path, self.lowering)

    # -- telling -------------------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Bytes of weights here, and in the float model."""
        with self._settling:
            return memory_of(self._program, self.module)

    @property
    def headline(self) -> str:
        on_kernels = sum(bool(row.kernel) for row in self.placed)
        compiled = ", the rest compiled" if self.is_compiled else ""
        if self.gain is not None and self._line is not self._run:
            compiled = f", the rest not compiled, since that is {self.gain:.2f} times as fast"
        return f"{self._program.name} on {self.target}: {on_kernels} of {len(self.placed)} ops on kernels{compiled}"

    def to_data(self) -> dict[str, Any]:
        """Kernel of each op, as JSON-compatible data."""
        return {
            "program": self._program.name,
            "target": self.target,
            "compiled": self.is_compiled,
            "compiled_gain": self.gain,
            "recorded": self._line.count if isinstance(self._line, Replayed) else 0,
            "not_recorded": self._line.why_not if isinstance(self._line, Replayed) else self._why_not_recorded,
            "memory": self.memory().to_data(),
            "ops": [asdict(row) for row in self.placed],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        rows = [(row.node, row.op, row.kernel or "as written", row.why) for row in self.placed[:MAX_ROWS]]
        more = [f"  … and {len(self.placed) - MAX_ROWS} more"] if len(self.placed) > MAX_ROWS else []
        table = plain_rows(("node", "op", "runs on", "why"), rows) if rows else []
        runs = [f"  {self._line}"] if isinstance(self._line, Replayed) else []
        if self._why_not_recorded and not self.is_compiled:
            runs = [f"  runs: called from Python, since {self._why_not_recorded}"]
        return "\n".join([self.headline, f"  {self.memory()}", *runs, *table, *more])

    def __repr__(self) -> str:
        return f"<Lowered {self.headline}>"


def _is_flat(inputs: pytree.TreeSpec) -> bool:
    """True if inputs are positional arguments without nesting."""
    args, kwargs = inputs.children()
    return not kwargs.num_leaves and all(part.is_leaf() for part in args.children())


def _digest(program: Program) -> Tensor:
    """Of a program without its tensors."""
    text = "\n".join(f"{node.name} {node.target} {node.args} {node.kwargs}" for node in program.nodes())
    return torch.frombuffer(bytearray(sha256(text.encode()).digest()), dtype=torch.uint8)


def lower_again(program: Program, lowering: Lowering) -> Lowered:
    """Lower a program again as recorded; it is not copied."""
    pipeline = Pipeline.parse(lowering.pipeline) if lowering.pipeline else None
    choosing = Choosing(allow_float=lowering.allow_float, saved=lowering.choices, pipeline=pipeline)
    return Lowered(program, lowering.target, choosing, lowering.compile)


def _unpickled(content: bytes) -> Any:
    return from_bytes(content, load_lowered)


def load_lowered(path: str | os.PathLike[str], *, portable: bool = False) -> Program | Lowered:
    """Read a file written by `save`: a program, or a lowered module on the kernels selected when it was lowered."""
    program, lowering = read(path)
    if lowering is None or portable:
        return program
    try:
        kernels_for(lowering.target)
    except UnknownNameError as error:
        raise LoadError(
            f"{os.fspath(path)}: {error.what}",
            where="lowered.target",
            advice=f"{error.advice}; or read the program alone, qc.load(path, portable=True)",
        ) from error
    return lower_again(program, lowering)


def lower(
    program: Program | Lowered,
    target: str,
    *,
    tune: bool | tuple[Any, ...] = False,
    allow_float: bool = False,
    compile: bool = False,  # noqa: A002 - the name users expect
    progress: Style = "auto",
    pipeline: Pipeline | str | None = None,
    hooks: Sequence[Hook] = (),
) -> Lowered:
    """Lower a quantized program to the kernels of a target: "x86" or "qnnpack".

    `program` is the result of `qc.convert`, in Q/DQ or integer form, or a lowered module to be lowered differently; it
    is not modified. Kernels compute what the integer form does, within one step; ops without a kernel on the target run
    as the integer form writes them, and `lowered.placed` gives the reason.

    Where several kernels support an op, a cost table decides. `tune=True` times them on this machine, on the program's
    example inputs, or on given inputs: `tune=(x,)`; measured times are cached. `allow_float=True` permits computing
    8-bit GEMMs and convolutions in float where that is faster.

    `compile=True` lets torch.compile fuse the float ops between kernels, which needs a C++ compiler. It takes seconds
    to minutes at the first call, after which both forms are timed: the faster one stays, and the headline names it.

    `pipeline` is what to run instead of `qc.pipelines.lower(target)`, and `hooks` watch it. Its part up to the integer
    form is left out for a program in that form.
    """
    if isinstance(program, Lowered):
        program = program.program
    check_program(program, "lower", "qc.convert(prepared), or take result.program of qc.quantize(...),")
    kernels_for(target)
    if program.stage < Stage.FOLDED:
        raise QuantcError(
            f"{program.name} is not quantized",
            where=f"its stage is {program.stage.label}",
            advice="call qc.convert(prepared) first, or qc.quantize",
        )
    check_has_plan(program, "lower")
    if program.stage > Stage.LOWERED:
        raise QuantcError(
            f"{program.name} is on kernels already",
            where=f"its stage is {program.stage.label}",
            advice="give what qc.convert(prepared) gave, and the passes as pipeline=",
        )
    portable, placing = _parts(pipeline, target)
    own = portable.left_for(program).run_on_copy(program, hooks)
    choosing = Choosing(tune, allow_float, progress, pipeline=placing, hooks=hooks_of(hooks))
    made = Lowered(own, target, choosing, compile)
    if made.placed and not any(row.kernel for row in made.placed):
        warnings.warn(
            f"{target} has a kernel for none of the {len(made.placed)} quantized ops of {own.name}, so that they run as "
            "the integer form writes them, which is slow: print(lowered) says why",
            stacklevel=4,
        )
    return made


def _parts(given: Pipeline | str | None, target: str) -> tuple[Pipeline, Pipeline | None]:
    """Split a pipeline into the part up to the portable form and the part onto kernels; None for the target's own.
    QuantcError if it places kernels of another target."""
    if given is None:
        return Pipeline.parse(KERNEL_FORM), None
    pipeline = Pipeline.of(given)
    for step in pipeline:
        other = getattr(step, "target", target) if step.name == PLACING else target
        if other != target:
            raise QuantcError(
                f"the pipeline places kernels of {other}",
                where=f"pipeline=... of qc.lower(..., {target!r})",
                advice=f"start from qc.pipelines.lower({target!r})",
            )
    return split(pipeline)


def lower_qnnpack(program: Program | Lowered, **options: Any) -> Lowered:
    """`lower` for QNNPACK."""
    return lower(program, "qnnpack", **options)
