"""Training flags among the arguments of a captured graph, so that `.train()` and `.eval()` can set them.

An argument counts only if it equalled the model's mode at capture: dropout that is always on, or a batch norm frozen by
the user, stays as captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from quantc.ir.dialect import BY_NAME, in_place, ops_in, position
from quantc.ir.op_row import Family
from quantc.ir.program import Program, attribute
from quantc.ir.sites import ModeValue

aten = torch.ops.aten

FLAGS: dict[Any, str] = {
    **{
        target: "train"
        for row in (BY_NAME[name] for name in ops_in(Family.DROPOUT, Family.RECURRENT))
        for target in (row.target, in_place(row))
        if target is not None
    },
    aten.native_dropout.default: "train",
    aten.batch_norm.default: "training",
    aten.instance_norm.default: "use_input_stats",
    aten.rrelu.default: "training",
}


def record_modes(program: Program, model: nn.Module | None) -> None:
    """Fill `program.modes` and `program.counters`, and note what an eval capture has lost for training."""
    for node in program.nodes():
        if node.target in FLAGS:
            _record_flag(program, node)
        if node.target is aten.batch_norm.default:
            _record_counter(program, node, model)
        if node.target is aten.scaled_dot_product_attention.default and program.training:
            _record_attention(program, node)
    if model is not None and not program.training:
        _note_lost_dropout(program, model)


def _record_flag(program: Program, node: fx.Node) -> None:
    index = position(node.target, FLAGS[node.target])
    if index >= len(node.args) or not isinstance(node.args[index], bool):
        return
    uses_statistics = node.target in (aten.batch_norm.default, aten.instance_norm.default)
    if uses_statistics and node.args[3] is None:
        return  # no running statistics: it uses the batch's in either mode
    if node.args[index] is program.training:
        program.modes[node] = ModeValue(index, train=True, eval=False)


def _record_attention(program: Program, node: fx.Node) -> None:
    """The dropout of torch's own attention modules, which they give in training alone."""
    index, origin = position(node.target, "dropout_p"), program.origins.get(node)
    is_own = origin is not None and origin.module_type.startswith("torch.nn.")
    if is_own and index < len(node.args) and node.args[index] != 0:
        program.modes[node] = ModeValue(index, train=float(node.args[index]), eval=0.0)  # type: ignore[arg-type]


def _record_counter(program: Program, node: fx.Node, model: nn.Module | None) -> None:
    mean = node.args[3]
    if node not in program.modes or not isinstance(mean, fx.Node) or mean.op != "get_attr":
        return
    path = str(mean.target).rpartition(".")[0]
    counter = f"{path}.num_batches_tracked" if path else "num_batches_tracked"
    if isinstance(attribute(program.root, counter), torch.Tensor):
        program.counters[node] = counter
    module = attribute(model, path) if model is not None and path else model
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
        program.note_inference_only(
            f"batch norm {path!r} averages cumulatively (momentum=None), which a graph cannot express"
        )


def _note_lost_dropout(program: Program, model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and module.dropout > 0:
            program.note_inference_only(
                f"attention {path!r} has dropout {module.dropout}, which is not in a program captured in eval mode"
            )
