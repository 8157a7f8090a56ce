"""Rewrites a program for training: restores norms, inserts fake quantizers by plan, and makes modes dynamic."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import count

import torch
from torch import fx, nn

from quantc.ir.dialect import DROPOUTS, is_op, op_name, traits_of
from quantc.ir.op_row import Trait
from quantc.ir.plan import Group
from quantc.ir.program import TRAINED, Program
from quantc.ir.site_index import operand_nodes
from quantc.ir.sites import SetAside, Site
from quantc.ir.types import type_of
from quantc.qat.build import Builder
from quantc.qat.fake import FakeQuantizer, HandedOn
from quantc.qat.modes import ModeFlag
from quantc.qat.norms import FoldNorm, LiveNorm, UnfoldNorm
from quantc.qdq.insertion import PlanWriter
from quantc.qdq.ops import Scales
from quantc.rewrite.affine_folding import Channels
from quantc.spec.spec import QuantSpec

NORMS, MODES = "_norms", "_modes"
"""The submodules that hold the norms of a graph, and what follows its mode."""


@dataclass(frozen=True)
class Returned:
    """A norm that is back in the graph."""

    norm: fx.Node
    """The node that replaces the convolution or matmul for its users."""
    factor: fx.Node
    """The factor folded into the weight."""
    channels: Channels
    name: str


def put_module(program: Program, graph: fx.Graph, holder: str, name: str, module: nn.Module) -> str:
    """Store a module for a graph; its name for calls."""
    owner = program.owner(graph)
    if holder not in owner._modules:
        owner.add_module(holder, nn.Module())
    inside = owner.get_submodule(holder)
    if inside._modules.setdefault(name, module) is not module:
        numbered = (f"{name}_{number}" for number in count(len(inside._modules)))
        name = next(fresh for fresh in numbered if fresh not in inside._modules)
        inside.add_module(name, module)
    return f"{holder}.{name}"


# -- norms -----------------------------------------------------------------------------------------------------------


def return_norms(program: Program) -> dict[fx.Node, Returned]:
    """Restore detached norms after their convs and linears, folded into the weights before them."""
    return {product: _return(program, product, row) for product, row in program.set_aside.rows.items()}


def _return(program: Program, product: fx.Node, row: SetAside) -> Returned:
    graph, channels = product.graph, Channels.of(product)
    names = (row.gamma, row.beta, row.mean, row.var)
    parts = [None if name is None else program.read(name, before=product) for name in names]
    x, weight, bias = product.args[:3]
    frozen = not row.follows_mode
    target = put_module(program, graph, NORMS, f"fold_{row.name}", _frozen(FoldNorm(channels, row.eps), frozen))
    fold = program.emit(target, (weight, bias, *parts), before=product, name=f"fold_{row.name}")
    kinds = [type_of(part) if isinstance(part, fx.Node) else None for part in (weight, bias)]
    folded = [
        program.emit(operator.getitem, (fold, index), before=product, name=f"{row.name}_{part}", value=kind)
        for index, (part, kind) in enumerate(zip(("weight", "bias", "factor"), (*kinds, None), strict=True))
    ]
    product.args = (x, folded[0], folded[1], *product.args[3:])
    counter = None if row.counter is None or frozen else program.read(row.counter, before=product)
    live = _frozen(LiveNorm(row.eps, row.momentum), frozen)
    target = put_module(program, graph, NORMS, row.name, live)
    norm = program.emit(target, (product, *parts, counter), before=product.next, like=product, name=row.name)
    product.replace_all_uses_with(norm, delete_user_cb=lambda user: user is not norm)
    program.touch()
    return Returned(norm, folded[2], channels, row.name)


def _frozen(module: FoldNorm | LiveNorm, frozen: bool) -> nn.Module:
    module.frozen = frozen
    return module


def unfold_norms(program: Program, returned: dict[fx.Node, Returned]) -> None:
    """Divide the quantized weights by their folded factor."""
    for product, row in returned.items():
        target = put_module(program, product.graph, NORMS, f"unfold_{row.name}", UnfoldNorm(row.channels))
        weight = product.args[1]
        whole = program.emit(target, (weight, row.factor), before=product, name=f"unfold_{row.name}")
        product.args = (product.args[0], whole, *product.args[2:])
        program.touch()


# -- fake quantizers -------------------------------------------------------------------------------------------------


@dataclass
class FakeScales:
    """Quantization of a group during training: one op that rounds, and no dequantize."""

    program: Program
    fake: FakeQuantizer
    name: str

    @property
    def spec(self) -> QuantSpec:
        return self.fake.spec

    def quantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        target = put_module(self.program, before.graph, TRAINED, self.name, self.fake)
        return self.program.emit(target, (value,), before=before, like=value, name=f"fake_quantize_{value.name}")

    def dequantize(self, value: fx.Node, *, before: fx.Node) -> fx.Node:
        return value


class FakeWriter(PlanWriter):
    """Inserts fake quantizers where `PlanWriter` would insert quantize and dequantize ops; in training a tensor that is
    only moved is rounded once.
    """

    def __init__(self, program: Program, builder: Builder, returned: dict[fx.Node, Returned]) -> None:
        super().__init__(program, self._scales)
        self.builder = builder
        self.returned = returned

    def _scales(self, group: Group, hint: str) -> Scales:
        value = self.value(group.places[0])
        name = "".join(letter if letter.isalnum() else "_" for letter in group.name)
        return FakeScales(self.program, self.builder.build(group, value), name)

    def value(self, site: Site) -> fx.Node:
        value = super().value(site)
        return self.returned[value].norm if value in self.returned else value

    def note(self, site: Site, value: fx.Node, scales: Scales) -> None:
        reader, operand = self.places.node(site), site.operand
        # an operand read through dropout is rounded before it: dropout scales up the rest
        claims = self.program.plan.claims
        while (
            operand is not None
            and is_dropout(self.program, value)
            and value not in claims
            and len(self.places.reads(value)) == 1
        ):
            reader, operand, value = value, 0, self.places.operands(value)[0]
        if operand is None:
            super().note(site, value, scales)
        else:
            self.tensors.add(value)
            self.wants.setdefault(reader, {})[operand] = scales

    def yielded(self, value: fx.Node, own: Scales, *, before: fx.Node) -> fx.Node:
        if not isinstance(own, FakeScales) or not self._is_on_grid(value, own):
            return super().yielded(value, own, before=before)
        target = put_module(self.program, value.graph, TRAINED, f"{value.name}_again", HandedOn(own.fake))
        return self.program.emit(target, (value,), before=before, like=value, name=f"hand_on_{value.name}")

    def _is_on_grid(self, value: fx.Node, scales: Scales) -> bool:
        """True if an op propagates its input in exactly this form: rounding it again would change nothing."""
        op = value.args[0] if value.target is operator.getitem else value
        if not isinstance(op, fx.Node) or is_op(op, "pad"):
            return False
        if not is_dropout(self.program, op) and Trait.PRESERVES_VALUES not in traits_of(op):
            return False
        wants = self.wants.get(op, {})
        return all(
            wants.get(operand, self.yields.get(source)) is scales for operand, source in enumerate(operand_nodes(op))
        )


def is_dropout(program: Program, node: fx.Node) -> bool:
    """True if a node drops elements in training and is the identity in inference."""
    return node in program.modes and is_op(node, *DROPOUTS)


# -- modes -----------------------------------------------------------------------------------------------------------


def follow_modes(program: Program) -> None:
    """Make mode-dependent arguments dynamic. The program must be in training mode."""
    for node, row in program.modes.rows.items():
        flag = _flag(program, node, ModeFlag(row.train, row.eval, op_name(node)))
        node.args = (*node.args[: row.position], flag, *node.args[row.position + 1 :])
    counters = {(norm.graph, target) for norm, target in program.counters.rows.items()}
    for node in list(program.nodes()):
        counter = node.args[0] if node.target is torch.ops.aten.add_.Tensor else None
        if isinstance(counter, fx.Node) and (node.graph, str(counter.target)) in counters:
            node.args = (counter, _flag(program, node, ModeFlag(1, 0, "batch_norm")))
    program.touch()


def _flag(program: Program, node: fx.Node, flag: ModeFlag) -> fx.Node:
    target = put_module(program, node.graph, MODES, node.name, flag)
    return program.emit(target, (), before=node, name=f"mode_of_{node.name}")
