"""Argument cache: which arguments count as alike, and how many kinds are remembered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.targets.argument_cache import MAX_KNOWN, KnownArguments


def test_tensors_that_differ_in_numbers_and_strides_alone_are_of_one_kind() -> None:
    known = KnownArguments()
    known.add(known.kind((torch.zeros(2, 3), torch.zeros(4)), {}))
    assert known.kind((torch.ones(3, 2).t(), torch.ones(4)), {}) in known


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(3, 2),),
        (torch.zeros(2, 3, 1),),
        (torch.zeros(2, 3).double(),),
        (torch.zeros(2, 3, device="meta"),),
        (torch.zeros(2, 3).to_sparse(),),
        (torch.zeros(2, 3), torch.zeros(2, 3)),
        (),
    ],
    ids=["shape", "rank", "dtype", "device", "layout", "one more", "none"],
)
def test_other_arguments_are_of_another_kind(other: tuple[Any, ...]) -> None:
    known = KnownArguments()
    known.add(known.kind((torch.zeros(2, 3),), {}))
    assert known.kind(other, {}) not in known


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, requires_grad=True),
        nn.Parameter(torch.zeros(2), requires_grad=False),
        [torch.zeros(2)],
        2.0,
        None,
    ],
    ids=["gradient", "subclass", "list", "number", "None"],
)
def test_what_is_no_plain_tensor_is_looked_at_each_time(x: Any) -> None:
    known = KnownArguments()
    kind = known.kind((torch.zeros(2), x), {})
    assert kind is None
    known.add(kind)
    assert kind not in known


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_no_shape_to_be_known_by() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert KnownArguments.kind((nested,), {}) is None


def test_named_arguments_are_looked_at_each_time() -> None:
    known = KnownArguments()
    assert known.kind((), {"x": torch.zeros(2)}) is None
    assert known.kind((torch.zeros(2),), {"flag": True}) is None


def test_no_more_kinds_are_remembered_than_the_limit() -> None:
    known = KnownArguments()
    kinds = [known.kind((torch.empty(size, device="meta"),), {}) for size in range(MAX_KNOWN + 3)]
    for kind in kinds:
        known.add(kind)
    assert [kind in known for kind in kinds] == [True] * MAX_KNOWN + [False] * 3
