"""Recognition of activations that are written by hand: `x * clamp(x + 3, 0, 6) / 6` is `hardswish`, however it is spelled.

A region of arithmetic with one input is a function of one number, whatever its spelling. So it is evaluated in float64,
and compared with the reference of each activation of the dialect: at numbers of every magnitude, around each constant of
the region, and at the infinities. The two may differ by what rounding of the region's own results makes of its result,
and where the region yields nan because float32 overflows. A region with an op that does next to nothing, such as `+ 1e-7`, is
something else: what reads it may depend on that op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.node import map_arg

from quantc.ir.dialect import OPS, arguments, aten, row_of, writes
from quantc.ir.graph_tree import attribute
from quantc.ir.op_row import Family
from quantc.ir.program import Program
from quantc.ir.types import tensor_type

MAX_NODES = 16
"""Maximum number of ops of an activation."""
RESEMBLANCE = 1e-4
"""Relative to the result, and to 1: activations that differ by more are not compared closely."""
ROUNDING = 5e-7
"""Relative, of each op's result: constants are often written with seven digits."""
MAX_NOISE = 1e-5
"""Of the rounding of a region, relative to the input, the result and 1: `(x + 2**23) - 2**23` rounds on purpose."""
REACH = 60.0
"""A region yields finite numbers up to this magnitude; the exponential of larger ones overflows float32."""
EXTREME = 1e30
"""Finite numbers are tried up to this magnitude."""
MAX_CONSTANTS = 12
ARITHMETIC = frozenset(
    {
        *("abs", "add", "clamp_max", "clamp_min", "div", "erf", "exp", "expm1", "hardtanh", "log", "log1p"),
        *("maximum", "minimum", "mul", "neg", "pow", "reciprocal", "relu6", "rsub", "square", "sub"),
    }
)
"""Ops of an activation, beside the activations themselves."""
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
    named = next((known for known in _known() if _resembles(found, _references()[known])), None)
    candidate = named if named is not None else _scaled_silu(region, found)
    return candidate if candidate is not None and _computes(program, region, candidate) else None


def _scaled_silu(region: Region, found: Tensor) -> Activation | None:
    """`x * sigmoid(c x)` for some `c`, which some call quick gelu."""
    silu = aten.silu.default
    share = float(found[int((_probes() - 1).abs().argmin())])
    if not 0.5 < share < 1 or any(node.target is silu for node in region.nodes):
        return None
    factor = float(f"{math.log(share / (1 - share)):.{DIGITS}g}")
    known = Activation(silu, (), lambda x: x * torch.sigmoid(factor * x), factor)
    return known if _resembles(found, known.function(_probes())) else None


def _resembles(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() <= RESEMBLANCE * other.abs().clamp(min=1)).all())


def _computes(program: Program, region: Region, known: Activation) -> bool:
    """True if a region is an activation everywhere, and each of its ops is needed for that."""
    x = torch.cat([_everywhere(), _around(_constants(program, region))])
    found, reference = _evaluate(program, region, x), known.function(x).reshape(x.shape)
    noise = torch.full_like(x, torch.finfo(torch.float32).tiny)
    for node in region.nodes:
        up, down = (_evaluate(program, region, x, {node: change}) for change in (_round_up, _round_down))
        noise += torch.maximum(*((moved - found).abs().nan_to_num(0.0, posinf=0.0) for moved in (up, down)))
    scale = torch.stack([x.abs(), reference.abs(), torch.ones_like(x)]).amax(0)
    if bool((noise > MAX_NOISE * scale).any()) or not _agree(found, reference, noise, x):
        return False
    for node in region.nodes:
        for operand in _inner(program, node):
            bypassed = _evaluate(program, region, x, {node: operand})
            if _agree(bypassed, reference, noise, x) and not _same(bypassed, found):
                return False
    return True


def _round_up(y: Tensor) -> Tensor:
    return y * (1 + ROUNDING)


def _round_down(y: Tensor) -> Tensor:
    return y * (1 - ROUNDING)


def _agree(found: Tensor, reference: Tensor, noise: Tensor, x: Tensor) -> bool:
    overflows = found.isnan() & ~(x.abs() <= REACH)
    return bool(((found == reference) | ((found - reference).abs() <= noise) | overflows).all())


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(0.0), other.nan_to_num(0.0)) and torch.equal(one.isnan(), other.isnan())


def _inner(program: Program, node: fx.Node) -> list[fx.Node]:
    """The operands of a node that depend on the input."""
    return [operand for operand in node.all_input_nodes if _scalar(program, operand) is None]


