"""Convolution and batch norm while they are trained quantized: the weight is rounded as it will be with the norm folded
into it, and the norm still learns.

    scale = gamma / sqrt(var + eps);  norm(conv(x, round(weight * scale)) / scale + bias)

Where a gamma is zero as training begins, such a channel has the scale 1 in this form: nothing can be divided by zero
again, and it goes on learning. Folded, its weight is zero.
The graph has the form that torchao gives it. The norm keeps its own eps, and its own mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from quantc.flows.foreign_observers import is_observer
from quantc.flows.pt2e.constants import Constants
from quantc.flows.pt2e.graph_modules import store, tensor_at
from quantc.flows.pt2e.norms import CONVS, INFERENCE_NORM, NORMS, TRANSPOSED, norm_of
from quantc.flows.pt2e.quantizer import EdgeOrNode

aten = torch.ops.aten
COUNTER = "num_batches_tracked"
PORTED = ("nn_module_stack", "stack_trace", "source_fn_stack", "from_node")

Moved = dict[EdgeOrNode, EdgeOrNode]
"""Places that lie elsewhere after a rewrite."""


def open_norms(module: fx.GraphModule) -> Moved:
    """Bring every convolution with a batch norm behind it to the form above; where its operands are now."""
    moved: Moved = {}
    for node in list(module.graph.nodes):
        core = node.args[0] if node.op == "call_function" and node.target is aten.batch_norm.default else None
        if isinstance(core, fx.Node) and core.target in CONVS | TRANSPOSED and len(core.users) == 1:
            _open(module, core, node, moved)
    return moved


def _has_zeros(module: fx.GraphModule, gamma: fx.Node) -> bool:
    value = tensor_at(module, str(gamma.target))
    return value is None or bool((value == 0).any())


def _open(module: fx.GraphModule, core: fx.Node, node: fx.Node, moved: Moved) -> None:
    norm, x, weight, rest = norm_of(node), core.args[0], core.args[1], core.args[3:]
    bias = core.args[2] if len(core.args) > 2 else None
    is_grouped = core.target in TRANSPOSED and len(core.args) > 6 and core.args[6] != 1
    if norm is None or is_grouped or not isinstance(weight, fx.Node):
        return
    emit = _emitter(core)
    rank = _rank(weight, core)
    along = [1, -1, *[1] * (rank - 2)]
    with core.graph.inserting_before(core):
        deviation = emit(aten.sqrt.default, emit(aten.add.Tensor, norm.var, norm.eps))
        scale = (
            emit(aten.reciprocal.default, deviation)
            if norm.gamma is None
            else emit(aten.div.Tensor, norm.gamma, deviation)
        )
        if norm.gamma is not None and _has_zeros(module, norm.gamma):
            is_off = emit(aten.eq.Scalar, scale, 0)
            scale = emit(aten.where.self, is_off, emit(aten.ones_like.default, scale), scale)
        channels = along if core.target in TRANSPOSED else [-1, *[1] * (rank - 1)]
        scaled = emit(aten.mul.Tensor, weight, emit(aten.reshape.default, scale, channels))
        zeros = None if bias is None else emit(aten.zeros_like.default, bias)
    with core.graph.inserting_before(node):
        result = emit(aten.div.Tensor, core, emit(aten.reshape.default, scale, along))
        if isinstance(bias, fx.Node):
            result = emit(aten.add.Tensor, result, emit(aten.reshape.default, bias, along))
    core.args = (x, scaled, zeros, *rest)
    node.args = (result, *node.args[1:])
    moved[weight, core] = (scaled, core)
    if isinstance(bias, fx.Node) and zeros is not None:
        moved[bias, core] = (zeros, core)


def _emitter(like: fx.Node) -> Callable[..., fx.Node]:
    meta = {key: like.meta[key] for key in PORTED if key in like.meta}

    def emit(target: OpOverload, *args: Any) -> fx.Node:
        made = like.graph.create_node("call_function", target, args)
        made.meta = dict(meta)
        return made

    return emit


def _rank(weight: fx.Node, core: fx.Node) -> int:
    value = weight.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dim()
    digit = str(core.target).partition("d.")[0][-1]  # conv2d has four axes
    return int(digit) + 2


# -- the way back --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Opened:
    """The parts of the form above."""

    core: fx.Node
    scaled: fx.Node
    scale: fx.Node
    """The norm's multiplier per channel, zeros included."""
    zeros: fx.Node | None
    bias: fx.Node | None


