"""Python wrapper of ExecuTorch's runtime."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from quantc.errors import LoadError, QuantcError
from quantc.targets.executorch.lazy_imports import quiet, runtime
from quantc.targets.executorch.metadata import METHOD, Metadata, read_metadata
from quantc.targets.kernels.huge_pages import on_large_pages

FORWARD = "forward"
ADVICE = "write it again with qc.lower(program, 'executorch').save(path), and copy it whole"


def in_order(x: Tensor) -> Tensor:
    """A contiguous plain tensor with canonical strides: ExecuTorch relies on these also for axes of size 1, where torch
    calls any stride contiguous. Negated views are resolved, since ExecuTorch reads raw memory, and subclasses are
    unwrapped.
    """
    if x.is_neg():
        return x.detach().resolve_neg().contiguous()
    if type(x) is not Tensor:
        x = x.detach().as_subclass(Tensor)
    if x.stride() != _strides(x.shape):
        return x.detach().clone(memory_format=torch.contiguous_format)
    return x.detach() if x.requires_grad else x


@lru_cache(maxsize=1024)
def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    found = [1]
    for size in reversed(shape[1:]):
        found.append(found[-1] * max(size, 1))
    return tuple(reversed(found)) if shape else ()


class Running:
    """A program in the runtime. One call at a time: it has one set of buffers.

    After calls with smaller inputs, XNNPACK's image means read out of bounds (ExecuTorch 1.4.1, in its own runtime
    too). So the program is reloaded when an input is larger than those before; a program with state would lose it, and
    is not reloaded.
    """

    def __init__(self, content: bytes, where: str, *, has_state: bool = False) -> None:
        self._content = content  # the runtime reads weights from here as long as the program lives
        self._where = where
        self._turn = threading.Lock()
        self._program = self._read()
        self._method: Any = None
        self._has_state = has_state
        self._room: list[tuple[int, ...]] = []
        """The sizes of inputs, up to which the method has been called."""

    def _read(self) -> Any:
        try:
            with quiet():
                return runtime().load_program(self._content)
        except RuntimeError as error:
            raise LoadError(f"ExecuTorch cannot read it: {_first(error)}", where=self._where, advice=ADVICE) from error

    @property
    def methods(self) -> frozenset[str]:
        return frozenset(self._program.method_names)

    def metadata(self) -> Metadata | None:
        """The file's metadata; None if quantc did not write it."""
        if METHOD not in self.methods:
            return None
        (text,) = self._load_method(METHOD).execute([])
        return read_metadata(str(text), self._where)

    def _load_method(self, name: str) -> Any:
        try:
            return self._program.load_method(name)
        except (RuntimeError, KeyError) as error:
            raise LoadError(
                f"ExecuTorch cannot load its method {name!r}: {_first(error)}",
                where=self._where,
                advice=f"it has {', '.join(sorted(self.methods))}; delegates and kernels it needs may be missing from this build",
            ) from error

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Flat inputs to flat outputs. Results are the caller's memory: the runtime copies them."""
        plain = [in_order(value) for value in inputs]
        with self._turn:
            try:
                self._make_room(plain)
                if self._method is None:  # delegates pack their weights, and take their memory at the first call
                    return on_large_pages(partial(self._first_run, plain), len(self._content))
                made: list[Any] = self._method.execute(plain)
            except RuntimeError as error:
                raise QuantcError(
                    f"ExecuTorch fails: {_first(error)}",
                    where=self._where,
                    advice="call it with inputs like the example inputs; lowered.delegation() says what runs where",
                ) from error
            return made

    def _first_run(self, inputs: list[Tensor]) -> list[Any]:
        method = self._load_method(FORWARD)
        made: list[Any] = method.execute(inputs)
        self._method = method
        return made

    def _make_room(self, inputs: Sequence[Tensor]) -> None:
        """Load the program anew if an input is larger than those before. Its first call then is one with the largest of
        each size, so that inputs which are large in turns do not load it each time."""
        if all(map(_holds, self._room, inputs)) and len(self._room) == len(inputs):
            return
        sizes = [tuple(x.shape) for x in inputs]
        if self._method is None or self._has_state:
            self._room = sizes
            return
        pairs = zip(self._room, sizes, strict=True)
        self._room = [tuple(max(*each) for each in zip(*both, strict=True)) for both in pairs]
        self._program = self._read()  # to load the method alone gives the one that is there
        self._method = self._load_method(FORWARD)
        if self._room != sizes:
            largest = zip(self._room, inputs, strict=True)
            self._method.execute([torch.zeros(size, dtype=x.dtype) for size, x in largest])


def _holds(room: tuple[int, ...], x: Tensor) -> bool:
    return len(room) == x.dim() and all(map(operator.le, x.shape, room))


def _first(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
