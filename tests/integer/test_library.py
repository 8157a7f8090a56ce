"""Ops of the integer form: defined by a reference, run by a kernel where there is one, and found by their target."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quantc.integer.library import NAMESPACE, OPS, IntegerOp, integer_op, op_of

aten = torch.ops.aten
RAN: list[str] = []


def _kernel(x: Tensor) -> Tensor:
    RAN.append("kernel")
    return (x + x).t().contiguous().t()  # the right numbers, in other strides


def _shape(x: Tensor) -> Tensor:
    RAN.append("shape")
    return torch.empty_like(x)


@pytest.fixture(scope="module")
def ops() -> Iterator[dict[str, IntegerOp]]:
    """Three ops of the tests: torch keeps them, the table of ops does not."""
    before = dict(OPS)

    @integer_op("test_plain(Tensor x) -> Tensor", formula="out = x + x")
    def plain(x: Tensor) -> Tensor:
        """Twice a tensor.

        The rest is not the summary.
        """
        RAN.append("reference")
        twice: Tensor = aten.add.Tensor(x, x)
        return twice.t()

    @integer_op("test_fast(Tensor x) -> Tensor", formula="out = x + x", deviation="none", kernel=_kernel)
    def fast(x: Tensor) -> Tensor:
        RAN.append("reference")
        twice: Tensor = aten.add.Tensor(x, x)
        return twice

    @integer_op("test_shaped(Tensor x) -> (Tensor, Tensor)", formula="out = x, x + x", fake=lambda x: (x, _shape(x)))
    def shaped(x: Tensor) -> tuple[Tensor, Tensor]:
        RAN.append("reference")
        return aten.clone.default(x).t(), aten.add.Tensor(x, x)

    made = {name: op for name, op in OPS.items() if name not in before}
    yield made
    for name in made:
        del OPS[name]


def ran(op: IntegerOp, x: Tensor) -> tuple[object, list[str]]:
    RAN.clear()
    return op.target(x), list(RAN)


def test_an_op_knows_its_name_formula_and_summary(ops: dict[str, IntegerOp]) -> None:
    assert list(ops) == ["test_plain", "test_fast", "test_shaped"]
    assert ops["test_plain"].summary == "Twice a tensor."
    assert ops["test_fast"].summary == ""
    assert (ops["test_fast"].formula, ops["test_fast"].deviation) == ("out = x + x", "none")
    assert str(ops["test_plain"].target) == f"{NAMESPACE}.test_plain.default"


def test_the_kernel_runs_where_there_is_one_and_the_reference_elsewhere(ops: dict[str, IntegerOp]) -> None:
    x = torch.arange(6).reshape(2, 3)
    assert ran(ops["test_plain"], x)[1] == ["reference"]
    found, who = ran(ops["test_fast"], x)
    assert who == ["kernel"]
    assert isinstance(found, Tensor)
    assert torch.equal(found, x * 2)


def test_tensors_without_numbers_go_to_the_reference_unless_shapes_are_computed_otherwise(
    ops: dict[str, IntegerOp],
) -> None:
    x = torch.arange(6, device="meta").reshape(2, 3)
    found, who = ran(ops["test_fast"], x)
    assert who == ["reference"]
    assert isinstance(found, Tensor)
    assert (found.device.type, tuple(found.shape)) == ("meta", (2, 3))
    assert ran(ops["test_shaped"], x)[1] == ["shape"]


def test_results_are_contiguous_whatever_computes_them(ops: dict[str, IntegerOp]) -> None:
    x = torch.arange(6).reshape(2, 3)
    for name in ("test_plain", "test_fast"):
        found = ops[name].target(x)
        assert found.is_contiguous()
    assert all(part.is_contiguous() for part in ops["test_shaped"].target(x))


def test_an_op_is_found_by_its_target_alone(ops: dict[str, IntegerOp]) -> None:
    assert op_of(ops["test_plain"].target) is ops["test_plain"]
    assert op_of(aten.add.Tensor) is None
    assert op_of(torch.add) is None
    assert op_of("quantc.linear.default") is None
    assert op_of(torch.ops.quantc.quantize_float.default) is None  # in the namespace, and no op of the table
