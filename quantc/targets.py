"""`qc.lower`: where a quantized program can run. A target is a name and the function that lowers for it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, overload

from quantc.errors import UnknownNameError, suggest

if TYPE_CHECKING:
    from quantc.kernels.lowered import Lowered
    from quantc.program import Program

TARGETS: dict[str, str] = {
    "onnx": "quantc.onnx.module:lower",
    "qnnpack": "quantc.kernels.lowered:lower_qnnpack",
    "x86": "quantc.kernels.lowered:lower_x86",
}
"""By name: `module:function`, imported when it is first asked for. A function takes the program, and its own options."""


@overload
def lower(program: Program | Lowered, target: Literal["qnnpack", "x86"], **options: Any) -> Lowered: ...
@overload
def lower(program: Program | Lowered, target: str, **options: Any) -> Any: ...
def lower(program: Program | Lowered, target: str, **options: Any) -> Any:
    """A quantized program as something that runs on a target; what it is, and the options there are, is the target's.

    `"x86"` and `"qnnpack"` give a module on torch's kernels: see `quantc.kernels.lowered.lower`.
    """
    if target not in TARGETS:
        raise UnknownNameError(
            f"there are no kernels for {target!r}",
            where=f"qc.lower(..., {target!r})",
            advice=suggest(str(target), TARGETS, noun="targets"),
        )
    module, _, name = TARGETS[target].partition(":")
    return getattr(import_module(module), name)(program, **options)
