"""TorchScript: what it cannot read of quantized modules and observers is refused with the reason."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from quantc.errors import ModeError

ADVICE = (
    "hand the prepared model to the engine: program = quantc.flows.eager.to_program(prepared, example_inputs), then "
    "qc.convert(program) is saved, exported and lowered; or quantize with quantc.flows.fx, whose models torch.jit.trace takes"
)


def refuse_script(module: nn.Module) -> NoReturn:
    """As `__prepare_scriptable__`: what `torch.jit.script` calls before it reads a module."""
    raise ModeError(
        f"{type(module).__name__} runs on kernels that are chosen as it runs, which torch.jit.script cannot read",
        where="torch.jit.script",
        advice=ADVICE,
    )


def refuse_trace(self: nn.Module, *_: Any, **__: Any) -> NoReturn:
    """As `_slow_forward`: what `torch.jit.trace` calls in place of `forward`."""
    raise ModeError(
        f"{type(self).__name__} chooses kernels as it runs, by the scale of what it reads: torch.jit.trace would keep "
        "those of one input",
        where="torch.jit.trace",
        advice=ADVICE,
    )


def refuse_observer(module: nn.Module) -> NoReturn:
    """`__prepare_scriptable__` of observers."""
    raise ModeError(
        f"{type(module).__name__} looks at numbers in Python, which torch.jit.script cannot read",
        where="torch.jit.script",
        advice="calibrate or train the prepared model as it is",
    )
