"""The interpreter that checks kernels: it finds nothing where they are right, and every bit where they are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from quantc.errors import InputError, QuantcError
from quantc.integer.library import OPS
from quantc.integer.reference_check import Mismatch, check_kernels
from tests.support.integer_models import BACKENDS, NAMES, converted


@contextmanager
def kernel(op: str, function: Any) -> Iterator[None]:
    """Another kernel for an op, while it lasts."""
    library = torch.library.Library("quantc", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(op, function, "CPU", allow_override=True)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def off_by(step: int, *places: int) -> Any:
    """The linear's reference, with some elements changed."""

    def faulty(*args: Any) -> Tensor:
        result: Tensor = OPS["linear"].reference(*args).clone()
        result.view(-1)[list(places)] ^= step
        return result

    return faulty


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_our_kernels_agree_with_their_references(name: str, backend: str) -> None:
    program, inputs = converted(name, backend, "fused")
    assert check_kernels(program, inputs) == ()


def test_a_faulty_kernel_is_found() -> None:
    program, inputs = converted("residual", "qnnpack", "fused")
    with kernel("linear", off_by(4, 0, 7)):
        found = check_kernels(program, inputs)
    linear = next(node for node in program.graph.nodes if node.target is OPS["linear"].target)
    assert found == (Mismatch(linear.name, "linear", 2, 15, 4.0),)
    assert str(found[0]) == f"{linear.name} (quantc.linear): 2 of 15 elements differ from the reference, by up to 4"
    assert check_kernels(program, inputs) == ()


def test_each_op_is_judged_on_what_it_is_given() -> None:
    """What follows a faulty kernel is fed what that gave, and is not blamed for it."""
    program, inputs = converted("encoder", "qnnpack", "fused")
    with kernel("linear", off_by(1, 0)):
        found = check_kernels(program, inputs)
    linears = [node.name for node in program.graph.nodes if node.target is OPS["linear"].target]
    assert [mismatch.node for mismatch in found] == linears
    assert len(linears) == 4


def test_branches_are_checked_where_they_are_taken() -> None:
    program, (x,) = converted("branches", "qnnpack", "fused")
    with kernel("linear", off_by(1, 0)):
        paths = [
            [mismatch.node.rpartition("/")[0] for mismatch in check_kernels(program, (given,))]
            for given in (x.abs(), -x.abs())
        ]
    assert paths == [["", "true_graph_0"], ["", "false_graph_0"]]


def test_another_type_is_a_mismatch() -> None:
    program, inputs = converted("branches", "qnnpack", "fused")
    with kernel("linear", lambda *args: OPS["linear"].reference(*args).to(torch.int8)):
        found = check_kernels(program, inputs)
    assert "the kernel gives i8[3,4], the reference u8[3,4]" in str(found[0])


def test_a_float_that_is_no_number_is_found() -> None:
    program, inputs = converted("digits", "x86", "fused")

    def not_a_number(*args: Any) -> Tensor:
        result: Tensor = OPS["linear"].reference(*args).clone()
        result.view(-1)[0] = float("nan")
        return result

    with kernel("linear", not_a_number):
        found = check_kernels(program, inputs)
    assert [mismatch.count for mismatch in found] == [1]
    assert found[0].largest == float("inf")


def test_a_program_without_integer_ops_is_refused() -> None:
    program, inputs = converted("branches", "qnnpack", "decomposed")
    with pytest.raises(QuantcError, match="has no integer ops to check"):
        check_kernels(program, inputs)


def test_inputs_that_do_not_fit_are_refused() -> None:
    program, _ = converted("branches", "qnnpack", "fused")
    with pytest.raises(InputError, match="does not fit"):
        check_kernels(program, (torch.zeros(9, 9),))
