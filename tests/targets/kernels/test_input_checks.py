"""Inputs that kernels would compute garbage for, or hide a fault of: gradients, and tensors elsewhere than on the CPU."""

from __future__ import annotations

import pytest
import torch

from quantc.errors import InputError
from quantc.ir.signature import Signature
from quantc.targets.kernels.input_checks import check_device, check_gradients
from tests.support.by_hand import Builder, aten


def signature() -> Signature:
    build = Builder()
    image, mask = build.input("image", torch.zeros(2)), build.input("mask", torch.zeros(2))
    return build.program(build.call(aten.mul.Tensor, image, mask)).signature


def test_an_input_that_requires_a_gradient_is_named() -> None:
    leaves = [torch.zeros(2), torch.zeros(2, requires_grad=True)]
    with pytest.raises(InputError, match="'mask' requires a gradient") as caught:
        check_gradients(leaves, signature())
    assert "torch.no_grad()" in str(caught.value.advice)


def test_gradients_are_no_matter_where_none_are_recorded() -> None:
    leaves = [torch.zeros(2, requires_grad=True), 3.0]
    with torch.no_grad():
        check_gradients(leaves, signature())
    with torch.inference_mode():
        check_gradients(leaves, signature())
    check_gradients([torch.zeros(2), 3.0], signature())


def test_a_tensor_elsewhere_is_named_with_its_device() -> None:
    with pytest.raises(InputError, match="'image' is on meta") as caught:
        check_device([torch.zeros(2, device="meta"), torch.zeros(2)], signature())
    assert "x.cpu()" in str(caught.value.advice)


def test_what_is_on_the_cpu_or_no_tensor_is_taken() -> None:
    check_device([torch.zeros(2), 3.0], signature())


@pytest.mark.parametrize("check", [check_gradients, check_device])
def test_leaves_are_counted(check: object) -> None:
    with pytest.raises(ValueError, match="zip"):
        check([torch.zeros(2)], signature())  # type: ignore[operator]
