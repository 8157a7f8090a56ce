"""Names of call targets, and the closed list that text may resolve them from."""

from __future__ import annotations

import math
import operator
import os
from typing import Any

import pytest
import torch
from torch.nn import functional

from quantc.errors import UnknownNameError
from quantc.ir.dialect import BY_NAME
from quantc.text.target_names import ON_DEMAND, callee_name, functions, resolve

aten = torch.ops.aten

NAMES: list[tuple[Any, str]] = [
    (aten.relu.default, "relu"),
    (aten.cumsum.default, "aten.cumsum.default"),
    (torch.ops.higher_order.cond, "higher_order.cond"),
    (torch.relu, "torch:relu"),
    (operator.getitem, "operator:getitem"),
    (math.sqrt, "math:sqrt"),
    (len, "builtins:len"),
    (functional.max_pool2d_with_indices, "torch.nn.functional:max_pool2d_with_indices"),
    (torch.einsum, "torch:einsum"),
    (torch.sym_max, "torch:sym_max"),
]


@pytest.mark.parametrize(("target", "name"), NAMES, ids=[name for _, name in NAMES])
def test_targets_are_found_by_the_name_they_print(target: Any, name: str) -> None:
    assert callee_name(target) == name
    assert resolve(name, {}) is target


def test_every_op_and_every_function_on_the_list_comes_back() -> None:
    for name, op in BY_NAME.items():
        assert resolve(name, {}) is op.target
        assert callee_name(op.target) == name
    for name, function in functions().items():
        assert resolve(name, {}) is function
        assert functions()[callee_name(function)] == function, "of one function under two names, the first"


HARMFUL = [
    "os:system",
    "builtins:eval",
    "builtins:exec",
    "builtins:__import__",
    "builtins:open",
    "torch:load",
    "torch:save",
    "torch:compile",
    "torch:from_file",
    "operator:call",
    "operator:attrgetter",
    "operator:methodcaller",
    "torch:_C",
    "higher_order.__class__",
    "load_library.__class__.__init__",
    "aten.relu.__class__",
]


@pytest.mark.parametrize("name", HARMFUL)
def test_nothing_else_can_be_reached(name: str) -> None:
    with pytest.raises(UnknownNameError):
        resolve(name, {})


def test_functions_that_the_caller_gives_come_first() -> None:
    assert resolve("os:system", {"os:system": len}) is len
    assert resolve("relu", {"relu": abs}) is abs
    assert callee_name(os.system) not in functions()


def test_unknown_names_are_refused_with_what_to_do() -> None:
    told = {
        "rellu": "relu",
        "aten.relu.nope": "namespace.op.overload",
        "my:function": "functions=",
        "higher_order.nope": "",
    }
    for name, advice in told.items():
        with pytest.raises(UnknownNameError, match=name.rpartition("higher_order.")[2]) as caught:
            resolve(name, {})
        assert advice in (caught.value.advice or "")


def test_a_callable_object_is_named_by_its_class() -> None:
    class Doubling:
        def __call__(self, x: int) -> int:
            return 2 * x

    name = callee_name(Doubling())
    assert name.endswith("Doubling")
    assert "0x" not in name


def test_namespaces_are_registered_when_they_are_first_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setitem(ON_DEMAND, "no_such_space", lambda: asked.append("asked"))
    with pytest.raises(UnknownNameError):
        resolve("no_such_space.op.default", {})
    assert asked == ["asked"]
    resolve("aten.cumsum.default", {})
    assert asked == ["asked"]
