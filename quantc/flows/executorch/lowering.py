"""From a converted model to an ExecuTorch program: edge dialect, partitions, program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from quantc.flows.pt2e.graph_modules import check_graph_module
from quantc.targets.executorch.lazy_imports import package, quiet


def to_executorch(
    model: fx.GraphModule,
    example_inputs: tuple[Any, ...],
    partitioners: Sequence[Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> Any:
    """ExecuTorch's program manager for a converted model; its `buffer` is what a `.pte` file holds.

    `partitioners` are ExecuTorch's, XNNPACK's without any given; the first has the first choice."""
    check_graph_module(model, "to_executorch")
    chosen = partitioners
    if chosen is None:
        chosen = [package("executorch.backends.xnnpack.partition.xnnpack_partitioner").XnnpackPartitioner()]
    lower = package("executorch.exir").to_edge_transform_and_lower
    with quiet(), torch.no_grad():
        exported = torch.export.export(model, example_inputs, dynamic_shapes=dynamic_shapes)
        return lower(exported, partitioner=list(chosen)).to_executorch()
