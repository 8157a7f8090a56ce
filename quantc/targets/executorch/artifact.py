"""`qc.lower(program, "executorch")`: an ExecuTorch program that can be called and saved, and reports its delegation."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantc.errors import InputError, QuantcError, SaveError
from quantc.files.atomic_file import write_bytes
from quantc.files.endings import check_ending
from quantc.files.regular_file import as_path
from quantc.ir.finite_inputs import Watch, Watched
from quantc.ir.signature import Signature, as_tensors
from quantc.support.terminal import readable
from quantc.targets.argument_cache import KnownArguments
from quantc.targets.executorch.delegation import Delegation
from quantc.targets.executorch.metadata import Metadata, convention_in
from quantc.targets.executorch.pte_container import seal_pte
from quantc.targets.executorch.runtime import Running

TARGET = "executorch"


class Pte:
    """An ExecuTorch program. Called like the model; `save` writes the `.pte` file.

    A program read from a file has no delegation report. One whose file does not describe its input structure takes and
    returns flat tensors.
    """

    def __init__(
        self,
        content: bytes,
        metadata: Metadata | None,
        *,
        where: str,
        signature: Signature | None = None,
        delegation: Delegation | None = None,
        outputs: Sequence[Any] = (),
        why_flat: str = "",
    ) -> None:
        self.content = content
        """The file, but for its seal."""
        self.metadata = metadata
        self._where = where
        self._signature = signature
        self._delegation = delegation
        self._outputs = tuple(outputs)
        """The flat outputs that are no tensors, at their places; for tensors, Ellipsis."""
        self._is_one = self._outputs == (...,) and signature is not None and signature.out_spec.is_leaf()
        """True if the result is a tensor, in no container."""
        self._why_flat = why_flat
        """The reason why the call is flat, if it is: tensors in, tensors out, in order."""
        self._running: Running | None = None
        self._known = KnownArguments()
        tensors = enumerate(metadata.inputs if metadata else ())
        self._watch = Watch(
            tuple(Watched(at, item.name, item.is_mask, item.masks_rows) for at, item in tensors if item.is_rounded)
        )
        """The tensors that are looked at for NaN: the delegate makes a number of it."""

    @property
    def target(self) -> str:
        return TARGET

    @property
    def name(self) -> str:
        return self.metadata.program if self.metadata is not None else self._where

    # -- running -------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs, arranged as those of the model."""
        if self._signature is None:
            made = self._run_flat(args, kwargs)
            return made[0] if len(made) == 1 else tuple(made)
        kind = KnownArguments.kind(args, kwargs)
        if kind in self._known:
            made = self._run(args)
        else:
            leaves, spec = self._signature.flatten(args, kwargs)
            leaves = as_tensors(leaves) or leaves
            self._signature.check(leaves, spec)
            pairs = zip(self._signature.inputs, leaves, strict=True)
            made = self.run(*(leaf for item, leaf in pairs if not item.is_constant))
            self._known.add(kind)
        if self._is_one:
            return made[0]
        rest = iter(made)
        flat = [next(rest) if value is ... else value for value in self._outputs]
        return pytree.tree_unflatten(flat, self._signature.out_spec)

    def _run_flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        odd = [*(f"{name}=" for name in kwargs), *(f"a {type(x).__name__}" for x in args if not isinstance(x, Tensor))]
        if odd:
            raise InputError(
                f"{self.name} was read from a file, and takes tensors one after the other, not {', '.join(odd)}",
                where=f"{self._where}: {self._why_flat}",
                advice="give them in the order of its inputs: pte.metadata.inputs",
            )
        return self.run(*args)

    def run(self, *inputs: Tensor) -> list[Tensor]:
        """Run on flat tensors; flat results."""
        self._check(inputs)
        return self._run(inputs)

    def _run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run it on tensors that fit."""
        self._watch.check(inputs)
        running = self._running if self._running is not None else self._runs()
        return running.run(inputs)

    def try_out(self, inputs: Sequence[Tensor]) -> None:
        """Run on any tensors; an error if the runtime fails. The program's state stays unchanged."""
        self._runs().run(inputs)
        if self.metadata is not None and self.metadata.has_state:
            self._running = None

    def _runs(self) -> Running:
        if self._running is None:
            has_state = self.metadata is not None and self.metadata.has_state
            self._running = Running(self.content, self._where, has_state=has_state)
        return self._running

    def _check(self, inputs: Sequence[Any]) -> None:
        """InputError unless the tensors match the file's metadata: the runtime does not check them."""
        for place, value in enumerate(inputs):
            if not isinstance(value, Tensor):
                raise InputError(
                    f"input {place} is a {type(value).__name__}, not a tensor", where=self._where, advice=_LIKE
                )
            if value.device.type != "cpu":
                raise InputError(
                    f"input {place} is on {value.device}",
                    where=self._where,
                    advice="ExecuTorch runs on the CPU: x.cpu()",
                )
            if value.layout is not torch.strided:
                raise InputError(
                    f"input {place} has the layout {value.layout}, which ExecuTorch does not read",
                    where=self._where,
                    advice="give x.to_dense()",
                )
            if value.requires_grad and torch.is_grad_enabled():
                raise InputError(
                    f"input {place} requires a gradient, and ExecuTorch has none",
                    where=self._where,
                    advice="call it under torch.no_grad(), or give x.detach()",
                )
        if self.metadata is None:
            return
        wanted = self.metadata.inputs
        if len(inputs) != len(wanted):
            names = ", ".join(item.name for item in wanted)
            raise InputError(
                f"{len(inputs)} tensors for {len(wanted)} inputs: {names}", where=self._where, advice=_LIKE
            )
        sizes: dict[str, int] = {}
        for value, item in zip(inputs, wanted, strict=True):
            dtype = str(value.dtype).removeprefix("torch.")
            fits = dtype == item.dtype and len(value.shape) == len(item.shape)
            for size, expected in zip(value.shape, item.shape, strict=False):
                fits = fits and self._fits(size, expected, sizes)
            if not fits:
                shape = ", ".join(str(self._size_text(part)) for part in item.shape)
                raise InputError(
                    f"input {item.name!r} is {dtype}{[*value.shape]}, and the program takes {item.dtype}[{shape}]",
                    where=self._where,
                    advice=_LIKE,
                )

    def _fits(self, size: int, expected: int | str, sizes: dict[str, int]) -> bool:
        if isinstance(expected, int):
            return size == expected
        ranges = self.metadata.ranges if self.metadata is not None else {}
        if expected not in ranges:
            return True  # an expression: ExecuTorch checks it against its memory plan
        low, high = ranges[expected]
        return sizes.setdefault(expected, size) == size and low <= size <= high

    def _size_text(self, size: int | str) -> int | str:
        ranges = self.metadata.ranges if self.metadata is not None else {}
        return f"{size} in {ranges[size][0]}..{ranges[size][1]}" if isinstance(size, str) and size in ranges else size

    def __reduce__(self) -> Any:
        """Runtime state is not copied: a copy loads the program again."""
        return read_back, (self.content, self.metadata, self._where, self._delegation)

    # -- saving and telling --------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the `.pte` file, atomically."""
        place = as_path(path, SaveError)
        check_ending(place, (".pte",), "an ExecuTorch program")
        write_bytes(place, seal_pte(self.content))

    def delegation(self) -> Delegation:
        """Quantized ops that a delegate took, those that fell back, and why."""
        if self._delegation is None:
            raise QuantcError(
                "a .pte file does not say which op is which",
                where=self._where,
                advice='ask where it is made: qc.lower(program, "executorch").delegation()',
            )
        return self._delegation

    @property
    def headline(self) -> str:
        if self._delegation is None:
            return f"{self.name} for ExecuTorch, {readable(len(self.content))}"
        return f"{self._delegation.headline}, {readable(len(self.content))}"

    def to_data(self) -> dict[str, Any]:
        return {
            "target": TARGET,
            "bytes": len(self.content),
            "metadata": self.metadata.model_dump(mode="json") if self.metadata is not None else None,
            "delegation": self._delegation.to_data() if self._delegation is not None else None,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        return self.headline if self._delegation is None else f"{self._delegation}\n  {readable(len(self.content))}"

    def __repr__(self) -> str:
        return f"<Pte {self.headline}>"


def read_back(content: bytes, metadata: Metadata | None, where: str, delegation: Delegation | None = None) -> Pte:
    """Program from a file's content, with the calling convention of its metadata."""
    found = convention_in(metadata, where)
    return Pte(
        content,
        metadata,
        where=where,
        signature=found.signature,
        delegation=delegation,
        outputs=found.outputs,
        why_flat=found.why_flat,
    )


_LIKE = "call it with inputs like the example inputs; dimensions that vary need dynamic_shapes= at capture, and largest= at qc.lower"