def _constants(program: Program, region: Region) -> list[float]:
    found: dict[float, None] = {}
    for node in region.nodes:
        scalars = (_scalar(program, operand) for operand in node.all_input_nodes)
        literals = (value for value in (*node.args, *node.kwargs.values()) if isinstance(value, int | float))
        for value in (*literals, *(float(scalar) for scalar in scalars if scalar is not None)):
            found[abs(float(value))] = None
    return [value for value in found if value and math.isfinite(value)]


def _around(constants: list[float]) -> Tensor:
    """Numbers at and beside constants, their sums, differences and quotients."""
    own = torch.tensor(constants[:MAX_CONSTANTS], dtype=torch.float64)
    one, other = own[:, None], own[None]
    pairs = [(one + other).flatten(), (one - other).flatten(), (one / other).flatten()]
    rest = torch.tensor(constants[MAX_CONSTANTS:], dtype=torch.float64)
    places = torch.cat([own, rest, *pairs, 1 / own])
    beside = torch.tensor([1.0, 1 - 1e-6, 1 + 1e-6, 1 - 1e-3, 1 + 1e-3, 2.0], dtype=torch.float64)
    near = torch.cat([(places[:, None] * beside).flatten(), places + 1, places - 1])
    return torch.cat([near, -near])


@cache
def _everywhere() -> Tensor:
    """Numbers of every magnitude and of no grid, zero, the infinities and nan."""
    generator = torch.Generator().manual_seed(0)
    near = torch.rand(1500, generator=generator, dtype=torch.float64) * 20 - 10
    steps = torch.rand(1200, generator=generator, dtype=torch.float64) * 2 - 1
    far = 10 ** (steps * math.log10(EXTREME))
    middle = 10 ** (steps * 4)
    ends = torch.tensor([0.0, 1e4, EXTREME, math.inf], dtype=torch.float64)
    special = torch.tensor([math.nan], dtype=torch.float64)
    return torch.cat([near, far, -far, middle, -middle, ends, -ends, special, _probes()])


@cache
def _known() -> tuple[Activation, ...]:
    """The activations of the dialect with their default options, and gelu with both of its forms."""
    found = []
    for op in OPS:
        if op.family is not Family.ACTIVATION or op.curve is None:
            continue
        usual = {row.name: row.default for row in arguments(op.target)[1:]}
        if usual and all(value is None for value in usual.values()):
            continue  # it does nothing without its bounds
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


Change = Callable[[Tensor], Tensor] | fx.Node


def _evaluate(program: Program, region: Region, x: Tensor, changes: Mapping[fx.Node, Change] | None = None) -> Tensor:
    """The result of a region, with the results of some nodes changed, or another's in their place."""
    env: dict[fx.Node, Any] = {region.x: x}
    for node in region.nodes:
        for operand in node.all_input_nodes:
            if operand not in env and (scalar := _scalar(program, operand)) is not None:
                env[operand] = scalar.double() if scalar.is_floating_point() else scalar
        args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        if (change := (changes or {}).get(node)) is not None:
            env[node] = env[change] if isinstance(change, fx.Node) else change(env[node])
    found = env[region.nodes[-1]]
    return found if isinstance(found, Tensor) else torch.empty(0)


def _is_pointwise(program: Program, node: fx.Node) -> bool:
    """True for arithmetic on float32 whose operands are tensors of its result's type, or one number."""
    if not _is_arithmetic(node):
        return False
    kind = _type(node)
    return (
        kind is not None
        and kind[0] == torch.float32
        and all(_type(operand) == kind for operand in _inner(program, node))
    )


def _is_arithmetic(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or writes(target):
        return False
    name = target._schema.name.partition("::")[2]
    if name == "pow":
        exponent = node.args[-1]
        return isinstance(exponent, int | float) and float(exponent).is_integer()
    is_activation = (row := row_of(node)) is not None and row.family is Family.ACTIVATION
    return (is_activation or name in ARITHMETIC) and node.kwargs.get("rounding_mode") is None


def _type(node: fx.Node) -> tuple[Any, ...] | None:
    kind = tensor_type(node)
    return None if kind is None else (kind.dtype, kind.shape)


def _scalar(program: Program, node: fx.Node) -> Tensor | None:
    """A constant of one number that stays what it is: neither learned nor loaded with the model's state."""
    tensor = program.tensor(node)
    if tensor is None or tensor.numel() != 1 or isinstance(tensor, nn.Parameter):
        return None
    parent, _, leaf = str(node.target).rpartition(".")
    holder = attribute(program.owner(node.graph), parent) if parent else program.owner(node.graph)
    is_saved = (
        isinstance(holder, nn.Module) and leaf in holder._buffers and leaf not in holder._non_persistent_buffers_set
    )
    return None if is_saved else tensor.reshape(())
