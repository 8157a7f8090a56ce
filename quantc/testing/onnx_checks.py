"""Check of rules that claim ONNX: the exported model runs in ONNX Runtime and agrees with the Q/DQ form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from quantc.errors import QuantcError
from quantc.ir.plan import Source
from quantc.ir.program import Program
from quantc.qdq.ops import is_dequantize
from quantc.spec.formats import Timing
from quantc.spec.spec import name_of
from quantc.support.optional_dependency import is_installed
from quantc.testing.conformance import Fault
from quantc.testing.kernel_checks import FACTORS, OTHERS, RUN_TIME_ERROR, specs_of_modes
from quantc.testing.rule_trial import Trial, calibrate_trial, scale_inputs
from quantc.testing.technique_checks import asked_for
from quantc.verbs.convert import convert

ONNX = "onnx"
FLOAT_ERROR = 1e-4
"""Allowed float error, relative to the largest value: biases are rounded to the step of sums, and norms differ."""
_CLAIM = 'leave "onnx" out of the rule\'s `supports`, or correct how its ops are written (quantc/onnx)'


def onnx_form(trial: Trial) -> list[Fault] | None:
    """Static, and with the techniques of the backend's modes. Does not apply without ONNX Runtime."""
    if ONNX not in trial.rule.supports or not is_installed("onnx", "onnxruntime"):
        return None
    label = trial.model.label
    found = list(_faults(trial, convert(calibrate_trial(trial.prepared.clone(), trial.inputs)), label, FLOAT_ERROR))
    for timing in OTHERS:
        for spec in specs_of_modes(trial, timing):
            prepared = asked_for(trial, spec)
            if prepared is None:
                continue
            needs_data = any(group.source is Source.DATA for group in prepared.plan.groups)
            program = convert(calibrate_trial(prepared, trial.inputs) if needs_data else prepared)
            limit = RUN_TIME_ERROR if timing is Timing.DYNAMIC else FLOAT_ERROR
            found += _faults(trial, program, f"{label}, {name_of(spec)}", limit)
    return found


def _faults(trial: Trial, program: Program, where: str, limit: float) -> Iterator[Fault]:
    from quantc.targets.onnx.onnx_module import lower

    try:
        model = lower(program)
        for factor in FACTORS:
            inputs = scale_inputs(trial.inputs, factor)
            yield from (Fault(what, _CLAIM, where) for what in _apart(program, model, inputs, limit))
    except QuantcError as error:
        yield Fault(f"it cannot be written: {error.what}", _CLAIM, where)
    except Exception as error:  # noqa: BLE001 - whatever a runtime raises is what is to be reported
        yield Fault(f"it does not run: {type(error).__name__}: {str(error).partition(chr(10))[0]}", _CLAIM, where)


def _apart(program: Program, model: Any, inputs: Sequence[Any], limit: float) -> Iterator[str]:
    """Outputs that are more than a step off, or, where they are float, more than the limit."""
    args, kwargs = pytree.tree_unflatten(list(inputs), program.signature.in_spec)
    wanted, found = (pytree.tree_leaves(run(*args, **kwargs)) for run in (program, model))
    for index, (node, left, right) in enumerate(zip(_outputs(program), wanted, found, strict=True)):
        if not isinstance(left, Tensor) or not left.numel():
            continue
        off = float((left.double() - right.double()).abs().nan_to_num(0.0).max())
        step = _step(node)
        allowed = limit * float(left.double().abs().max()) if step is None else 1.001 * step
        if off > allowed:
            yield f"output {index} is off by {off:.3g}, and {allowed:.3g} is allowed"


def _outputs(program: Program) -> tuple[Any, ...]:
    result = next(node for node in reversed(program.graph.nodes) if node.op == "output").args[0]
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _step(node: Any) -> float | None:
    """The step of an output that is quantized with a fixed scale."""
    if not isinstance(node, fx.Node) or not is_dequantize(node):
        return None
    scale = node.args[1]
    return float(scale) if isinstance(scale, float) else None


__all__ = ["onnx_form"]
