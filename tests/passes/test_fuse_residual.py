"""The pass `fuse-residual`: linear layers add as they write."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantc.passes.fuse_residual import FuseResidual
from quantc.targets.kernels.int8_linear import OnOnednn
from quantc.targets.kernels.residual_linear import LinearSum
from tests.support.kernel_programs import kernels
from tests.support.residual_layers import ADDED, plain_layer, with_layer


@pytest.mark.parametrize("name", ADDED)
def test_only_a_plain_sum_of_a_layer_that_nobody_else_reads_is_taken_in(name: str) -> None:
    add, is_absorbed = ADDED[name]
    plain, exact = plain_layer()
    program = with_layer(plain, add)
    outcome = FuseResidual().run(program)
    assert outcome.notes == (("fused add into kernel_linear",) if is_absorbed else ())
    assert [type(kernel) for kernel in kernels(program)] == [LinearSum if is_absorbed else OnOnednn]
    if is_absorbed:
        x, other = torch.arange(24, dtype=torch.uint8).reshape(3, 8), torch.ones(3, 5)
        np.testing.assert_allclose(program(x, other).numpy(), exact(x) + 1, rtol=1e-5, atol=1e-5)


def test_a_layer_that_ends_in_a_relu_adds_nothing() -> None:
    plain, _ = plain_layer(relu=True)
    assert not FuseResidual().run(with_layer(plain, ADDED["to the right"][0]))
