"""`fuse_fx`: batch norms folded away, and nothing else."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import fx, nn

from quantc import pipelines
from quantc.errors import ModeError
from quantc.flows.fx.argument_forms import config_of
from quantc.flows.fx.backend_config_rules import backend_of
from quantc.flows.fx.capturing import capture_model
from quantc.flows.fx.custom_config import FuseCustomConfig
from quantc.flows.fx.observed_module import preserve
from quantc.ir.dialect import WEIGHTED, is_op, op_name
from quantc.ir.program import Program
from quantc.ir.types import TensorType
from quantc.verbs.capture import capture

RANKS = {"torch.nn.modules.batchnorm.BatchNorm2d": 4, "torch.nn.modules.batchnorm.BatchNorm3d": 5}
"""The rank of these modules' inputs, which they check."""


class UnfusedWarning(UserWarning):
    """A batch norm that could not be folded, because shapes are not known."""


def fuse_fx(
    model: nn.Module,
    fuse_custom_config: FuseCustomConfig | dict[str, Any] | None = None,
    backend_config: Any = None,
    *,
    fuse_custom_config_dict: FuseCustomConfig | dict[str, Any] | None = None,
    example_inputs: Any = None,
) -> fx.GraphModule:
    """Fold batch norms into the convolutions and linears before them, for inference. The model is not changed.

    What is fused is exact everywhere, so it is the same for every `backend_config`; one with a fuser of its own is refused.
    Without `example_inputs` shapes are known only where modules check them, as those for images do; a norm that may lie
    along another axis is left, with a warning.
    """
    custom = config_of(FuseCustomConfig, fuse_custom_config, fuse_custom_config_dict)
    backend_of(backend_config)  # what cannot be read is refused, and nothing else follows from it
    if model.training:
        raise ModeError(
            "fuse_fx is for inference", where="the model is in training mode", advice="call model.eval() first"
        )
    if example_inputs is None:
        program = capture(model, method="fx")
        _note_ranks(program)
    else:
        program, _ = capture_model(model, example_inputs, [])
    fused = pipelines.inference().run(program)
    _warn_unfused(fused)
    preserve(model, fused.module, custom.preserved_attributes)
    return fused.module


def _note_ranks(program: Program) -> None:
    """Record the rank of norms' inputs where the class of the norm tells."""
    for node in program.graph.nodes:
        origin = program.origins.get(node)
        rank = RANKS.get(origin.module_type) if origin is not None and is_op(node, "batch_norm") else None
        given = node.args[0] if rank is not None else None
        weight = program.tensor(node.args[3]) if rank is not None else None  # the mean has an element for each channel
        if isinstance(given, fx.Node) and weight is not None and given.meta.get("val") is None:
            sizes = (f"n{axis}" for axis in range(2, rank or 0))
            given.meta["val"] = TensorType(torch.float32, ("n0", weight.numel(), *sizes))


def _warn_unfused(program: Program) -> None:
    left = [
        program.describe(node)
        for node in program.graph.nodes
        if is_op(node, "batch_norm") and isinstance(node.args[0], fx.Node) and op_name(node.args[0]) in WEIGHTED
    ]
    if left:
        warnings.warn(
            f"not folded: {', '.join(left)}; give fuse_fx example_inputs, so that shapes are known",
            UnfusedWarning,
            stacklevel=3,
        )
