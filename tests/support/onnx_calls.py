"""Calls of single ops, drawn at random from what their schemas allow, written for a runtime and run there.

Each call is held against torch: in float, or between Q/DQ pairs, with its inputs as arguments or as constants, with the
first size fixed or open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.ir.dialect import BY_NAME, op_name
from quantc.ir.types import tensor_type
from quantc.targets.onnx.onnx_export import Literal, export
from quantc.targets.onnx.op_writers import NoOnnxFormError
from quantc.targets.onnx.profiles import PROFILES
from quantc.targets.onnx.sessions import OnnxRuntime

RTOL, ATOL = 1e-4, 2e-5
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Draw:
    """Draws of arguments."""

    rng: Random

    def pick(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def chance(self, share: float = 0.5) -> bool:
        return self.rng.random() < share

    def size(self, low: int = 1, high: int = 5) -> int:
        return self.rng.randint(low, high)

    def shape(self, low: int = 0, high: int = 4, *, empty: bool = False) -> list[int]:
        """Sizes, one of which is often one, and rarely zero."""
        shape = [self.size(2) for _ in range(self.rng.randint(low, high))]
        if shape and self.chance(0.3):
            shape[self.rng.randrange(len(shape))] = 1
        if empty and shape and self.chance(0.05):
            shape[self.rng.randrange(len(shape))] = 0
        return shape

    def axis(self, rank: int) -> int:
        return self.rng.randint(-rank, rank - 1) if rank else self.pick(0, -1)

    def axes(self, rank: int, low: int = 1) -> list[int]:
        """Some axes, counted from the front or from the back."""
        found = self.rng.sample(range(rank), self.rng.randint(min(low, rank), rank))
        return [axis - rank if self.chance(0.4) else axis for axis in found]

    def broadcast(self, shape: Sequence[int]) -> list[int]:
        """Sizes that broadcast to these."""
        kept = list(shape[self.rng.randint(0, len(shape)) :]) if self.chance(0.3) else list(shape)
        return [1 if self.chance(0.3) else size for size in kept]

    def floats(self, shape: Sequence[int], *, positive: bool = False, infinite: bool = False) -> Tensor:
        """Numbers of one of several sizes, or on a grid, where ties are."""
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        x: Tensor = torch.randn(list(shape), generator=generator) * self.pick(0.01, 1.0, 1.0, 3.0, 30.0)
        if self.chance(0.3):
            x = (x * 2).round() / 2
        if positive:
            x = x.abs() + 0.1
        if infinite and self.chance(0.15) and x.numel():
            x.view(-1)[self.rng.randrange(x.numel())] = self.pick(torch.inf, -torch.inf)
        return x

    def ints(self, shape: Sequence[int], low: int = -9, high: int = 9, dtype: torch.dtype = torch.int64) -> Tensor:
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        return torch.randint(low, high + 1, list(shape), generator=generator).to(dtype)

    def bools(self, shape: Sequence[int]) -> Tensor:
        return self.ints(shape, 0, 1).bool()

    def numbers(self, shape: Sequence[int], *, infinite: bool = False) -> Tensor:
        """Floats, or integers."""
        kind = self.pick(*["float"] * 3, "int64", "int32")
        if kind == "float":
            return self.floats(shape, infinite=infinite)
        return self.ints(shape, dtype=getattr(torch, kind))


Drawer = Callable[[Draw], Arguments]
DRAWERS: dict[str, Drawer] = {}
"""By the name of the op."""
WEIGHTED: set[str] = set()
"""Ops with weights, whose first sizes are not that of a batch."""


def draws(*ops: str, weighted: bool = False) -> Callable[[Drawer], Drawer]:
    """Draw the arguments of ops in this way."""

    def add(drawer: Drawer) -> Drawer:
        WEIGHTED.update(ops if weighted else ())
        for op in ops:
            DRAWERS[op] = drawer
        return drawer

    return add


def target_of(name: str) -> Any:
    if name in BY_NAME:
        return BY_NAME[name].target
    space, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)


FIRST_ALONE = {"max_pool2d_with_indices", *(f"aten.adaptive_max_pool{count}d.default" for count in (1, 2, 3))}
"""Ops of which the first result alone has an ONNX form."""
ORDERING = {"topk", "aten.sort.default", "aten.argsort.default"}
"""Ops that leave open which of equals is first."""


class Calls(nn.Module):
    """One call of an op; the tensors among its arguments are inputs, or constants."""

    def __init__(self, op: str, arguments: Arguments, constants: set[int], scales: Scales | None) -> None:
        super().__init__()
        self.target, self.scales, self.takes_first = target_of(op), scales, op in FIRST_ALONE
        leaves, self.spec = pytree.tree_flatten(arguments)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.fixed = {place: leaf for place, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        self.given = [place for place in places if place not in constants]
        for place in places:
            if place in constants:
                self.register_buffer(f"constant_{place}", leaves[place].clone())
        self.count = len(leaves)

    def forward(self, *inputs: Tensor) -> Any:
        leaves: list[Any] = [None] * self.count
        for place in range(self.count):
            if place in self.fixed:
                leaves[place] = self.fixed[place]
            elif place in self.given:
                leaves[place] = self._quantized(inputs[self.given.index(place)], place)
            else:
                leaves[place] = getattr(self, f"constant_{place}")
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        made = self.target(*args, **kwargs)
        made = made[0] if self.takes_first else made
        return made if self.scales is None else pytree.tree_map(lambda y: self._quantized(y, -1), made)

    def _quantized(self, x: Any, place: int) -> Any:
        return x if self.scales is None else self.scales.rounded(x, place)


@dataclass(frozen=True)
class Scales:
    """Scale and zero point of each input by its place, and of what is yielded at -1; in uint8 or int8."""

    grids: dict[int, tuple[float, int]]
    is_signed: bool

    def rounded(self, x: Any, place: int) -> Any:
        """A float tensor, quantized and back; anything else as it is."""
        grid = self.grids.get(place)
        if grid is None or not isinstance(x, Tensor) or x.dtype is not torch.float32:
            return x
        ops, (scale, zero_point), shift = torch.ops.quantized_decomposed, grid, -128 if self.is_signed else 0
        bounds = (zero_point + shift, shift, 255 + shift, torch.int8 if self.is_signed else torch.uint8)
        return ops.dequantize_per_tensor(ops.quantize_per_tensor(x, scale, *bounds), scale, *bounds)


def grid_of(values: Sequence[Tensor]) -> tuple[float, int]:
    """An affine grid of uint8 over some numbers."""
    flat = torch.cat([value.flatten() for value in values])
    flat = flat[flat.isfinite()]
    low, high = (min(float(flat.min()), 0.0), max(float(flat.max()), 0.0)) if flat.numel() else (0.0, 1.0)
    scale = max((high - low) / 255, 2.0**-12)
    return float(torch.tensor(scale)), round(-low / scale)


@dataclass(frozen=True)
class Case:
    """A call that was drawn."""

    op: str
    arguments: Arguments
    constants: frozenset[int]
    is_quantized: bool
    is_open: bool
    is_raw: bool
    """Whether ops stay spelled as they are."""

    def __str__(self) -> str:
        def told(leaf: Any) -> Any:
            return f"{leaf.dtype}{list(leaf.shape)}".removeprefix("torch.") if isinstance(leaf, Tensor) else leaf

        args, kwargs = pytree.tree_map(told, self.arguments)
        how = [word for word, is_so in (("quantized", self.is_quantized), ("open", self.is_open)) if is_so]
        return f"{self.op}{args} {kwargs} {' '.join(how)} constants={sorted(self.constants)}"


def drawn(op: str, seed: int) -> Case:
    """A call of an op."""
    rng = Random(f"{op}/{seed}")
    arguments = DRAWERS[op](Draw(rng))
    tensors = [place for place, leaf in enumerate(pytree.tree_leaves(arguments)) if isinstance(leaf, Tensor)]
    constants = {place for place in tensors[1:] if rng.random() < 0.4}
    return Case(op, arguments, frozenset(constants), *(rng.random() < share for share in (0.35, 0.35, 0.2)))


@dataclass(frozen=True)
class Verdict:
    """What came of a call: "same", "refused" or "illegal", or else "wrong"; and the ops that were written."""

    kind: str
    told: str = ""
    ops: frozenset[str] = frozenset()


Running = Callable[[tuple[Tensor, ...]], list[Any]]
"""What a runtime makes of flat inputs: flat outputs."""


@dataclass(frozen=True)
class Runtime:
    """Where a program is run."""

    write: Callable[[qc.Program], Running]
    """RefusedError where it has no form there."""
    is_signed: bool = False
    """Whether its levels are int8."""


def _in_onnx_runtime(program: qc.Program) -> Running:
    exported = export(program, PROFILES["onnxruntime"])
    session = OnnxRuntime(exported.model.SerializeToString(), 1)

    def run(inputs: tuple[Tensor, ...]) -> list[Any]:
        found = session([inputs[index] for index in exported.inputs])
        return [place.value if isinstance(place, Literal) else found[place] for place in exported.outputs]

    return run


def _in_executorch(program: qc.Program) -> Running:
    from quantc.targets.executorch.executorch_lowering import as_pte

    made = as_pte(program)
    return lambda inputs: pytree.tree_leaves(made(*inputs))


ONNX_RUNTIME, EXECUTORCH = Runtime(_in_onnx_runtime), Runtime(_in_executorch, is_signed=True)


def verdict_of(case: Case, runtime: Runtime = ONNX_RUNTIME) -> Verdict:
    """Write a call, run it, and hold it against torch."""
    target = target_of(case.op)
    args, kwargs = case.arguments
    try:
        plain = pytree.tree_leaves(target(*args, **kwargs))
    except (RuntimeError, IndexError, ValueError) as error:
        return Verdict("illegal", str(error).splitlines()[0])
    leaves = pytree.tree_leaves(case.arguments)
    scales = _scales(leaves, plain, case, runtime.is_signed) if case.is_quantized else None
    if scales is not None:
        # inputs are on their grid: at ties ONNX Runtime, which divides by a scale, and torch, which multiplies by its
        # inverse, may go apart
        leaves = [scales.rounded(leaf, place) for place, leaf in enumerate(leaves)]
    module = Calls(case.op, case.arguments, set(case.constants), scales).eval()
    inputs = tuple(leaves[place] for place in module.given)
    open_sizes = _open(inputs, case.op) if case.is_open and inputs else None
    try:
        captured = qc.capture(module, inputs, "export", dynamic_shapes=open_sizes)
        program = captured if case.is_raw else qc.pipelines.inference().run_on_copy(captured)
        run = runtime.write(program)
    except NoOnnxFormError as error:
        is_checked = "onnx.checker" in error.what
        return Verdict("wrong" if is_checked else "refused", error.what if is_checked else str(error.where))
    except qc.QuantcError as error:
        return Verdict("refused", str(error).splitlines()[0])
    ops = frozenset(op_name(node) for node in program.graph.nodes)
    step = None if scales is None else scales.grids[-1][0]
    for given in [inputs] if case.op in ORDERING else _rounds(program, inputs):
        try:
            wanted = pytree.tree_leaves(module(*given))
        except RuntimeError:
            if given is inputs:
                raise
            continue  # another size, for which torch itself has no answer
        for left, right in zip(wanted, run(given), strict=True):
            if isinstance(left, Tensor) and (why := difference(left, right, step)):
                return Verdict("wrong", why, ops)
    return Verdict("same", "", ops)


def _scales(leaves: list[Any], plain: list[Any], case: Case, is_signed: bool) -> Scales:
    grids = {
        place: grid_of([leaf])
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.dtype is torch.float32 and place not in case.constants
    }
    floats = [y for y in plain if isinstance(y, Tensor) and y.dtype is torch.float32]
    return Scales({**grids, -1: grid_of(floats) if floats else (1.0, 0)}, is_signed)


def _open(inputs: tuple[Tensor, ...], op: str) -> Any:
    """The first size open: of the first input, and where the others are not weights, of those that have the same."""
    size = inputs[0].shape[0] if inputs[0].dim() else 0
    is_open = [
        size > 1 and x.dim() and x.shape[0] == size and (not place or op not in WEIGHTED)
        for place, x in enumerate(inputs)
    ]
    return (tuple({0: Dim.AUTO} if each else None for each in is_open),)


def _rounds(program: qc.Program, inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """The inputs, and where first sizes are open and one, the same with one more row."""
    nodes = list(program.graph.find_nodes(op="placeholder"))
    kinds = [tensor_type(node) for node in nodes[-len(inputs) :]] if inputs else []
    open_sizes = {kind.shape[0] for kind in kinds if kind is not None and kind.rank and isinstance(kind.shape[0], str)}
    if len(open_sizes) != 1 or not all(str(size).isalnum() for size in open_sizes):
        return [inputs]
    more = tuple(
        torch.cat([x, x[:1]]) if kind is not None and kind.rank and isinstance(kind.shape[0], str) else x
        for x, kind in zip(inputs, kinds, strict=True)
    )
    return [inputs, more]


def difference(wanted: Tensor, found: Tensor, step: float | None) -> str | None:
    """How a result differs from what it should be; None if it does not."""
    if wanted.dtype != found.dtype or wanted.shape != found.shape:
        return f"{found.dtype}{list(found.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
    if not wanted.is_floating_point():
        return None if torch.equal(wanted, found) else f"{found.tolist()} instead of {wanted.tolist()}"
    room = ATOL if step is None else step * 1.001
    is_close = torch.isclose(found, wanted, rtol=RTOL, atol=room, equal_nan=True)
    if bool(is_close.all()):
        return None
    place = int((~is_close).flatten().nonzero()[0])
    return f"{found.flatten()[place]} instead of {wanted.flatten()[place]} at {place}, step {step}"
