"""Translation of tracer failures into errors about the user's code."""

from __future__ import annotations

import re
import traceback
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

from quantc.capture.model_copies import Tensors, cloned_inputs, twin
from quantc.capture.refused_trace import RefusedError
from quantc.capture.source_lines import forward_line, user_line_of_error
from quantc.errors import CaptureError
from quantc.ir.dialect import WEIGHTED, is_op
from quantc.ir.program import Program
from quantc.ir.types import dtype_of

CATALOGUE = "https://docs.pytorch.org/docs/stable/generated/exportdb/index.html"
WAYS_OUT = (
    "keep the module opaque with leaf=(its name or class,) and method='fx'; "
    "or capture only the submodules you want to quantize; "
    "or rewrite the line, for instance with torch.where or torch.cond "
    f"(the constructs that export supports are listed at {CATALOGUE}); "
    "or use the dynamic tracing flow, quantc.flows.tracing, which follows Python control flow as it runs"
)
TRY_EXPORT = f"use method='export', which runs the model on stand-ins for real tensors; or {WAYS_OUT}"
SHAPES_ADVICE = (
    "leave that dimension out of dynamic_shapes, or give it the range or the relation that the model needs, "
    "or remove what fixes it from the model"
)
EXAMPLES_ADVICE = (
    "pass example_inputs as a tuple of positional arguments that model(*example_inputs) accepts "
    "(and example_kwargs for keywords)"
)
PACKING = frozenset({"pack_padded_sequence", "pad_packed_sequence", "pack_sequence"})
PACKED = "packed sequences have sizes that depend on the data"
TRACED = ("ProxyValue", "Proxy(", "incompatible function arguments")
"""Signs that torch was handed a traced value where it wanted a tensor."""
ENDS = re.compile(r"\s*\((?:unhinted|Size-like).*$")


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def explain_failure(error: Exception, method: str, model: nn.Module, args: Any, kwargs: Any) -> CaptureError:
    """CaptureError for an exception raised while capturing `model` by `method`."""
    name = type(model).__name__
    is_refusal = isinstance(error, RefusedError | GuardOnDataDependentSymNode)
    if args is not None and not is_refusal and (eager := _eager_failure(model, args, kwargs)) is not None:
        return _not_running(model, eager)
    reason, advice = _reason(error, method)
    if args is None:
        advice = f"give example_inputs, so that ranks, sizes and dtypes are known; or {WAYS_OUT}"
    return CaptureError(
        f"{name} could not be captured by {method}: {reason}",
        where=user_line_of_error(error) or forward_line(model),
        advice=advice,
    )


def refuse_wrong_dtypes(program: Program, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Fake tensors accept a matmul of two dtypes that real tensors refuse: if there is one, run the model itself."""
    if args is None or not any(_mixes_dtypes(node) for node in program.nodes()):
        return
    if (eager := _eager_failure(model, args, kwargs)) is not None:
        raise _not_running(model, eager)


def _mixes_dtypes(node: fx.Node) -> bool:
    if not is_op(node, *WEIGHTED, "matmul"):
        return False
    dtypes = {dtype_of(operand) for operand in node.args[:2]}
    return None not in dtypes and len(dtypes) > 1


def _not_running(model: nn.Module, error: Exception) -> CaptureError:
    floats = {x.dtype for x in model.parameters() if x.is_floating_point()} - {torch.float32}
    is_about_dtypes = bool(floats) and any(word in str(error) for word in ("dtype", "data type", "scalar type"))
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in floats))
    known = f"is in {names} and " if is_about_dtypes else ""
    way = (
        'give dtype="float32", on the command line --dtype float32, which only is quantized, and a copy is brought to it '
        "with its example inputs; or "
    )
    return CaptureError(
        f"{type(model).__name__} {known}does not run on the example inputs: {first_line(error)}",
        where=user_line_of_error(error) or forward_line(model),
        advice=f"{way if is_about_dtypes else ''}{EXAMPLES_ADVICE}",
    )


def _reason(error: Exception, method: str) -> tuple[str, str]:
    """Cause in terms of the model rather than of the tracer, and a remedy."""
    text = first_line(error)
    if _is_about_shapes(error):
        return _shape_reason(error), SHAPES_ADVICE
    if isinstance(error, RefusedError) and "dynamic size" in text:
        return text, SHAPES_ADVICE
    if not PACKING.isdisjoint(frame.name for frame in traceback.extract_tb(error.__traceback__)):
        return text if PACKED in text else f"{PACKED} ({text})", WAYS_OUT
    if isinstance(error, GuardOnDataDependentSymNode):
        return f"a branch or a Python number depends on the data ({ENDS.sub('', text)})", WAYS_OUT
    if method == "fx" and any(sign in text for sign in TRACED):
        return f"a traced value reached code that takes real tensors only ({text})", TRY_EXPORT
    return text, WAYS_OUT


def _is_about_shapes(error: Exception) -> bool:
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, ConstraintViolationError) or "Constraints violated" in str(current):
            return True
        current = current.__cause__
    return False


def _shape_reason(error: Exception) -> str:
    """The first sentence that says which dimension the model fixes."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "specialized" in line or "range" in line or "marked" in line]
    return f"a dimension marked dynamic is fixed by the model: {said[0] if said else lines[0]}"


def _eager_failure(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """Exception that the model itself raises on the example inputs; None if it runs."""
    try:
        with torch.random.fork_rng(devices=[]):
            given, named = cloned_inputs((args, kwargs))
            twin(model, Tensors.COPIED)(*given, **named)
    except Exception as error:  # noqa: BLE001 - the user's model may raise anything, and that is the answer
        return error
    return None
