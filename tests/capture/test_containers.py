"""The types of inputs and outputs are kept, in every form of a program, or the model is refused."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.errors import CaptureError


class Named(NamedTuple):
    u: Tensor
    v: Tensor


class SubNamed(Named):
    """A subclass of a named tuple, which torch takes for one."""


class OwnDict(dict[str, Any]):
    """A dict by another name."""


class OwnList(list[Any]):
    """A list by another name."""


class OwnTuple(tuple[Any, ...]):
    """A tuple by another name."""

    __slots__ = ()


class OwnOrdered(OrderedDict[str, Any]):
    """An ordered dict by another name."""


class OwnDefault(defaultdict[str, Any]):
    """A defaultdict by another name."""


class ModelOutput(OrderedDict[str, Any]):
    """Values by key and by attribute, as libraries of models return them."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.__dict__.update(values)


class Registered(ModelOutput):
    """The same, known to torch."""


def _with_keys(x: Registered) -> Any:
    return [(pytree.MappingKey(key), value) for key, value in x.items()], list(x)


pytree.register_pytree_node(
    Registered,
    lambda x: (list(x.values()), list(x)),
    lambda values, keys: Registered(**dict(zip(keys, values, strict=True))),
    flatten_with_keys_fn=_with_keys,
)


@dataclass
class Pair:
    u: Tensor
    v: Tensor


Point = namedtuple("Point", "u v")
Make = Callable[[Tensor, Tensor], Any]
KEPT: dict[str, Make] = {
    "dict": lambda u, v: {"u": u, "v": v},
    "list": lambda u, v: [u, v],
    "NamedTuple": Named,
    "subclass of a NamedTuple": SubNamed,
    "namedtuple": Point,
    "OrderedDict": lambda u, v: OrderedDict(u=u, v=v),
    "defaultdict": lambda u, v: defaultdict(list, {"u": u, "v": v}),
    "deque": lambda u, v: deque([u, v]),
    "registered": lambda u, v: Registered(u=u, v=v),
    "nested": lambda u, v: {"k": [Named(u, v)], "l": (OrderedDict(v=v),)},
}
REFUSED: dict[str, Make] = {
    "dict": lambda u, v: OwnDict(u=u, v=v),
    "list": lambda u, v: OwnList([u, v]),
    "tuple": lambda u, v: OwnTuple((u, v)),
    "OrderedDict": lambda u, v: OwnOrdered(u=u, v=v),
    "defaultdict": lambda u, v: OwnDefault(list, {"u": u, "v": v}),
    "ModelOutput": lambda u, v: ModelOutput(u=u, v=v),
    "nested": lambda u, v: {"k": [OwnDict(u=u)], "l": v},
    "empty": lambda u, v: (u, v, OwnDict()),
}
HIDING: dict[str, Make] = REFUSED | {"dataclass": Pair, "UserDict": lambda u, v: UserDict({"u": u, "v": v})}


class Giving(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.a, self.b, self.make = nn.Linear(8, 8), nn.Linear(8, 8), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.a(x), self.b(x))


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, given: Any) -> Any:
        if isinstance(given, Pair | Named | Point):
            return self.a(given.u)
        return self.a(given["u"] if hasattr(given, "keys") else given[0])


def kinds(value: Any) -> Any:
    """The types that values are arranged in."""
    if isinstance(value, Tensor):
        return "*"
    items = value.values() if isinstance(value, dict) else value
    return type(value), [kinds(item) for item in items]


@pytest.mark.parametrize("method", ["export", "fx"])
@pytest.mark.parametrize("name", KEPT)
def test_types_of_outputs_are_kept(name: str, method: Any) -> None:
    model, x = Giving(KEPT[name]).eval(), torch.randn(4, 8)
    program = qc.capture(model, (x,), method)
    quantized = qc.quantize(program, None, [(x,)], "x86").program
    expected = kinds(model(x))
    for form in (program, quantized, qc.lower(quantized, "x86")):
        assert kinds(form(x)) == expected


@pytest.mark.parametrize("method", ["auto", "export", "fx"])
@pytest.mark.parametrize("name", HIDING)
def test_outputs_that_would_become_builtins_are_refused(name: str, method: Any) -> None:
    with pytest.raises(CaptureError, match="not a known type" if method == "export" else "register"):
        qc.capture(Giving(HIDING[name]).eval(), (torch.randn(4, 8),), method)


@pytest.mark.parametrize("sizes", ["auto", None])
def test_a_dataclass_is_refused_whichever_sizes_are_open(sizes: str | None) -> None:
    with pytest.raises(CaptureError, match="returns a Pair, and torch does not know that it holds tensors"):
        qc.capture(Giving(Pair).eval(), (torch.randn(4, 8),), dynamic_shapes=sizes)


def test_a_counter_without_tensors_is_refused_too() -> None:
    with pytest.raises(CaptureError, match="returns a Counter"):
        qc.capture(Giving(lambda u, v: (u, Counter("aab"))).eval(), (torch.randn(4, 8),), "fx")


@pytest.mark.parametrize("method", ["auto", "export", "fx"])
@pytest.mark.parametrize("name", [name for name in HIDING if name not in ("nested", "empty")])
def test_inputs_that_hide_tensors_are_refused(name: str, method: Any) -> None:
    given = HIDING[name](torch.randn(4, 8), torch.randn(4, 8))
    with pytest.raises(CaptureError, match="input"):
        qc.capture(Taking().eval(), (given,), method)


@pytest.mark.parametrize("method", ["export", "fx"])
@pytest.mark.parametrize("name", [name for name in KEPT if name != "nested"])
def test_inputs_in_containers_are_inputs(name: str, method: Any) -> None:
    model, make = Taking().eval(), KEPT[name]
    program = qc.capture(model, (make(torch.randn(4, 8), torch.randn(4, 8)),), method)
    other = make(torch.randn(4, 8), torch.randn(4, 8))
    torch.testing.assert_close(program(other), model(other))
