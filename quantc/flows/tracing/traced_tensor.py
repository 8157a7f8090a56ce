"""The tensors that a quantized model hands from op to op: bytes with their grid, which look like the floats they stand
for.

Whoever looks at the floats may write to them, and to whatever shares their memory. So they are made once; torch counts what is
written to them, and as soon as it has counted something the floats are what the tensor is. Moves of bytes that would be
views of floats become just that, all of them, when the floats of one are looked at.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantc.capture.stamps import is_tracked
from quantc.flows.tracing.bodies import body_for, with_numbers, without_gradients, without_numbers
from quantc.flows.tracing.queries import SHAPES, hands_out_memory, is_query, name_of
from quantc.kernels.engines import to_bytes

decomposed: Any = torch.ops.quantized_decomposed
CPU = torch.device("cpu")
"""Where kernels are."""
HANDED_OUT = threading.local()
"""`memory`: whether, in the call of a model that this thread is in, memory was handed out that torch does not watch."""


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
    that are not quantized, and all code outside of the model, see the floats it stands for. Its own memory lies on the meta
    device: code that reads it behind torch's back fails, and reads neither bytes nor zeros.
    """

    levels: Tensor | None = None
    grid: Grid | None = None
    plain: Tensor | None = None
    """The floats, once somebody has asked for them."""
    version: int = 0
    """How much was written to the floats when all else was last known to agree with them."""
    waiting: Waiting | None = None
    pending: Pending | None = None
    """What will give `levels`, or `plain` if there is no grid, as soon as somebody asks."""
    shared: Shared | None = None
    """The tensors whose floats share their memory with this one's."""
    view_of: tuple[Traced, Callable[[Tensor], Tensor]] | None = None
    """The tensor that it is a view of, and what makes it of the floats of that."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call_on_floats(func, args, kwargs or {})

    def as_subclass(self, cls: Any) -> Any:
        """The floats as another class: torch itself would take the memory, without asking."""
        return floats_of(self).as_subclass(cls)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Other memory for the floats; torch itself would take the tensor's own, without asking."""
        return call_on_floats(Tensor.set_, (self, *args), kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(floats_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return floats_of(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return floats_of(self).__reduce_ex__(protocol)


class Light(Traced):
    """The result of a call that came again just as before, so that it was not worked out: see `following`. It becomes a traced
    tensor as soon as anybody does more with it than to make the next such call."""

    follower: Any = None
    """Who knows what it is."""


class Kept:
    """What a tensor was at a time, whatever is written to it later."""

    __slots__ = ("grid", "levels", "pending", "plain", "waiting")

    def __init__(self, x: Traced) -> None:
        self.levels, self.grid, self.waiting, self.pending = x.levels, x.grid, x.waiting, x.pending
        self.plain: Tensor | None = None


CARRIERS = frozenset({Traced, Kept})
"""What may be bytes, or wait for some."""


@dataclass(slots=True)
class Waiting:
    """An op inside of a fused one."""

    unit: Any
    call: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    """As they were when it was called."""
    kwargs: dict[str, Any]
    operands: dict[int, Any]
    """What the fused op has been given so far, by operand."""
    result: Done | None
    """What the fused op gave, once it ran."""
    done: int
    """The calls of the fused op that led here, one bit each."""


class Done:
    """The result of a fused op, for those of its calls that are still to come."""

    __slots__ = ("body", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        """Nobody else has it."""
        self.body = body_of(value)
        """What has its shape."""

    def take(self) -> Any:
        """The result, as a tensor that is written to by nobody who took another."""
        return twin(self.value) if type(self.value) is Traced else self.value.clone()


class Pending:
    """The result of an op that was put off. The queue does not hold it: if nobody else does, nobody can ask for it."""

    __slots__ = ("__weakref__", "body", "is_several", "place", "queue", "value")

    def __init__(self, queue: Any, place: int, body: Tensor) -> None:
        self.queue = queue
        """What it waits in; None when it is there."""
        self.place = place
        """Which of the ops in the queue makes it."""
        self.body = body
        self.value: Tensor | None = None
        self.is_several = False
        """Whether it is the value of several tensors, each of which must have floats of its own."""

    def now(self) -> Tensor:
        """The result itself: all that was put off is done."""
        queue = self.queue
        if queue is not None:
            queue.flush()
        if self.value is None:
            raise RuntimeError("what was put off was not done")
        return self.value


class Shared:
    """Tensors whose floats would share their memory. They do as soon as the floats of one are looked at."""

    __slots__ = ("ground", "members")

    def __init__(self, root: Traced) -> None:
        self.ground = Kept(root)
        self.ground.plain = root.plain
        self.members = [weakref.ref(root)]
        """In the order in which they were made: a view comes after what it is a view of, and holds it."""

    def surface(self) -> None:
        """Give each of them its floats, on one memory."""
        ground = floats_of(self.ground)
        for member in self.living:
            if member.plain is None:
                _take_floats(member, ground if member.view_of is None else _viewed(member.view_of))

    @property
    def living(self) -> list[Traced]:
        return [member for ref in list(self.members) if (member := ref()) is not None]


def _viewed(view_of: tuple[Traced, Callable[[Tensor], Tensor]]) -> Tensor:
    parent, view = view_of
    with torch._C.DisableTorchFunction():
        return view(floats_of(parent))


def is_view(x: Traced, made: Traced, view: Callable[[Tensor], Tensor]) -> None:
    """Write down that a tensor would be a view of another if both were floats."""
    shared = x.shared
    if shared is None:
        shared = x.shared = Shared(x)
    made.shared, made.view_of = shared, (x, view)
    shared.members.append(weakref.ref(made))
    if x.plain is not None:
        _take_floats(made, _viewed(made.view_of))


def on_grid(levels: Tensor, grid: Grid) -> Traced:
    """Bytes as what they stand for."""
    made = body_for(levels.shape).as_subclass(Traced)
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


def twin(x: Traced) -> Traced:
    """Another tensor with the same numbers, to which nothing is written that is written to the first."""
    if x.grid is None and x.waiting is None and x.pending is None:
        floats = floats_of(x)
        made: Traced = body_for(floats.shape).as_subclass(Traced)
        made.plain = floats.clone()
        return made
    made = body_of(x).as_subclass(Traced)
    made.levels, made.grid, made.waiting, made.pending = x.levels, x.grid, x.waiting, x.pending
    if x.pending is not None and x.grid is None:
        x.pending.is_several = True
    return made


def kept(x: Any) -> Any:
    """What an argument is now, for who reads it later."""
    if type(x) is not Traced:
        return x.clone() if isinstance(x, Tensor) and not isinstance(x, torch.nn.Parameter) else x
    if x.grid is None and x.waiting is None:
        if x.pending is None:
            return floats_of(x).clone()
        x.pending.is_several = True
    return Kept(x)


def handed_over(output: Any) -> Any:
    """What a model gives to its caller: floats."""
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


def arrived(x: Any) -> Any:
    """The same tensor, with what it was waiting for if its op was put off."""
    if x.pending is not None:
        if x.grid is None:
            floats_of(x)
        else:
            x.levels = x.pending.now()
        x.pending = None
    return x


def current(x: Traced) -> Traced:
    """The same tensor as it is now: its floats, if somebody has written to them."""
    if type(x) is Light:  # of another run
        x.follower.settle()
    plain = x.plain
    if plain is None or (x.grid is None and x.waiting is None):
        return x
    if plain._version != x.version or getattr(HANDED_OUT, "memory", True) or not is_tracked(plain):
        stays_float(x)
    return x


def stays_float(x: Traced) -> None:
    """From now on a tensor is its floats."""
    floats_of(x)
    x.levels = x.grid = x.waiting = x.pending = None


def become(old: Traced, new: Any) -> None:
    """Let a tensor that nobody has looked at be what an op has made of it in place."""
    old.version += 1
    if type(new) is Traced:
        old.levels, old.grid, old.waiting, old.pending = new.levels, new.grid, new.waiting, new.pending
        if new.plain is not None:
            old.plain, old.version = new.plain, new.version
    else:
        old.levels, old.grid, old.waiting, old.pending = None, None, None, None
        old.plain = new


def written(x: Any, output: Any) -> Any:
    """An op has computed what a tensor is to be that it writes to in place. Gives that tensor."""
    if output is x:
        return x
    if type(x) is Traced and x.plain is None and x.shared is None:
        become(x, output)
        return x
    with torch._C.DisableTorchFunctionSubclass():
        floats_of(x).copy_(floats_of(output))
    if type(x) is Traced:
        stays_float(x)
    return x


def body_of(x: Any) -> Tensor:
    """What has the shape of a tensor, and no numbers."""
    if type(x) is not Traced:
        return body_for(x.shape)
    if x.pending is not None:
        return x.pending.body
    return body_for(x.levels.shape if x.levels is not None else floats_of(x).shape)


def floats_of(x: Any) -> Any:
    """What a traced tensor stands for; anything else as it is."""
    kind = type(x)
    if kind is Light:
        x.follower.settle()
        kind = Traced
    if kind is not Traced and kind is not Kept:
        return x
    if x.plain is None:
        if kind is Traced and x.shared is not None:
            x.shared.surface()
        else:
            with torch._C.DisableTorchFunction():
                floats = _floats(x)
            if kind is Traced:
                _take_floats(x, floats)
            else:
                x.plain = floats
    return x.plain


def _take_floats(x: Traced, floats: Tensor) -> None:
    if x.grid is None and x.waiting is None:
        vars(x).setdefault("plain", floats)  # two threads may look at once, and must see one memory
        x.pending = None
    else:
        if floats.is_inference():  # torch does not count what is written to it
            with torch.inference_mode(False):
                floats = floats.clone()
        x.version = floats._version
        vars(x).setdefault("plain", floats)


def _floats(x: Traced | Kept) -> Tensor:
    """The numbers, in memory of their own, for which torch counts what is written if there are other forms of them."""
    pending = x.pending
    if x.grid is not None:
        levels = x.levels if pending is None else pending.now()
        if not torch.is_inference_mode_enabled():
            return decomposed.dequantize_per_tensor(levels, *x.grid).contiguous()  # type: ignore[no-any-return]
        with torch.inference_mode(False):
            return decomposed.dequantize_per_tensor(levels, *x.grid).contiguous()  # type: ignore[no-any-return]
    if pending is not None:
        return pending.now().clone() if pending.is_several else pending.now()
    waiting = x.waiting
    if waiting is None:
        raise RuntimeError("a traced tensor holds nothing")
    # somebody looks at what lies inside of a fused op: it is computed by itself
    args, kwargs = on_floats((waiting.args, waiting.kwargs))
    if waiting.unit.writes_in_place(waiting.call):
        args = (args[0].clone(), *args[1:])
    return waiting.func(*args, **kwargs)  # type: ignore[no-any-return]


def on_floats(x: Any) -> Any:
    """Arguments, in whatever they are arranged, with floats for what traced tensors stand for."""
    kind = type(x)
    if kind is Traced or kind is Kept or kind is Light:
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
    if isinstance(floats, Tensor):
        if floats.is_meta:
            raise without_numbers("was read")
        if floats.requires_grad and torch.is_grad_enabled():
            raise without_gradients()
        if floats.is_floating_point() and floats.dtype is not torch.float32:
            return floats.float()
    return floats


def levels_on(x: Any, grid: Grid) -> Tensor:
    """The bytes of a tensor on a grid: as they are, or rounded."""
    if type(x) in CARRIERS and x.grid == grid and arrived(x).levels is not None:
        return x.levels  # type: ignore[no-any-return]
    floats = float32_of(x)
    held = getattr(floats, "_quantc_levels", None)
    with torch._C.DisableTorchFunctionSubclass():
        can_tell = not getattr(HANDED_OUT, "memory", True) and is_tracked(floats)
        if held is not None and can_tell and held[0] == grid and held[1] == floats._version:
            return held[2]  # type: ignore[no-any-return]
        levels: Tensor = rounded(floats, grid)
        if can_tell:
            floats._quantc_levels = (grid, floats._version, levels)
    return levels


def rounded(x: Tensor, grid: Grid) -> Tensor:
    """A float tensor on a grid, by the fastest kernel that rounds half to even."""
    if grid.dtype is torch.uint8 and (grid.qmin, grid.qmax) == (0, 255) and x.dtype is torch.float32:
        return to_bytes(x, grid.scale, grid.zero_point, torch.uint8)
    made: Tensor = decomposed.quantize_per_tensor(x, *grid)
    return made


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a query about a tensor comes to: a traced one looks like float32 in memory order, unless it was written over."""
    traced = args[0] if args else None
    if not isinstance(traced, Traced):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if traced.plain is not None:
        return call_on_floats(func, args, kwargs)
    name = name_of(func)
    if name in SHAPES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name == "dtype":
        return torch.float32
    if name == "device":
        return CPU
    if name == "requires_grad" and traced.waiting is None:
        return False
    return call_on_floats(func, args, kwargs)


def call_on_floats(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on what traced tensors stand for. What it writes to them torch counts: see `current`."""
    if is_query(func) and isinstance(args[0], Traced) and args[0].plain is None and name_of(func) in SHAPES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    plain_args, plain_kwargs = on_floats((args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        output = func(*plain_args, **plain_kwargs)
    if hands_out_memory(func):
        hand_out((args, kwargs))
    if not isinstance(output, Tensor):
        return output
    return _itself(with_numbers(output, plain_args), (*args, *kwargs.values()))


def _itself(output: Tensor, given: tuple[Any, ...]) -> Tensor:
    """What a function gives: a traced tensor, if it gives back the floats of one."""
    for x in given:
        if type(x) is Traced and x.plain is output:
            return x
    return output


def hand_out(given: Any) -> None:
    """Tensors whose memory can be written to without torch counting it are floats from now on, and all that share it."""
    HANDED_OUT.memory = True
    for x in pytree.tree_leaves(given):
        if type(x) is Traced:
            for member in [x] if x.shared is None else x.shared.living:
                stays_float(member)
