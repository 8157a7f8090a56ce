"""The tensors that a quantized model hands from op to op: bytes with their grid, which look like the floats they stand
for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantc.kernels.engines import to_bytes

decomposed: Any = torch.ops.quantized_decomposed
CPU = torch.device("cpu")
"""Where kernels are."""


class Grid(NamedTuple):
    """What bytes stand for."""

    scale: float
    zero_point: int
    qmin: int
    qmax: int
    dtype: torch.dtype


class Traced(Tensor):
    """A tensor on its way through a quantized model.

    Either bytes on a grid, or the result of an op that waits for those it is fused with, or of one that was put off. Ops
    that are not quantized, and all code outside of the model, see the floats it stands for.
    """

    levels: Tensor | None = None
    grid: Grid | None = None
    plain: Tensor | None = None
    """The floats, once somebody has asked for them."""
    waiting: Waiting | None = None
    pending: Pending | None = None
    """What will give `levels`, or `plain` if there is no grid, as soon as somebody asks."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call_on_floats(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(floats_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return floats_of(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return floats_of(self).__reduce_ex__(protocol)


@dataclass(slots=True)
class Waiting:
    """An op inside of a fused one."""

    unit: Any
    call: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: dict[int, Any]
    """What the fused op has been given so far, by operand."""
    result: Any = None
    """What the fused op gave, once it ran."""


class Pending:
    """The result of an op that was put off. The queue does not hold it: if nobody else does, nobody can ask for it."""

    __slots__ = ("__weakref__", "body", "place", "queue", "value")

    def __init__(self, queue: Any, place: int, body: Tensor) -> None:
        self.queue = queue
        """What it waits in; None when it is there."""
        self.place = place
        """Which of the ops in the queue makes it."""
        self.body = body
        self.value: Tensor | None = None

    def now(self) -> Tensor:
        """The result itself: all that was put off is done."""
        queue = self.queue
        if queue is not None:
            queue.flush()
        if self.value is None:
            raise RuntimeError("what was put off was not done")
        return self.value


@lru_cache(maxsize=1024)
def body_for(shape: torch.Size) -> Tensor:
    """A tensor of a shape, without numbers: code that reads the memory of one that waits fails, and reads no zeros."""
    with torch.inference_mode(False):
        return torch.empty(shape, device="meta")


def on_grid(levels: Tensor, grid: Grid) -> Traced:
    """Bytes as what they stand for."""
    made = levels.as_subclass(Traced)
    made.levels, made.grid = levels, grid
    return made


def to_be_fused(shape: Tensor, waiting: Waiting) -> Traced:
    """The result of an op that is fused with others; `shape` has its shape."""
    made = shape.as_subclass(Traced)
    made.waiting = waiting
    return made


def to_come(pending: Pending, grid: Grid | None) -> Traced:
    """The result of an op that was put off: bytes, if there is a grid."""
    made = pending.body.as_subclass(Traced)
    made.pending, made.grid = pending, grid
    return made


def arrived(x: Traced) -> Traced:
    """The same tensor, with what it was waiting for if its op was put off."""
    pending = x.pending
    if pending is not None:
        if x.grid is None:
            x.plain = pending.now()
        else:
            x.levels = pending.now()
        x.pending = None
    return x


def become(old: Traced, new: Any) -> None:
    """Let a tensor that was written in place be what it is now."""
    if isinstance(new, Traced):
        old.levels, old.grid, old.plain, old.waiting = new.levels, new.grid, new.plain, new.waiting
        old.pending = new.pending
    else:
        old.levels, old.grid, old.plain, old.waiting, old.pending = None, None, new, None, None


def body_of(x: Any) -> Any:
    """A plain tensor of the same shape."""
    if type(x) is not Traced:
        return x.detach()
    return x.levels if x.pending is None else x.pending.body


def floats_of(x: Any) -> Any:
    """What a traced tensor stands for; anything else as it is."""
    if type(x) is not Traced:
        return x
    if arrived(x).plain is None:
        with torch._C.DisableTorchFunctionSubclass():
            x.plain = _floats(x)
    return x.plain


def _floats(x: Traced) -> Tensor:
    if x.levels is not None and x.grid is not None:
        made: Tensor = decomposed.dequantize_per_tensor(x.levels, *x.grid)
        return made.contiguous()
    waiting = x.waiting
    if waiting is None:
        raise RuntimeError("a traced tensor holds nothing")
    if waiting.unit.members[-1] == waiting.call and waiting.result is not None:
        return floats_of(waiting.result)  # type: ignore[no-any-return]
    # somebody looks at what lies inside of a fused op: it is computed by itself
    args, kwargs = on_floats((waiting.args, waiting.kwargs))
    if waiting.unit.writes_in_place(waiting.call):
        args = (args[0].clone(), *args[1:])
    return waiting.func(*args, **kwargs)  # type: ignore[no-any-return]