@torch.no_grad()
def close_norms(module: fx.GraphModule) -> int:
    """Fold the norms of the form above into weight and bias, with the statistics they have; how many there were.

    The weight is what the graph computes, so the levels are those that were trained."""
    constants = Constants(module)
    found = 0
    for node in list(module.graph.nodes):
        opened = _match_form(module, node) if node.op == "call_function" and node.target in NORMS else None
        norm = norm_of(node) if opened is not None else None
        if opened is None or norm is None:
            continue
        weight = constants.value(opened.scaled)
        stored = opened.scaled.args[0]
        scale = constants.value(opened.scale)
        if weight is None or scale is None or not isinstance(stored, fx.Node) or stored.op != "get_attr":
            continue
        along = opened.scaled.args[1].args[1]  # type: ignore[union-attr]
        weight = torch.where(scale.reshape(along) == 0, torch.zeros_like(weight), weight)  # type: ignore[arg-type]
        mean, beta, bias = (_tensor(module, part) for part in (norm.mean, norm.beta, opened.bias))
        shift = (0 if bias is None else bias) - mean
        folded = shift * scale + (0 if beta is None else beta)
        _close(module, node, opened, str(stored.target), (weight, folded))
        found += 1
    _drop_counters(module.graph)
    return found


def _tensor(module: fx.GraphModule, node: fx.Node | None) -> Any:
    return None if node is None else tensor_at(module, str(node.target))


def _match_form(module: fx.GraphModule, node: fx.Node) -> _Opened | None:
    if node.target is INFERENCE_NORM:
        return None
    result, bias = node.args[0], None
    if isinstance(result, fx.Node) and result.target is aten.add.Tensor:
        result, shaped = result.args
        bias = shaped.args[0] if isinstance(shaped, fx.Node) and shaped.target is aten.reshape.default else None
    if not isinstance(result, fx.Node) or result.target is not aten.div.Tensor:
        return None
    core, along = result.args
    if not isinstance(core, fx.Node) or core.target not in CONVS | TRANSPOSED or not isinstance(along, fx.Node):
        return None
    scaled = _behind(module, core.args[1])
    zeros = _behind(module, core.args[2]) if len(core.args) > 2 else None
    shaped_scale = scaled.args[1] if scaled is not None and scaled.target is aten.mul.Tensor else None
    if scaled is None or not isinstance(shaped_scale, fx.Node) or shaped_scale.args[:1] != along.args[:1]:
        return None
    scale = shaped_scale.args[0]
    while isinstance(scale, fx.Node) and scale.target is aten.where.self:
        scale = scale.args[2]
    return _Opened(core, scaled, scale, zeros, bias) if isinstance(scale, fx.Node) else None  # type: ignore[arg-type]


def _behind(module: fx.GraphModule, node: Any) -> fx.Node | None:
    """A node, looking through fake quantizers."""
    while (
        isinstance(node, fx.Node) and node.op == "call_module" and is_observer(module.get_submodule(str(node.target)))
    ):
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _close(
    module: fx.GraphModule, node: fx.Node, opened: _Opened, name: str, values: tuple[torch.Tensor, torch.Tensor]
) -> None:
    graph, core = module.graph, opened.core
    bias_name = str(opened.bias.target) if opened.bias is not None else f"{name}_bias"
    is_shared = opened.scaled.args[0].users.keys() != {opened.scaled}  # type: ignore[union-attr]
    if is_shared:
        name, bias_name = f"{name}_{core.name}", f"{bias_name}_{core.name}"
    with graph.inserting_before(opened.scaled):
        reads = []
        for target, value in zip((name, bias_name), values, strict=True):
            store(module, target, nn.Parameter(value))
            read = graph.create_node("get_attr", target)
            read.meta = {key: core.meta[key] for key in PORTED if key in core.meta}
            reads.append(read)
    opened.scaled.replace_all_uses_with(reads[0])
    if opened.zeros is not None:
        opened.zeros.replace_all_uses_with(reads[1])
    else:
        core.args = (*core.args[:2], reads[1], *core.args[3:])
    node.replace_all_uses_with(core)
    graph.erase_node(node)


def _drop_counters(graph: fx.Graph) -> None:
    """Batch norms count their batches in training only."""
    for node in list(graph.nodes):
        counter = node.args[0] if node.target is aten.add_.Tensor else None
        if isinstance(counter, fx.Node) and counter.op == "get_attr" and str(counter.target).endswith(COUNTER):
            node.replace_all_uses_with(counter)
            graph.erase_node(node)
