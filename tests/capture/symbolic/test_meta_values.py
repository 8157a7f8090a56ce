"""Fake execution of traced ops: sizes and dtypes without data, and nothing where they are not known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from quantc.capture.symbolic.meta_values import Shadows, expression, known_truth

aten = torch.ops.aten


def opened(fakes: FakeTensorMode, *shape: int) -> torch.Tensor:
    """A fake tensor whose first size is a symbol."""
    from torch._dynamo.source import ConstantSource

    dynamic = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (len(shape) - 1)]
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
        dynamic_sizes=dynamic, constraint_sizes=[None] * len(shape)
    )
    return fakes.from_tensor(torch.ones(shape), symbolic_context=context, source=ConstantSource("x"))


def call(fakes: FakeTensorMode | None, target: Any, *args: Any, x: torch.Tensor | None = None) -> Any:
    """The fake value of a call on a fake (4, 3) tensor."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    if fakes is not None:
        node.meta["val"] = fakes.from_tensor(torch.ones(4, 3)) if x is None else x
    return Shadows(fakes).compute(graph.call_function(target, (node, *args)))


def test_results_have_the_size_and_dtype_of_eager_and_no_numbers() -> None:
    fakes = FakeTensorMode()
    for target, args in (
        (aten.relu.default, ()),
        (aten.sum.dim_IntList, ([1],)),
        (aten.argmax.default, (1,)),
        (aten.t.default, ()),
    ):
        found, expected = call(fakes, target, *args), target(torch.ones(4, 3), *args)
        assert isinstance(found, FakeTensor)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_nothing_is_known_without_fakes_or_of_an_unknown_operand() -> None:
    assert call(None, aten.relu.default) is None
    graph = fx.Graph()
    node = graph.call_function(aten.relu.default, (graph.placeholder("x"),))
    assert Shadows(FakeTensorMode()).compute(node) is None


def test_ops_whose_size_depends_on_the_data_have_none() -> None:
    assert call(FakeTensorMode(), aten.nonzero.default) is None


def test_what_is_wrong_with_a_call_is_raised() -> None:
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with pytest.raises(RuntimeError, match="7"):
        call(fakes, aten.mm.default, torch.ones(7, 2))


def test_ops_of_one_tensor_keep_the_very_value_where_sizes_are_open() -> None:
    fakes = FakeTensorMode(shape_env=ShapeEnv())
    x = opened(fakes, 4, 3)
    assert call(fakes, aten.relu.default, x=x) is x
    fixed = FakeTensorMode()
    assert call(fixed, aten.relu.default) is not None
    norm = (None, None, torch.zeros(3), torch.ones(3))
    assert call(fakes, aten.batch_norm.default, *norm, False, 0.1, 1e-5, False, x=x) is x


def test_open_sizes_are_followed_through_ops() -> None:
    fakes = FakeTensorMode(shape_env=ShapeEnv())
    assert Shadows(fakes).has_symbols
    assert not Shadows(FakeTensorMode()).has_symbols
    x = opened(fakes, 4, 3)
    doubled = call(fakes, aten.repeat.default, [2, 1], x=x)
    assert expression(doubled.shape[0]) == f"SymInt 2*{x.shape[0]}"


def test_any_callable_is_run_or_gives_nothing() -> None:
    shadows = Shadows(FakeTensorMode())
    assert shadows.run(lambda: torch.ones(2, 2), (), {}).shape == (2, 2)
    assert shadows.run(lambda: 1 / 0, (), {}) is None
    assert Shadows(None).run(lambda: 3, (), {}) is None


def test_truths_of_sizes_are_plain_where_they_hold_for_every_size() -> None:
    size: Any = opened(FakeTensorMode(shape_env=ShapeEnv()), 4, 3).shape[0]
    assert known_truth(size >= 0) is True
    assert known_truth(size < 0) is False
    assert isinstance(known_truth(size > 10), torch.SymBool)


def test_only_symbolic_numbers_are_expressions() -> None:
    size: Any = opened(FakeTensorMode(shape_env=ShapeEnv()), 4, 3).shape[0]
    assert expression(size + 1) == f"SymInt {size.node.expr} + 1"
    assert expression(size - size) == ""
    assert (expression(3), expression("x"), expression(None)) == ("", "", "")
