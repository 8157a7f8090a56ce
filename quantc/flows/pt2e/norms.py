"""Batch norms behind convolutions and linears become part of their weights, in one walk."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from quantc.errors import ModeError
from quantc.flows.pt2e.graph_modules import store, tensor_at
from quantc.ir.dialect import BY_NAME, ops_in
from quantc.ir.op_row import Family

aten = torch.ops.aten
CONVS = frozenset(
    overload for name in ops_in(Family.CONV) for overload in (BY_NAME[name].target, getattr(aten, name).padding)
)
TRANSPOSED = frozenset(BY_NAME[name].target for name in ops_in(Family.CONV_TRANSPOSE))
LINEARS = frozenset({aten.linear.default})
INFERENCE_NORM = aten._native_batch_norm_legit_no_training.default
NORMS = frozenset({aten.batch_norm.default, INFERENCE_NORM})


@dataclass(frozen=True, slots=True)
class Norm:
    """The arguments of a batch norm."""

    gamma: fx.Node | None
    beta: fx.Node | None
    mean: fx.Node
    var: fx.Node
    is_training: bool
    momentum: float
    eps: float


def norm_of(node: fx.Node) -> Norm | None:
    """Parse a batch norm node; None if it has no running statistics."""
    _, gamma, beta, mean, var, *rest = node.args
    is_training, momentum, eps = (False, *rest) if node.target is INFERENCE_NORM else rest[:3]
    if not isinstance(mean, fx.Node) or not isinstance(var, fx.Node):
        return None
    return Norm(gamma, beta, mean, var, is_training is True, momentum, eps)  # type: ignore[arg-type]


@torch.no_grad()
def fold_norms(module: fx.GraphModule) -> int:
    """Fold the batch norms of an exported graph; return their number.

    A norm is folded into a convolution without other readers. Where several convolutions read one weight and have norms of
    their own, each gets its own weight.
    """
    fold = _Fold(module)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in NORMS:
            fold.visit(node)
    fold.clear()
    return fold.count


class _Fold:
    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.count = 0
        self.made: dict[tuple[Any, ...], tuple[str, str]] = {}
        """The names of folded weights and biases, by the tensors they come from."""
        self.unread: dict[fx.Node, None] = {}

    def visit(self, node: fx.Node) -> None:
        core, norm = node.args[0], norm_of(node)
        if not isinstance(core, fx.Node) or norm is None or core.target not in CONVS | TRANSPOSED | LINEARS:
            return
        weight = core.args[1]
        if len(core.users) != 1 or not isinstance(weight, fx.Node) or weight.op != "get_attr":
            return
        if core.target in LINEARS and _rank(core.args[0]) not in (None, 2):
            return  # the norm is over axis 1, and the linear yields its features on the last one
        if core.target in TRANSPOSED and len(core.args) > 6 and core.args[6] != 1:
            return  # its output channels lie on no single axis of the weight
        if norm.is_training:
            raise ModeError(
                f"{node.name} is in training mode: it would normalize by the batch it is given",
                where=node.format_node() or node.name,
                advice="export the model after model.eval(), or use prepare_qat_pt2e",
            )
        self._fold(node, core, weight, norm)

    def _fold(self, node: fx.Node, core: fx.Node, weight: fx.Node, norm: Norm) -> None:
        x, rest = core.args[0], core.args[3:]
        bias = core.args[2] if len(core.args) > 2 else core.kwargs.get("bias")
        sources = (weight, bias, norm.gamma, norm.beta, norm.mean, norm.var)
        values = [self._tensor(source) for source in sources]
        if any(source is not None and value is None for source, value in zip(sources, values, strict=True)):
            return  # computed as the model runs
        key = (core.target in TRANSPOSED, norm.eps, *(getattr(source, "target", None) for source in sources))
        if key not in self.made:
            self.made[key] = self._store(core, weight, bias, _fold_weights(core, norm.eps, values))
        targets = self.made[key]
        fresh = [self._read(core, target, old) for target, old in zip(targets, (weight, bias), strict=True)]
        core.args = (x, *fresh, *rest)
        self._replace(node, core)
        self.unread.update(dict.fromkeys(source for source in sources if isinstance(source, fx.Node)))
        self.count += 1

    def _tensor(self, source: Any) -> Tensor | None:
        is_read = isinstance(source, fx.Node) and source.op == "get_attr"
        return tensor_at(self.module, str(source.target)) if is_read else None

    def _store(self, core: fx.Node, weight: fx.Node, bias: Any, folded: tuple[Tensor, Tensor]) -> tuple[str, str]:
        """Store the folded tensors and return their names: those of the old ones, unless these have other readers."""
        name, own = str(weight.target), [weight, *([bias] if isinstance(bias, fx.Node) else [])]
        if all(set(read.users) == {core} for read in own) and (name, f"{name}_bias") not in self.made.values():
            targets = (name, str(bias.target) if isinstance(bias, fx.Node) else f"{name}_bias")
        else:
            number = 1 + sum(taken.startswith(f"{name}_folded_") for taken, _ in self.made.values())
            targets = (f"{name}_folded_{number}", f"{name}_folded_{number}_bias")
        for target, value in zip(targets, folded, strict=True):
            store(self.module, target, value)
        return targets

    def _read(self, core: fx.Node, target: str, old: Any) -> fx.Node:
        if isinstance(old, fx.Node) and old.target == target:
            return old
        with core.graph.inserting_before(core):
            node = core.graph.create_node("get_attr", target)
        value, like = tensor_at(self.module, target), core.meta.get("val")
        mode = getattr(like, "fake_mode", None)
        if mode is not None and value is not None:
            node.meta["val"] = mode.from_tensor(value, static_shapes=True)
        return node

    def _replace(self, node: fx.Node, core: fx.Node) -> None:
        if node.target is not INFERENCE_NORM:
            node.replace_all_uses_with(core)
            self.unread[node] = None
            return
        for item in list(node.users):
            if item.target is operator.getitem and item.args[1] == 0:
                item.replace_all_uses_with(core)
            self.unread[item] = None
        self.unread[node] = None

    def clear(self) -> None:
        """Erase dead nodes, readers before their operands."""
        for node in sorted(self.unread, reverse=True):
            if not node.users:
                self.module.graph.erase_node(node)


def _rank(node: Any) -> int | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dim() if isinstance(value, Tensor) else None


def _fold_weights(core: fx.Node, eps: float, values: list[Tensor | None]) -> tuple[nn.Parameter, nn.Parameter]:
    weight, bias, gamma, beta, mean, var = values
    if core.target in LINEARS:
        return fuse_linear_bn_weights(weight, bias, mean, var, eps, gamma, beta)  # type: ignore[arg-type]
    return fuse_conv_bn_weights(weight, bias, mean, var, eps, gamma, beta, core.target in TRANSPOSED)  # type: ignore[arg-type]
