"""Folding of batch norms and constant arithmetic into weights and biases."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, fx, nn

from quantc.ir.alias_analysis import Aliasing
from quantc.ir.dialect import argument
from quantc.ir.program import Program, Stage, attribute
from quantc.patterns.fusions import FUSIONS
from quantc.patterns.rule_matcher import Match, Matcher
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.rewrite.affine_folding import Affine, Channels, affine_of_norm, fold_affine
from quantc.rewrite.constant_order import order_constants


class Fuse(Pass):
    """Fold batch norms, and arithmetic with constants, into the convolution or linear before them.

    `conv-bn`, `linear-bn` (inference only: a batch norm in training mode stays), and multiplication, division, addition
    or subtraction of a constant that is one number or one number per channel. Supports 1, 2 and 3 dimensions,
    transposed and grouped convolutions, with and without bias, and chains: a convolution absorbs one op after another.

    Nothing is folded into a producer with two users: the other user needs the unchanged result. A weight that two
    convolutions share is copied for the one that changes. New weights are computed in float64 and rounded once. Where
    folding would introduce infinities or NaNs, or the program writes to a constant, nothing is folded, and the log says
    so.
    """

    name: ClassVar[str] = "fuse"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage | None] = Stage.FUSED
    before: ClassVar[Stage | None] = Stage.ANNOTATED
    preserves: ClassVar[Preserves] = Preserves.CLOSELY

    arithmetic: Literal["fold", "keep"] = "fold"
    """"fold" also folds arithmetic with constants; "keep" folds batch norms alone."""

    @torch.no_grad()
    def run(self, program: Program) -> Outcome:
        folded: Counter[str] = Counter()
        refused: list[str] = []
        matcher = Matcher(program)
        store = _Store(program)
        for first in FUSIONS.match(program):
            match: Match | None = self._wanted(first)
            while match is not None:
                producer = match.node("conv" if "conv" in match.bindings else "linear")
                reason = _fold(program, match, producer, store)
                if reason is not None:
                    refused.append(reason)
                    break
                folded[match.rule.name] += 1
                match = self._wanted(_next(matcher, producer))
        if folded:
            for _, graph in program.graphs():
                _tidy(program, graph)
        notes = [f"folded {count} {name}" for name, count in sorted(folded.items())]
        return Outcome(bool(folded), (*notes, *refused))

    def _wanted(self, match: Match | None) -> Match | None:
        is_norm = match is not None and match.rule.name.endswith("-bn")
        return match if is_norm or self.arithmetic == "fold" else None


def _tidy(program: Program, graph: fx.Graph) -> None:
    for node in reversed(graph.find_nodes(op="get_attr")):
        if not node.users:
            program.erase(node)
    order_constants(program, graph)


def _next(matcher: Matcher, producer: fx.Node) -> Match | None:
    """The next op that can be folded into the producer, if any."""
    if len(producer.users) != 1:
        return None
    user = next(iter(producer.users))
    for rule in FUSIONS.by_size:
        if user.target in rule.compiled.roots and (match := matcher.find(rule, user)) is not None:
            return match
    return None


def _fold(program: Program, match: Match, producer: fx.Node, store: _Store) -> str | None:
    """Fold one match; returns why not, if it cannot be done."""
    if (reason := store.why_not_constant(match)) is not None:
        return reason
    weight = program.tensor(match.node("w"))
    if weight is None:
        return f"{program.describe(producer)}: its weight cannot be read"
    bias = program.tensor(match["b"]) if match["b"] is not None else None
    channels = Channels.of(producer)
    affine = _affine(program, match, channels.count(weight))
    new_weight, new_bias = fold_affine(weight, bias, affine, channels)
    if not (torch.isfinite(new_weight).all() and torch.isfinite(new_bias).all()):
        return f"{program.describe(match.root)} stays: folded into {producer.name} it would give infinities or NaNs"
    _rewire(program, match, producer, new_weight, new_bias, store)
    if match.rule.name.endswith("-bn"):
        program.note_inference_only(f"batch norm {program.describe(match.root)} was folded into {producer.name}")
    else:
        program.note_inference_only(f"{program.describe(match.root)} was folded into {producer.name}")
    program.forward(match.root, producer)
    return None


def _affine(program: Program, match: Match, channels: int) -> Affine:
    kind = match.rule.name.rpartition("-")[2]
    if kind == "bn":
        return _affine_of_norm(program, match, channels)
    constant = match["c"]
    value = program.tensor(constant) if isinstance(constant, fx.Node) else torch.tensor(constant, dtype=torch.float64)
    vector = torch.as_tensor(value).double().reshape(-1).expand(channels)
    zero, one = torch.zeros(channels, dtype=torch.float64), torch.ones(channels, dtype=torch.float64)
    return {
        "mul": lambda: Affine(vector, zero),
        "div": lambda: Affine(1.0 / vector, zero),
        "add": lambda: Affine(one, vector),
        "sub": lambda: Affine(one, -vector),
    }[kind]()


def _affine_of_norm(program: Program, match: Match, channels: int) -> Affine:
    gamma, beta, mean, var = (
        program.tensor(match[name]) if match[name] is not None else None for name in ("gamma", "beta", "mean", "var")
    )
    return affine_of_norm(gamma, beta, mean, var, float(argument(match.root, "eps")), channels)


def _rewire(program: Program, match: Match, producer: fx.Node, weight: Tensor, bias: Tensor, store: _Store) -> None:
    args: list[Any] = list(producer.args)
    args[1] = store.put(match.node("w"), producer, weight, hint=str(match.node("w").target))
    if match["b"] is not None:
        args[2] = store.put(match.node("b"), producer, bias, hint=str(match.node("b").target))
    else:
        parent = str(match.node("w").target).rpartition(".")[0]
        args[2:3] = [store.new(args[1], bias, hint=f"{parent}.bias" if parent else "bias")]
    producer.args = tuple(args)
    program.touch()


class _Store:
    """Writes new constants: over the old one if it has no other user, under a new name otherwise."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.readers: Counter[int] = Counter()
        self.written: set[int] = set()
        for _, graph in program.graphs():
            self._read(graph)

    def _read(self, graph: fx.Graph) -> None:
        aliasing = Aliasing(graph, self.program.owner(graph))
        for node in graph.find_nodes(op="get_attr"):
            if (tensor := self.program.tensor(node)) is None:
                continue
            self.readers[id(tensor)] += len(node.users)
            if aliasing.is_written(node):
                self.written.add(id(tensor))

    def why_not_constant(self, match: Match) -> str | None:
        for value in match.bindings.values():
            if isinstance(value, fx.Node) and id(self.program.tensor(value)) in self.written:
                return f"{self.program.describe(match.root)} stays: the program writes to {value.target}"
        return None

    def put(self, old: fx.Node, reader: fx.Node, value: Tensor, *, hint: str) -> fx.Node:
        tensor = self.program.tensor(old)
        is_parameter = isinstance(tensor, nn.Parameter)
        stored = nn.Parameter(value, requires_grad=False) if is_parameter else value
        uses = sum(operand is old for operand in reader.args)
        if tensor is None or self.readers[id(tensor)] > uses:
            self.readers[id(tensor)] -= uses
            return self.new(old, stored, hint=hint)
        owner = self.program.owner(old.graph)
        parent, _, leaf = str(old.target).rpartition(".")
        holder = attribute(owner, parent) if parent else owner
        setattr(holder, leaf, stored)
        self.readers[id(stored)] = uses
        return old

    def new(self, behind: fx.Node, value: Tensor, *, hint: str) -> fx.Node:
        """A new constant, placed right behind the node of another: constants stay together, in order of use."""
        node = self.program.constant(hint, value, before=behind.next)
        self.readers[id(value)] = 1
        return node
