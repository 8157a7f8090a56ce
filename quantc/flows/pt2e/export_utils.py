"""Switching exported models between training and inference: batch norms and dropouts change, nothing else can."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import fx

from quantc.flows.pt2e.graph_modules import check_graph_module
from quantc.ir.dialect import BY_NAME, DROPOUTS, in_place

aten = torch.ops.aten
MODES: dict[Any, int] = {
    aten.batch_norm.default: 5,
    **{overload: 2 for row in (BY_NAME[name] for name in DROPOUTS) for overload in (row.target, in_place(row))},
    aten.rrelu.default: 3,
    aten.rrelu_.default: 3,
}
"""The ops that have a mode, and the argument that is it."""


def move_exported_model_to_eval(model: fx.GraphModule) -> fx.GraphModule:
    """Let batch norms use what they have learned, and dropouts do nothing. Changes the model."""
    return _switch(model, False)


def move_exported_model_to_train(model: fx.GraphModule) -> fx.GraphModule:
    """Let batch norms learn and dropouts drop. Changes the model."""
    return _switch(model, True)


def _switch(model: fx.GraphModule, training: bool) -> fx.GraphModule:
    check_graph_module(model, "move_exported_model_to_train" if training else "move_exported_model_to_eval")
    changed = False
    for node in model.graph.nodes:
        place = MODES.get(node.target) if node.op == "call_function" else None
        if place is None:
            continue
        given = node.args[place] if place < len(node.args) else False
        if given is not training and place < len(node.args):
            node.args = (*node.args[:place], training, *node.args[place + 1 :])
            changed = True
    model.training = training
    if changed:
        model.recompile()
    return model


def allow_exported_model_train_eval(model: fx.GraphModule) -> fx.GraphModule:
    """Let `model.train()` and `model.eval()` do what `move_exported_model_to_train` and `..._to_eval` do."""

    def train(module: fx.GraphModule, mode: bool = True) -> fx.GraphModule:
        return _switch(module, mode)

    def evaluate(module: fx.GraphModule) -> fx.GraphModule:
        return _switch(module, False)

    model.train = MethodType(train, model)  # type: ignore[method-assign]
    model.eval = MethodType(evaluate, model)  # type: ignore[method-assign]
    return model


def model_is_exported(model: object) -> bool:
    """True for a graph that torch.export captured."""
    return isinstance(model, fx.GraphModule) and any("val" in node.meta for node in model.graph.nodes)
