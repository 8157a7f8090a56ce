"""The calling convention of a program: names of parameters, order of arguments, and calls that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from quantc.errors import InputError
from quantc.ir.signature import Input, Signature, as_tensors, tensors_in_place_of_arrays
from quantc.ir.types import TensorType

F32 = torch.float32


def signature(call: Any, *inputs: Input, **ranges: tuple[int, int | None]) -> Signature:
    """`call` is an example of (args, kwargs)."""
    return Signature(inputs, pytree.tree_structure(call), pytree.tree_structure(0), dict(ranges))


def tensor(name: str, *shape: int | str) -> Input:
    return Input(name, TensorType(F32, shape))


def check(made: Signature, *args: Any, **kwargs: Any) -> None:
    made.check(*made.flatten(args, kwargs))


# -- names -------------------------------------------------------------------------------------------------------------


def test_parameters_are_named_after_their_leaves_and_keywords() -> None:
    made = signature(((0, 0), {"mask": 0}), Input("x"), Input("y"), Input("mask"))
    assert made.parameters == ["x", "y", "mask"]
    assert made.call == "(x, y, mask=mask)"


def test_a_tree_has_the_name_that_its_leaves_begin_with() -> None:
    made = signature(
        (({"x": 0, "mask": 0}, [0, 0]), {}), Input("batch_x"), Input("batch_mask"), Input("a_0"), Input("other")
    )
    assert made.parameters == ["batch", "tree_1"]


def test_names_that_are_taken_twice_are_made_up() -> None:
    assert signature(((0, 0), {"x": 0}), Input("x"), Input("y"), Input("x")).parameters == ["tree_0", "y", "tree_2"]


# -- order -------------------------------------------------------------------------------------------------------------


def test_keywords_and_dicts_may_come_in_any_order() -> None:
    made = signature((({"p": 0, "q": 0},), {"a": 0, "b": 0}), *(Input(name) for name in "pqab"))
    leaves, spec = made.flatten(({"q": 2, "p": 1},), {"b": 4, "a": 3})
    assert leaves == [1, 2, 3, 4]
    assert spec == made.in_spec


def test_what_is_arranged_otherwise_is_left_as_it_is() -> None:
    made = signature((({"p": 0},), {}), Input("p"))
    leaves, spec = made.flatten(({"r": 1},), {})
    assert leaves == [1]
    assert spec != made.in_spec


# -- checks ------------------------------------------------------------------------------------------------------------


def test_symbols_are_bound_once_and_must_agree() -> None:
    made = signature(((0, 0), {}), tensor("x", "s0", 4), tensor("y", "s0", "2*s0 + 1"), s0=(2, 8))
    check(made, torch.ones(3, 4), torch.ones(3, 7))
    with pytest.raises(InputError, match=r"'y' has size 4 in dimension 0.* s0 = 3"):
        check(made, torch.ones(3, 4), torch.ones(4, 7))
    with pytest.raises(InputError, match=r"'y' has size 6 in dimension 1.* 2\*s0 \+ 1 = 7"):
        check(made, torch.ones(3, 4), torch.ones(3, 6))
    for size in (1, 9):
        with pytest.raises(InputError, match=rf"s0 is {size}, outside .* 2\.\.8"):
            check(made, torch.ones(size, 4), torch.ones(size, 2 * size + 1))
    for size in (2, 8):
        check(made, torch.ones(size, 4), torch.ones(size, 2 * size + 1))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.ones(2, 5), "size 5 in dimension 1"),
        (torch.ones(2, 4, 1), r"f32\[2,4,1\]"),
        (torch.ones(2, 4).double(), r"f64\[2,4\]"),
        ([1.0], "arranged as"),
        ("text", "a str, not a tensor"),
        (torch.ones(2, 4).to_sparse(), "sparse_coo"),
    ],
    ids=["size", "rank", "dtype", "list", "text", "sparse"],
)
def test_what_is_not_the_tensor_it_was_captured_for_is_refused(given: Any, told: str) -> None:
    made = signature(((0,), {}), tensor("x", 2, 4))
    check(made, torch.ones(2, 4))
    with pytest.raises(InputError, match=told) as caught:
        check(made, given)
    assert "x" in caught.value.what
    assert caught.value.advice


def test_an_input_of_any_type_takes_any_tensor() -> None:
    check(signature(((0,), {}), Input("x")), torch.ones(3, dtype=torch.int8))


def test_values_that_capture_fixed_stay_fixed() -> None:
    made = signature(((0,), {"mode": 0}), Input("x"), Input("mode", is_constant=True, constant="fast"))
    check(made, torch.ones(1), mode="fast")
    for other in ("slow", torch.ones(1)):
        with pytest.raises(InputError, match=r"'mode' is .* 'fast'"):
            check(made, torch.ones(1), mode=other)


def test_another_number_of_arguments_is_refused_with_the_call() -> None:
    made = signature(((0,), {"mask": 0}), Input("x"), Input("mask"))
    with pytest.raises(InputError, match=r"2 positional arguments.* takes 2: x, mask") as caught:
        check(made, torch.ones(1), torch.ones(1))
    assert caught.value.advice is not None
    assert "x by position, and mask by name" in caught.value.advice
    with pytest.raises(InputError, match="1 positional arguments, other="):
        check(made, torch.ones(1), other=torch.ones(1))
    with pytest.raises(InputError, match="3 positional arguments"):
        check(made, *(torch.ones(1) for _ in range(3)))


def test_another_arrangement_is_refused_with_both_and_long_ones_are_counted() -> None:
    made = signature((({"p": 0, "q": (0, 0)},), {}), Input("b_p"), Input("b_q_0"), Input("b_q_1"))
    with pytest.raises(InputError, match=r"b is arranged as \{p: \*, q: \[\*\]\}, .* \{p: \*, q: \(\*, \*\)\}"):
        check(made, {"p": 1, "q": [2]})
    with pytest.raises(InputError, match="a list of 50 values"):
        check(made, [0] * 50)


# -- arrays ------------------------------------------------------------------------------------------------------------


def test_arrays_become_tensors_of_the_same_memory() -> None:
    array = np.zeros((2, 3), dtype=np.float32)
    made = as_tensors([array, "text", 3])
    assert made is not None
    assert made[1:] == ["text", 3]
    array[0, 0] = 5
    assert made[0][0, 0] == 5
    assert as_tensors([torch.ones(1), 3]) is None


def test_arrays_that_torch_cannot_share_are_copied_or_left() -> None:
    fixed = np.ones(3)
    fixed.flags.writeable = False
    words = np.array(["a", "b"])
    made = as_tensors([fixed, np.arange(3)[::-1], words])
    assert made is not None
    assert [made[0].tolist(), made[1].tolist()] == [[1.0, 1.0, 1.0], [2, 1, 0]]
    assert made[2] is words


def test_arrays_anywhere_in_a_tree_become_tensors() -> None:
    made = tensors_in_place_of_arrays({"a": [np.ones(2), (np.zeros(1), "x")]})
    assert torch.equal(made["a"][0], torch.ones(2, dtype=torch.float64))
    assert isinstance(made["a"][1][0], torch.Tensor)
    tree = {"a": 1}
    assert tensors_in_place_of_arrays(tree) is tree
