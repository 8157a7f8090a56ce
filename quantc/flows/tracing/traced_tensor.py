"""Tensors between the ops of a quantized model: an immutable value, and floats on demand (lazy evaluation).

A value is bytes on a grid, or an intermediate result of a fused op; quantized ops read it. All other code gets the floats,
made once, in memory of their own. The value is valid until that memory may have been written to: while torch's version counter
has not moved, and no alias of the memory was handed out. From then on the tensor is its floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._C import _autograd
from torch.utils import _pytree as pytree

from quantc.errors import InputError
from quantc.flows.tracing.functions import SHAPES, hands_out_memory, is_query, name_of, says_it_writes
from quantc.targets.kernels.packing import to_bytes

decomposed: Any = torch.ops.quantized_decomposed
CPU = torch.device("cpu")
"""The device of the kernels."""


class Grid(NamedTuple):
    """The qparams, range and dtype of quantized levels."""

    scale: float
    zero_point: int
    qmin: int
    qmax: int
    dtype: torch.dtype


class Value(Protocol):
    """The form in which quantized ops read a traced tensor. Its parts are never written to."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the floats."""
        ...

    @property
    def shape(self) -> torch.Size: ...

    def floats(self) -> Tensor:
        """The numbers, in new memory."""
        ...


@dataclass(slots=True, eq=False)
class Levels:
    """Bytes on a grid."""

    levels: Tensor
    grid: Grid
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.levels.shape

    def floats(self) -> Tensor:
        made: Tensor = decomposed.dequantize_per_tensor(self.levels, *self.grid).contiguous()
        return made if self.dtype is torch.float32 else made.to(self.dtype)


class Escapes:
    """Counter of exposed memory in a call of a model: writes through it bypass torch's version counters."""

    count = 0


class Buffer:
    """The floats of a traced tensor."""

    __slots__ = ("count", "escapes", "floats", "version")

    def __init__(self, floats: Tensor, escapes: Escapes | None = None) -> None:
        if floats.is_inference():  # torch does not count what is written to it
            with torch.inference_mode(False):
                floats = floats.clone()
        self.floats, self.version = floats, floats._version
        self.escapes = escapes
        """For memory that is the user's own: who knows whether any was handed out."""
        self.count = 0 if escapes is None else escapes.count

    @property
    def is_intact(self) -> bool:
        """True if it was not written to since."""
        return self.floats._version == self.version and (self.escapes is None or self.escapes.count == self.count)


