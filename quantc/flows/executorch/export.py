"""Capturing a model under the name it had: `export.capture_pre_autograd_graph(model, example_inputs)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from quantc.capture.argument_checks import check_examples, check_model
from quantc.capture.failures import explain_failure


def capture_pre_autograd_graph(
    f: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, dynamic_shapes: Any = None
) -> fx.GraphModule:
    """The model as one graph of ATen ops, ready for `prepare_pt2e`.

    A model that cannot be captured is an error that names the line, says why, and points to the catalogue of the
    constructs that can be."""
    check_model(f)
    check_examples(f, args, kwargs or {})
    try:
        exported = torch.export.export(f, args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as error:
        raise explain_failure(error, "export", f, args, kwargs or {}) from error
    module = exported.module()
    if not isinstance(module, fx.GraphModule):
        raise TypeError(f"torch.export gave a {type(module).__name__}")
    return module


__all__ = ["capture_pre_autograd_graph"]
