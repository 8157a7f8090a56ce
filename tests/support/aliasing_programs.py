"""Programs that write to memory others look at: every ATen schema that writes, through every way to make a view.

A program is a write, a view, and a place: where in a small model the write happens, and who reads afterwards. Eager
PyTorch judges it. Calls are found by trying: of a schema's arguments a few are guessed until PyTorch runs the call.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload

TORCH: Any = torch
ROWS, COLUMNS = 16, 8
Write = Callable[[Tensor], Any]
View = Callable[[Any], Tensor]

VIEWS: dict[str, View] = {
    "itself": lambda y: y,
    "row": lambda y: y[0],
    "rows": lambda y: y[1:9],
    "steps": lambda y: y[:, ::2],
    "column": lambda y: y[..., -1],
    "t": lambda y: y.t(),
    "T": lambda y: y.T,
    "view": lambda y: y.view(COLUMNS, ROWS),
    "line": lambda y: y.view(-1),
    "flatten": lambda y: y.flatten(),
    "reshape": lambda y: y.reshape(4, 4, COLUMNS),
    "chunk": lambda y: y.chunk(2, 0)[1],
    "split": lambda y: y.split(4, 1)[0],
    "sizes": lambda y: y.split([3, 13], 0)[1],
    "tensor_split": lambda y: y.tensor_split(2)[0],
    "hsplit": lambda y: y.hsplit(2)[1],
    "unbind": lambda y: y.unbind(0)[2],
    "squeeze": lambda y: y.unsqueeze(0).squeeze(0),
    "unsqueeze": lambda y: y.unsqueeze(1),
    "view_as": lambda y: y.view_as(torch.zeros(4, 32)),
    "expand": lambda y: y.unsqueeze(0).expand(1, ROWS, COLUMNS),
    "diagonal": lambda y: y.diagonal(),
    "narrow": lambda y: y.narrow(0, 4, 8),
    "transpose": lambda y: y.transpose(0, 1),
    "permute": lambda y: y.permute(1, 0),
    "movedim": lambda y: y.movedim(0, 1),
    "detach": lambda y: y.detach(),
    "contiguous": lambda y: y.contiguous(),
    "cast": lambda y: y.to(torch.float32),
    "as_strided": lambda y: y.as_strided((8, COLUMNS), (2 * COLUMNS, 1)),
    "unfold": lambda y: y.unfold(0, 4, 4),
    "unflatten": lambda y: y.unflatten(0, (2, 8)),
    "real": torch.real,
    "dropout": lambda y: F.dropout(y, 0.5, training=False),
    "none": lambda y: y[None],
    "bits": lambda y: y.view(torch.int32).view(torch.float32),
    "chain": lambda y: y.view(2, 8, COLUMNS)[1][:, 2:6],
    "turned": lambda y: y.t()[1:5].t(),
}
"""Ways to name the memory of a tensor, or a part of it, once more. Each has 8 elements or more."""


class Net(nn.Module):
    """Two layers, a buffer, and a write among them; and a third layer beside them."""

    def __init__(self, place: str, view: View, write: Write) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(COLUMNS, COLUMNS) for _ in range(3))
        self.register_buffer("kept", torch.linspace(-2.0, 2.0, ROWS * COLUMNS).view(ROWS, COLUMNS))
        self.kept: Tensor
        self.place, self.view, self.write = place, view, write

    def forward(self, x: Tensor, z: Tensor) -> Any:
        aside = self.c(torch.relu(self.c(z)))  # away from all writes: there is something to quantize in each program
        return PLACES[self.place](self, x, z), aside


def _fit(v: Tensor) -> Tensor:
    """Rows that a layer can read, of any view."""
    return v if v.shape[-1] == COLUMNS else v.reshape(-1)[:COLUMNS].reshape(1, COLUMNS)


def _between(net: Net, x: Tensor, z: Tensor) -> Any:
    y = net.a(x)
    net.write(net.view(y))
    return net.b(y)


def _reverse(net: Net, x: Tensor, z: Tensor) -> Any:
    y = net.a(x)
    v = net.view(y)
    net.write(y)
    return net.b(_fit(v))


def _after(net: Net, x: Tensor, z: Tensor) -> Any:
    y = net.a(x)
    made = net.b(y)
    net.write(net.view(y))
    return made, y


def _input(net: Net, x: Tensor, z: Tensor) -> Any:
    net.write(net.view(x))
    return net.b(net.a(x))


def _input_reverse(net: Net, x: Tensor, z: Tensor) -> Any:
    v = net.view(x)
    net.write(x)
    return net.b(net.a(_fit(v)))


def _input_after(net: Net, x: Tensor, z: Tensor) -> Any:
    made = net.a(x)
    net.write(net.view(x))
    return made + net.b(x)


def _two_inputs(net: Net, x: Tensor, z: Tensor) -> Any:
    net.write(net.view(x))
    return net.a(x), net.b(z)


def _buffer(net: Net, x: Tensor, z: Tensor) -> Any:
    net.write(net.view(net.kept))
    return net.b(net.a(x) + net.kept)


def _buffer_reverse(net: Net, x: Tensor, z: Tensor) -> Any:
    v = net.view(net.kept)
    net.write(net.kept)
    return net.b(net.a(x)), net.a(_fit(v))


def _returned(net: Net, x: Tensor, z: Tensor) -> Any:
    y = net.a(x)
    v = net.view(y)
    net.write(v)
    return v, net.b(y)


def _no_grad(net: Net, x: Tensor, z: Tensor) -> Any:
    y = net.a(x)
    with torch.no_grad():
        net.write(net.view(y))
    return net.b(y)


def _clamped(net: Net, x: Tensor, z: Tensor) -> Any:
    y = net.a(x)
    net.write(net.view(y))
    return net.b(torch.relu(y))


def _sum(net: Net, x: Tensor, z: Tensor) -> Any:
    y = net.a(x)
    r = torch.relu(y)
    net.write(net.view(y))
    return net.b(y + r)


def _view_after(net: Net, x: Tensor, z: Tensor) -> Any:
    y = net.a(x)
    net.write(net.view(y))
    return net.b(_fit(net.view(y))), net.b(y)


def _twice(net: Net, x: Tensor, z: Tensor) -> Any:
    y = net.a(x)
    net.write(net.view(y))
    first = net.b(y)
    net.write(net.view(y))
    return first, net.b(y)


def _viewed_first(net: Net, x: Tensor, z: Tensor) -> Any:
    y = net.a(x)
    v = y.view(ROWS // 2, 2, COLUMNS)
    net.write(net.view(y))
    return net.b(v)


def _joined(net: Net, x: Tensor, z: Tensor) -> Any:
    y = net.a(x)
    both = torch.cat([y, z])
    net.write(net.view(y))
    return net.b(both), net.b(y)


def _made(net: Net, x: Tensor, z: Tensor) -> Any:
    y = net.a(x)
    o = torch.zeros(ROWS, COLUMNS)
    net.write(net.view(o))
    return net.b(y + o)


PLACES: dict[str, Callable[[Net, Tensor, Tensor], Any]] = {
    "between": _between,
    "reverse": _reverse,
    "after": _after,
    "input": _input,
    "input reverse": _input_reverse,
    "input after": _input_after,
    "two inputs": _two_inputs,
    "buffer": _buffer,
    "buffer reverse": _buffer_reverse,
    "returned": _returned,
    "no grad": _no_grad,
    "clamped": _clamped,
    "sum": _sum,
    "view after": _view_after,
    "twice": _twice,
    "viewed first": _viewed_first,
    "joined": _joined,
    "made": _made,
}
"""Where the write stands."""


# -- writes --------------------------------------------------------------------------------------------------


def _set_item(v: Tensor) -> None:
    v[...] = 5.0


def _set_first(v: Tensor) -> None:
    v[0] = 5.0


def _set_where(v: Tensor) -> None:
    v[v > 0] = 5.0


def _add(v: Tensor) -> None:
    v += 5.0


def _scale(v: Tensor) -> None:
    v *= -3.0


def _data(v: Tensor) -> None:
    v.data.add_(5.0)


SPELLED: dict[str, Write] = {
    "v[...] = 5": _set_item,
    "v[0] = 5": _set_first,
    "v[v > 0] = 5": _set_where,
    "v += 5": _add,
    "v *= -3": _scale,
    "v.data.add_": _data,
    "v.add_": lambda v: v.add_(5.0),
    "v.copy_": lambda v: v.copy_(torch.full((1,), 5.0)),
    "v.fill_": lambda v: v.fill_(4.0),
    "v.set_item slice": lambda v: v[1:].mul_(-4.0),
    "torch.neg(out)": lambda v: torch.neg(v, out=v),
    "torch.add(out)": lambda v: torch.add(v, 5.0, out=v),
    "torch.add(out of a new view)": lambda v: torch.add(v, 5.0, out=v.view_as(v)),
    "torch.mul(out)": lambda v: torch.mul(v, torch.full_like(v, 4.0), out=v),
    "_foreach_add_": lambda v: TORCH._foreach_add_([v], 5.0),
    "_foreach_mul_ of two": lambda v: TORCH._foreach_mul_([torch.zeros(3), v], -3.0),
    "own op": lambda v: torch.ops.quantc_tests.shift_(v, 5.0),
    "own op by keyword": lambda v: torch.ops.quantc_tests.shift_into(4.0, where=v),
    "swap with out": lambda v: torch.sub(torch.full_like(v, 3.0), v, out=v),
}
"""Writes as people spell them."""


@cache
def define_ops() -> torch.library.Library:
    """Ops of the tests' own, with arguments they write to, positional and by keyword."""
    library = torch.library.Library("quantc_tests", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("shift_(Tensor(a!) x, float by) -> ()")  # type: ignore[no-untyped-call]
    library.define("shift_into(float by, *, Tensor(a!) where) -> ()")  # type: ignore[no-untyped-call]

    def shift(x: Tensor, by: float) -> None:
        x.add_(by)

    def shift_into(by: float, *, where: Tensor) -> None:
        where.add_(by)

    library.impl("shift_", shift, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    library.impl("shift_into", shift_into, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    return library


SPELLED_SHARE = 0.1
"""How many of the programs spell their write as people do."""
NUMBERS: tuple[Any, ...] = (5.0, 1, 2, 0, -1)
GUESSES: dict[str, tuple[Any, ...]] = {
    "number": NUMBERS,
    "Scalar": NUMBERS,
    "int": (1, 0, 2, -1),
    "SymInt": (1, 0, 2, -1),
    "float": (5.0, 1.0, 0.5),
    "bool": (False, True),
    "List[int]": ([0], [1], [1, 1], [2]),
    "List[SymInt]": ([0], [1], [1, 1], [2]),
    "List[float]": ([1.0], [2.0]),
    "List[number]": ([5.0],),
    "str": ("mean", "none"),
}
SKIPPED: tuple[str, ...] = ("rand", "normal", "uniform", "bernoulli", "cauchy", "exponential", "geometric")
SKIPPED += ("log_normal", "dropout", "empty", "resize", "set_", "_cudnn", "_mps", "mkldnn", "cuda", "nested", "sparse")
SKIPPED += ("_coalesced", "fft")
SKIPPED += (
    "quantize",
    "_fused_",
    "rnn",
    "lstm",
    "names",
    "refine",
    "requires_grad",
    "swap",
    "_copy_from",
    "multinomial",
)
SKIPPED += ("linalg_", "svd", "lstsq", "_stack", "histogram", "binomial", "poisson", "retain", "detach_")
SKIPPED += ("batch_norm_update_stats",)  # its stand-in keeps the size of out=, the op itself does not
OTHERS: tuple[Write, ...] = (
    lambda v: torch.full_like(v, 2.5),
    lambda v: v,
    lambda v: v.clone(),
    lambda v: torch.stack([v, v * 2.0, v - 4.0]),
    lambda v: torch.full((1,), 3.0),
    lambda v: torch.zeros_like(v, dtype=torch.int64),
    lambda v: torch.ones_like(v, dtype=torch.bool),
    lambda v: torch.zeros(1, dtype=torch.int64),
    lambda v: torch.ones(v.shape[-1], v.shape[-1]),
)
"""What a tensor argument that is only read may be."""


def schemas() -> Iterator[OpOverload]:
    """All ATen ops that say they write."""
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("aten::") or not schema.is_mutable:
            continue
        name = schema.name.removeprefix("aten::")
        is_internal = name.startswith("_") and not name.startswith(("_foreach", "__i"))
        if is_internal or "backward" in name or any(word in name for word in SKIPPED):
            continue
        packet = getattr(torch.ops.aten, name, None)
        overload = getattr(packet, schema.overload_name or "default", None)
        if isinstance(overload, OpOverload):
            yield overload


@dataclass(frozen=True)
class Call:
    """One call of an op that writes: for each argument a value, or how it is made from the tensor written to."""

    op: OpOverload
    values: tuple[Any, ...]

    def __call__(self, v: Tensor) -> Any:
        args, kwargs = [], {}
        for row, value in zip(self.op._schema.arguments, self.values, strict=True):
            made = value(v) if callable(value) else value
            if row.kwarg_only:
                kwargs[row.name] = made
            else:
                args.append(made)
        return self.op(*args, **kwargs)


def _the_view(v: Tensor) -> Tensor:
    return v


def _in_list(v: Tensor) -> list[Tensor]:
    return [v]


def _options(row: Any) -> tuple[Any, ...]:
    kind = str(row.type)
    is_written = row.alias_info is not None and row.alias_info.is_write
    if is_written:
        return (_in_list,) if kind == "List[Tensor]" else (_the_view,) if kind == "Tensor" else ()
    if kind == "Tensor":
        return OTHERS
    if kind == "List[Tensor]":
        return (_in_list, lambda v: [torch.full_like(v, 2.5)])
    if row.has_default_value():
        default = row.default_value
        return (default,) if kind not in ("number", "Scalar") else (default, 2)
    if kind.startswith("Optional"):
        return (None, *GUESSES.get(kind.removeprefix("Optional[").removesuffix("]"), ()))
    # a dtype says it is an int, and a number that is none brings PyTorch down
    return GUESSES.get(kind, ()) if str(row.real_type) not in ("ScalarType", "MemoryFormat", "Layout") else ()


@cache
def calls(op: OpOverload) -> tuple[Call, ...]:
    """Calls of an op that PyTorch runs on a matrix, a row or a cube, and that change it by much; at most two."""
    options = [_options(row) for row in op._schema.arguments]
    found: list[Call] = []
    for values in itertools.islice(itertools.product(*options), 400):
        call = Call(op, values)
        if any(_changes(call, torch.linspace(-1.5, 2.0, 8 * 8).view(shape)) for shape in ((8, 8), (64,), (2, 4, 8))):
            found.append(call)
        if len(found) == 2:
            break
    return tuple(found)


def _changes(call: Write, sample: Tensor) -> bool:
    """Whether a call runs, gives the same twice, and changes by much what it is given, but not its shape."""
    results = []
    for _ in range(2):
        given = sample.clone()
        with torch.no_grad(), quiet():
            try:
                call(given)
            except Exception:  # noqa: BLE001 - whatever PyTorch refuses is no program
                return False
        results.append(given)
    if results[0].shape != sample.shape or not torch.equal(*results) or not bool(results[0].isfinite().all()):
        return False
    return float((results[0] - sample).norm()) > 0.5 * float(sample.norm()) and float(results[0].abs().max()) < 100


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@cache
def overloads() -> dict[str, OpOverload]:
    """All ops that say they write, by name."""
    return {str(op): op for op in schemas()}


def drawn(draw: random.Random) -> str | None:
    """The name of a write: as people spell it, or a call that a schema allows; None if none was found for it."""
    if draw.random() < SPELLED_SHARE:
        return draw.choice(list(SPELLED))
    name = draw.choice(list(overloads()))
    found = calls(overloads()[name])
    return f"{name}#{draw.randrange(len(found))}" if found else None


def write(name: str) -> Write:
    """A write by its name."""
    define_ops()
    if name in SPELLED:
        return SPELLED[name]
    op, _, index = name.rpartition("#")
    return calls(overloads()[op])[int(index)]
