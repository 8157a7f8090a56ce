"""The pass `overwrite-summands`: sums are written over what nobody reads later."""

from __future__ import annotations

from quantc.passes.fuse_residual import FuseResidual
from quantc.passes.overwrite_summands import OverwriteSummands
from quantc.targets.kernels.residual_linear import LinearSum
from tests.support.kernel_programs import kernels
from tests.support.residual_layers import ADDED, plain_layer, with_layer


def test_inputs_of_the_program_are_never_written_over() -> None:
    plain, _ = plain_layer()
    program = with_layer(plain, ADDED["to the right"][0])
    FuseResidual().run(program)
    assert not OverwriteSummands().run(program)
    (kernel,) = kernels(program)
    assert isinstance(kernel, LinearSum)
    assert kernel.keep
