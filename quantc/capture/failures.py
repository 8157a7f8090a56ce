"""Turning what went wrong inside a tracer into an error about the user's code."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from quantc.capture.proxies import RefusedError
from quantc.capture.sources import user_line_of_error
from quantc.errors import CaptureError

CATALOGUE = "https://docs.pytorch.org/docs/stable/generated/exportdb/index.html"
WAYS_OUT = (
    "keep the module opaque with leaf=(its name or class,) and method='fx'; "
    "or capture only the submodules you want to quantize; "
    "or rewrite the line, for instance with torch.where or torch.cond "
    f"(the constructs that export supports are listed at {CATALOGUE}); "
    "or use the dynamic tracing flow, which follows Python control flow as it runs"
)


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def explain_failure(error: Exception, method: str, model: nn.Module, args: Any, kwargs: Any) -> CaptureError:
    """The CaptureError for an exception raised while capturing `model` by `method`."""
    name = type(model).__name__
    if (
        args is not None
        and not isinstance(error, RefusedError)
        and (eager := _eager_failure(model, args, kwargs)) is not None
    ):
        return CaptureError(
            f"{name} does not run on the example inputs: {first_line(eager)}",
            where=user_line_of_error(eager) or None,
            advice="pass example_inputs as a tuple of positional arguments that model(*example_inputs) accepts "
            "(and example_kwargs for keywords)",
        )
    return CaptureError(
        f"{name} could not be captured by {method}: {first_line(error)}",
        where=user_line_of_error(error) or None,
        advice=WAYS_OUT,
    )


def _eager_failure(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """What the model itself raises on the example inputs, if it does."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copy.deepcopy(model)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the user's model may raise anything, and that is the answer
        return error
    return None