class Traced(Tensor):
    """A tensor on its way through a quantized model.

    Ops that are not quantized, and all code outside of the model, see the floats it stands for. Its own memory lies on the
    meta device: code that reads it behind torch's back fails, and reads neither bytes nor zeros.
    """

    _quantc_value: Value | None = None
    _quantc_buffer: Buffer | None = None
    _quantc_root: Traced | None = None
    """The base of a view of floats, if that has a value. Access to the memory of one is access to both."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return answer(func, args, kwargs or {}) if is_query(func) else call_on_floats(func, args, kwargs or {})

    def as_subclass(self, cls: Any) -> Any:
        """The floats as another class: torch itself would take the memory, without asking."""
        return release(self).as_subclass(cls)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Other memory for the floats; torch itself would take the tensor's own, without asking."""
        return call_on_floats(Tensor.set_, (self, *args), kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(floats_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return floats_of(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return floats_of(self).__reduce_ex__(protocol)


BODIES: dict[torch.Size, Tensor] = {}
MAX_BODIES = 256


def make_traced(value: Value, buffer: Buffer | None = None) -> Traced:
    """A tensor that has a value."""
    made = _body(value.shape)
    made._quantc_value = value
    if buffer is not None:
        made._quantc_buffer = buffer
    return made


def _body(shape: torch.Size) -> Traced:
    body = BODIES.get(shape)
    if body is None:
        if len(BODIES) >= MAX_BODIES:
            BODIES.clear()
        with torch.inference_mode(False):
            body = BODIES[shape] = torch.empty(shape, device="meta")
    return body.as_subclass(Traced)


def value_of(x: Any) -> Value | None:
    """The value of a traced tensor for quantized ops; None if its floats are the only form."""
    if type(x) is not Traced:
        return None
    buffer = x._quantc_buffer
    if buffer is not None and x._quantc_value is not None and not buffer.is_intact:
        x._quantc_value = None
    return x._quantc_value


def floats_of(x: Any) -> Any:
    """The floats of a traced tensor; anything else unchanged. Callers that expose the memory must say so: see `released`."""
    if type(x) is not Traced:
        return x
    if x._quantc_buffer is None:
        if x._quantc_value is None:
            raise RuntimeError("a traced tensor holds nothing")
        with torch._C.DisableTorchFunction():
            made = Buffer(x._quantc_value.floats())
        vars(x).setdefault("_quantc_buffer", made)  # two threads may look at once, and must see one memory
    return x._quantc_buffer.floats  # type: ignore[union-attr]


def release(x: Any) -> Any:
    """The floats of a traced tensor, for code that may do with them what it likes: from now on the tensor is its floats."""
    made = floats_of(x)
    if type(x) is Traced:
        _owner(x)._quantc_value = None
    return made


def _owner(x: Traced) -> Traced:
    return x if x._quantc_root is None else x._quantc_root


def on_floats(x: Any, of: Callable[[Any], Any] = release) -> Any:
    """Arguments, in any pytree, with floats in place of traced tensors."""
    kind = type(x)
    if kind is Traced:
        return of(x)
    if kind is tuple or kind is list:
        return kind([on_floats(row, of) for row in x])
    if kind is dict:
        return {key: on_floats(row, of) for key, row in x.items()}
    return x if kind in LEAVES else pytree.tree_map(of, x)


LEAVES = frozenset(
    {Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size}
)
"""Types that hold no traced tensor. Other kinds of trees go through pytree, which is slower."""


def handed_over(output: Any) -> Any:
    """The result of a model as its caller gets it: floats."""
    kind = type(output)
    if kind is tuple or kind is list:
        return kind(map(handed_over, output))
    if kind is dict:
        return {key: handed_over(value) for key, value in output.items()}
    if is_dataclass(output) and kind not in pytree.SUPPORTED_NODES and not isinstance(output, type):
        for row in fields(output):
            object.__setattr__(output, row.name, handed_over(getattr(output, row.name)))
        return output
    floats = on_floats(output)
    if isinstance(floats, Tensor) and floats.is_meta:
        raise without_numbers("was read")
    return floats


def call_on_floats(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on the floats of traced tensors. A view of their memory becomes a traced tensor too, so that all access is
    tracked. If any other result exposes the memory, the tensors are their floats from then on."""
    given: list[Traced] = []

    def noted(x: Any) -> Any:
        if type(x) is Traced:
            given.append(x)
        return floats_of(x)

    plain_args, plain_kwargs = on_floats((args, kwargs), noted)
    output, view, escapes = None, None, True
    try:
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*plain_args, **plain_kwargs)
        # torch counts what most functions write, and not what all do
        escapes = hands_out_memory(func) or says_it_writes(func, kwargs)
    finally:
        for x in given:
            owner = _owner(x)
            if owner._quantc_value is not None and x._quantc_buffer is not None:
                if not escapes and _is_view(output, x._quantc_buffer.floats):
                    view = owner
                elif escapes or _reaches(output, x._quantc_buffer.floats):
                    owner._quantc_value = None
    if not isinstance(output, Tensor):
        return output
    for x in given:
        if x._quantc_buffer is not None and x._quantc_buffer.floats is output:
            return x
    if view is None or view._quantc_value is None:
        return with_numbers(output, plain_args)
    made = _body(output.shape)
    made._quantc_buffer, made._quantc_root = Buffer(output), view
    return made


HARMLESS = frozenset({int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.Size, torch.layout})
"""Types through which no tensor can be written to."""
VERSIONS: Any = _autograd


def _is_view(output: Any, floats: Tensor) -> bool:
    """True if a result is a view of floats and shares their version counter."""
    if type(output) is not Tensor or output is floats or not _reaches(output, floats) or output.is_inference():
        return False
    ours, theirs = floats._version, output._version
    VERSIONS._unsafe_set_version_counter((floats,), (ours + 1,))
    is_one = output._version == theirs + 1
    VERSIONS._unsafe_set_version_counter((floats,), (ours,))
    return is_one


def _reaches(output: Any, floats: Tensor) -> bool:
    """True if floats could be written to through a result."""
    if type(output) is Tensor:
        if output is floats:  # the traced tensor is given instead
            return False
        is_plain = output.layout is torch.strided and not output.is_meta
        return not is_plain or output.untyped_storage().data_ptr() == floats.untyped_storage().data_ptr()
    if isinstance(output, tuple | list) and type(output) is not torch.Size:
        return any(row is floats or _reaches(row, floats) for row in output)
    return type(output) not in HARMLESS


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a metadata query: a traced tensor looks like contiguous floats, unless it was written to."""
    x = args[0] if args else None
    if type(x) is not Traced:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    value = x._quantc_value if x._quantc_buffer is None else None
    if value is not None:
        name = name_of(func)
        if name in SHAPES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "dtype":
            return value.dtype
        if name == "device":
            return CPU
        if name == "requires_grad" and type(value) is Levels:
            return False
    return call_on_floats(func, args, kwargs)


def float32_of(x: Any) -> Tensor:
    """The float32 operand of a kernel: autocast may have produced another float type."""
    floats: Tensor = x.floats() if type(x) is Levels else floats_of(x)
    if floats.is_meta:
        raise without_numbers("was read")
    if floats.requires_grad and torch.is_grad_enabled():
        raise without_gradients()
    return floats.float() if floats.is_floating_point() and floats.dtype is not torch.float32 else floats


def levels_on(x: Any, grid: Grid) -> Levels:
    """A tensor or a value on a grid: as it is, or rounded."""
    value = x if type(x) is Levels else value_of(x)
    if type(value) is Levels and value.grid == grid:
        return value
    return Levels(round_to_grid(float32_of(x if value is None else value), grid), grid)


def round_to_grid(x: Tensor, grid: Grid) -> Tensor:
    """A float tensor on a grid, by the fastest kernel that rounds half to even."""
    with torch._C.DisableTorchFunctionSubclass():
        if grid.dtype is torch.uint8 and (grid.qmin, grid.qmax) == (0, 255) and x.dtype is torch.float32:
            return to_bytes(x, grid.scale, grid.zero_point, torch.uint8)
        made: Tensor = decomposed.quantize_per_tensor(x, *grid)
        return made


def copy_elements(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call that copies elements: on bytes, if all operands are on one grid and their floats were never read; else on floats."""
    pieces = args[0] if args and type(args[0]) in (tuple, list) else args[:1]
    values = [value_of(piece) for piece in pieces]
    grids = {value.grid for value in values if type(value) is Levels and value.dtype is torch.float32}
    rest = pytree.tree_leaves((args[1:], kwargs))
    is_alike = len(grids) == 1 and all(type(value) is Levels for value in values)
    if not is_alike or any(isinstance(leaf, Tensor) for leaf in rest):
        return call_on_floats(func, args, kwargs)
    levels = [value.levels for value in values if type(value) is Levels]
    with torch._C.DisableTorchFunctionSubclass():
        made = func(levels if pieces is args[0] else levels[0], *args[1:], **kwargs)
    return make_traced(Levels(made, grids.pop()))


def with_numbers(output: Any, args: tuple[Any, ...]) -> Any:
    """The result of a function; refused if it was computed from the meta tensor behind a traced one, past interception."""
    if isinstance(output, Tensor) and output.is_meta and args and isinstance(args[0], Tensor) and args[0].is_meta:
        raise without_numbers("was read or written to")
    return output


def without_numbers(what: str) -> InputError:
    """The error for code that has taken what stands for a tensor for the tensor itself."""
    return InputError(
        f"a tensor {what} by code that goes past torch's functions, as torch.vmap and extensions in C++ do",
        where="a model of the dynamic tracing flow",
        advice="give that code a tensor of its own: x.clone()",
    )


def without_gradients() -> InputError:
    """The error for a tensor that asks for gradients: a kernel gives none, and what others give would lack its part."""
    return InputError(
        "a quantized op reads a tensor that asks for gradients, and kernels have none",
        where="a converted model, called where gradients are enabled",
        advice="call it under torch.no_grad(); or leave float, with a config, the layers that the model itself differentiates",
    )
