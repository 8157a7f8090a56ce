"""Lowered modules under torch.compile and torch.export.

torch.compile sees one opaque op, `quantc::run_lowered`: packed weights are opaque to it, and nothing is gained by
decomposing the module. The op takes the module's key. torch.export sees the portable program instead, since its output
must run without quantc's module.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from quantc.errors import QuantcError
from quantc.ir.program import Program

_LIBRARY = torch.library.Library("quantc", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("run_lowered(Tensor[] inputs, str key) -> Tensor[]")  # type: ignore[no-untyped-call]
RUN_LOWERED: Any = torch.ops.quantc.run_lowered.default


class Lowered(Protocol):
    """Interface of a lowered module that the op needs."""

    target: str
    _program: Program

    @property
    def program(self) -> Program: ...

    def run_flat(self, leaves: Sequence[Any]) -> Sequence[Any]: ...


_MODULES: WeakValueDictionary[str, Lowered] = WeakValueDictionary()
_NUMBERS = itertools.count()


def register_module(lowered: Lowered) -> str:
    """Key by which the op finds a module, as long as the module lives."""
    key = f"lowered_{next(_NUMBERS)}"
    _MODULES[key] = lowered
    return key


def _module(key: str) -> Lowered:
    found = _MODULES.get(key)
    if found is None:
        raise QuantcError(
            f"the lowered module {key!r} is gone",
            where="a compiled program that calls it",
            advice="keep the lowered module as long as what was compiled with it, and compile in the process that runs it",
        )
    return found


def _all_inputs(program: Program, tensors: Sequence[Tensor]) -> list[Any]:
    """The flat inputs of a program, of which tensors are given and all else is fixed."""
    left = iter(tensors)
    return [item.constant if item.is_constant else next(left) for item in program.signature.inputs]


def _run(inputs: Sequence[Tensor], key: str) -> list[Tensor]:
    lowered = _module(key)
    made = lowered.run_flat(_all_inputs(lowered._program, inputs))
    # results must be contiguous and own their memory: compilers rely on both
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    results: list[Tensor] = []
    for tensor in made:
        plain = tensor.contiguous()
        place = plain.untyped_storage().data_ptr()
        results.append(plain.clone() if place in taken else plain)
        taken.add(results[-1].untyped_storage().data_ptr())
    return results


def _shapes(inputs: Sequence[Tensor], key: str) -> list[Tensor]:
    lowered = _module(key)
    program = lowered._program
    with torch.no_grad():
        made = _Shapes(program.module).run(*_all_inputs(program, inputs), enable_io_processing=False)
    if not all(isinstance(value, Tensor) for value in made):
        raise QuantcError(
            f"{program.name} yields values other than tensors, which an op cannot",
            where=f"torch.compile of {program.name} on {lowered.target}",
            advice="compile what is around it, or compile lowered.program.module",
        )
    return [torch.empty(value.shape, dtype=value.dtype, device=value.device) for value in made]


class _Shapes(fx.Interpreter):
    """Runs a program on tensors without numbers, its own among them."""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


torch.library.impl("quantc::run_lowered", "cpu", _run, lib=_LIBRARY)
torch.library.register_fake("quantc::run_lowered", _shapes, lib=_LIBRARY)


def portable_module(lowered: Lowered) -> fx.GraphModule:
    """Module of the portable program, for torch.export; weights are unpacked outside tracing."""
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError("a lowered module is exported with strict=False; or export lowered.program.module")
    with torch._C.DisableTorchFunction(), _disable_current_modes():  # the former sees to torch.no_grad
        return lowered.program.module
