"""Recognition of activations that are written by hand: `x * clamp(x + 3, 0, 6) / 6` is `hardswish`, however it is spelled.

A region of elementwise ops with one input is a function of one number, whatever its spelling. So it is evaluated in
float64, and compared with the reference of each activation of the dialect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.node import map_arg

from quantc.ir.dialect import OPS, arguments, aten, traits_of, writes
from quantc.ir.op_row import Family, Trait
from quantc.ir.program import Program
from quantc.ir.types import tensor_type

MAX_NODES = 16
"""Maximum number of ops of an activation."""
TOLERANCE = 2e-6
"""Relative to the result, and to 1: constants are often written with seven digits."""
REACH = 60.0
"""Numbers are tried up to this magnitude; the exponential of larger ones overflows float32."""
DIGITS = 10
"""Significant digits of a factor that is found."""


@dataclass(frozen=True, slots=True)
class Activation:
    """A canonical op with its options, and its reference. With a `factor` c it stands for `op(c x) / c`."""

    target: OpOverload
    options: tuple[tuple[str, Any], ...]
    """Those that are not the defaults, by name."""
    function: Callable[[Tensor], Tensor]
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Region:
    """Ops that compute a function of `x` alone, and that nothing but the last of them is read of."""

    x: fx.Node
    nodes: tuple[fx.Node, ...]
    """In program order; the last one has the result."""


def regions_at(program: Program, root: fx.Node, order: dict[fx.Node, int]) -> Iterator[Region]:
    """The regions that end at a node, from the smallest on."""
    if not _is_pointwise(program, root):
        return
    inside: set[fx.Node] = set()
    frontier = {root}
    while frontier and len(inside) <= MAX_NODES:
        last = max(frontier, key=order.__getitem__)
        if len(frontier) == 1 and len(inside) > 1 and _type(last) == _type(root):
            yield Region(last, tuple(sorted(inside, key=order.__getitem__)))
        if last is not root and not (set(last.users) <= inside and _is_pointwise(program, last)):
            return  # what comes earlier does not depend on it
        frontier.remove(last)
        inside.add(last)
        frontier.update(node for node in last.all_input_nodes if _scalar(program, node) is None)


def activation_of(program: Program, region: Region) -> Activation | None:
    """The activation that a region computes."""
    probes = _probes()
    try:
        found = _evaluate(program, region, probes)
    except (RuntimeError, TypeError, NotImplementedError):  # an op that float64 is not implemented for
        return None
    if found.shape != probes.shape or not bool(torch.isfinite(found).all()):
        return None
    named = next((known for known in _known() if _agree(found, _references()[known])), None)
    return named if named is not None else _scaled_silu(region, found)


def _scaled_silu(region: Region, found: Tensor) -> Activation | None:
    """`x * sigmoid(c x)` for some `c`, which some call quick gelu."""
    silu = aten.silu.default
    share = float(_at_one(found))
    if not 0.5 < share < 1 or any(node.target is silu for node in region.nodes):
        return None
    factor = float(f"{math.log(share / (1 - share)):.{DIGITS}g}")
    known = Activation(silu, (), lambda x: x * torch.sigmoid(factor * x), factor)
    return known if _agree(found, known.function(_probes())) else None


def _at_one(found: Tensor) -> Tensor:
    return found[int((_probes() - 1).abs().argmin())]


def _agree(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() <= TOLERANCE * other.abs().clamp(min=1)).all())


@cache
def _known() -> tuple[Activation, ...]:
    """The activations of the dialect with their default options, and gelu with both of its forms."""
    found = []
    for op in OPS:
        if op.family is not Family.ACTIVATION or op.curve is None or op.name == "clamp":
            continue
        usual = {row.name: row.default for row in arguments(op.target)[1:]}
        for options in ({}, {"approximate": "tanh"}) if op.name == "gelu" else ({},):
            curve = op.curve(**{**usual, **options})
            if curve is not None:
                found.append(Activation(op.target, tuple(options.items()), curve.function))
    return tuple(found)


@cache
def _references() -> dict[Activation, Tensor]:
    return {known: known.function(_probes()) for known in _known()}


@cache
def _probes() -> Tensor:
    """Numbers to try: dense around zero, where activations bend, sparse to both sides."""
    near = torch.linspace(-8, 8, 641, dtype=torch.float64)
    far = torch.linspace(-REACH, REACH, 97, dtype=torch.float64)
    return torch.cat([near, far, torch.tensor([1.0, 1e-3, -1e-3], dtype=torch.float64)])


def _evaluate(program: Program, region: Region, x: Tensor) -> Tensor:
    env: dict[fx.Node, Any] = {region.x: x}
    for node in region.nodes:
        for operand in node.all_input_nodes:
            if operand not in env and (scalar := _scalar(program, operand)) is not None:
                env[operand] = scalar.double() if scalar.is_floating_point() else scalar
        args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    found = env[region.nodes[-1]]
    return found if isinstance(found, Tensor) else torch.empty(0)


def _is_pointwise(program: Program, node: fx.Node) -> bool:
    """True for a deterministic elementwise op on float32 whose operands are tensors of its result's type, or one number."""
    target = node.target
    if not isinstance(target, OpOverload) or writes(target):
        return False
    is_elementwise = torch.Tag.pointwise in target.tags or Trait.ELEMENTWISE in traits_of(node)
    if not is_elementwise or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    kind = _type(node)
    operands = [operand for operand in node.all_input_nodes if _scalar(program, operand) is None]
    return kind is not None and kind[0] == torch.float32 and all(_type(operand) == kind for operand in operands)


def _type(node: fx.Node) -> tuple[Any, ...] | None:
    kind = tensor_type(node)
    return None if kind is None else (kind.dtype, kind.shape)


def _scalar(program: Program, node: fx.Node) -> Tensor | None:
    """A constant of one number that is not learned."""
    tensor = program.tensor(node)
    is_number = tensor is not None and tensor.numel() == 1 and not isinstance(tensor, nn.Parameter)
    return tensor.reshape(()) if tensor is not None and is_number else None