def on_floats(x: Any) -> Any:
    """Arguments, in whatever they are arranged, with floats for what traced tensors stand for."""
    kind = type(x)
    if kind is Traced:
        return floats_of(x)
    if kind is tuple or kind is list:
        return kind(map(on_floats, x))
    if kind is dict:
        return {key: on_floats(value) for key, value in x.items()}
    return x if kind in LEAVES else pytree.tree_map(floats_of, x)


LEAVES = frozenset(
    {Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size}
)
"""What holds no traced tensor. Trees of other kinds are known to torch, which takes longer to look into them."""


def float32_of(x: Any) -> Any:
    """What a kernel reads: autocast may have made it of another float type."""
    floats = floats_of(x)
    is_other = isinstance(floats, Tensor) and floats.is_floating_point() and floats.dtype is not torch.float32
    return floats.float() if is_other else floats


def levels_on(x: Any, grid: Grid) -> Tensor:
    """The bytes of a tensor on a grid: as they are, or rounded."""
    if type(x) is Traced and arrived(x).levels is not None and x.grid == grid:
        return x.levels  # type: ignore[return-value]
    floats = float32_of(x)
    held = getattr(floats, "_quantc_levels", None)
    if held is not None and held[0] == grid and held[1] == floats._version:
        return held[2]  # type: ignore[no-any-return]
    with torch._C.DisableTorchFunctionSubclass():
        levels: Tensor = rounded(floats, grid)
        if not floats.is_inference():
            floats._quantc_levels = (grid, floats._version, levels)
    return levels


def rounded(x: Tensor, grid: Grid) -> Tensor:
    """A float tensor on a grid, by the fastest kernel that rounds half to even."""
    if grid.dtype is torch.uint8 and (grid.qmin, grid.qmax) == (0, 255) and x.dtype is torch.float32:
        return to_bytes(x, grid.scale, grid.zero_point, torch.uint8)
    made: Tensor = decomposed.quantize_per_tensor(x, *grid)
    return made


QUERIES = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "storage_offset",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "element_size",
        "get_device",
        "__len__",
        "is_signed",
    ]
)
"""Calls that ask about a tensor without looking at its numbers."""
ATTRIBUTES = frozenset(
    [
        "shape",
        "ndim",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "is_cuda",
        "is_sparse",
        "is_quantized",
        "is_leaf",
        "is_meta",
        "is_mkldnn",
        "grad",
        "grad_fn",
        "names",
        "itemsize",
        "nbytes",
        "is_nested",
        "is_mps",
        "is_xpu",
        "is_cpu",
        "_version",
    ]
)


def is_query(func: Any) -> bool:
    """Whether a call asks about a tensor without looking at its numbers."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in ATTRIBUTES
    return name in QUERIES


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a query about a tensor comes to: a traced one looks like float32 in memory order, unless it was written over."""
    traced = args[0] if args else None
    if type(traced) is not Traced:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = func.__self__.__name__
    if name in ("shape", "ndim", "size", "dim", "ndimension", "numel", "nelement", "__len__", "layout"):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name == "dtype":
        is_plain = traced.plain is not None and traced.levels is None and traced.waiting is None
        return traced.plain.dtype if is_plain and traced.plain is not None else torch.float32
    if name == "device":
        return CPU
    if name == "requires_grad":
        return False
    return call_on_floats(func, args, kwargs)


def call_on_floats(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on what traced tensors stand for."""
    if is_query(func) and getattr(func, "__name__", "") != "__get__" and type(args[0]) is Traced:
        shape_only = func.__name__ in ("size", "dim", "ndimension", "numel", "nelement", "__len__")
        if shape_only:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
    first = args[0] if args else None
    plain_args, plain_kwargs = on_floats((args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        output = func(*plain_args, **plain_kwargs)
    if type(first) is Traced and _writes(func, plain_args, output):
        become(first, plain_args[0])
        return first if output is plain_args[0] else output
    return output


def _writes(func: Any, args: tuple[Any, ...], output: Any) -> bool:
    """Whether a call has changed its first argument."""
    name = getattr(func, "__name__", "")
    return output is args[0] or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
