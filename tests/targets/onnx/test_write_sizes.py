"""ONNX writers of arithmetic on sizes that vary, and of results that are taken apart."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

import quantc as qc
from tests.support import onnx_draws_sizes
from tests.support.onnx_ops import Function, check, check_case, check_function, drawn, refusal


@pytest.mark.parametrize("name", onnx_draws_sizes.ON_SIZES)
def test_sizes_that_vary(name: str) -> None:
    module = Function(onnx_draws_sizes.ON_SIZES[name]).eval()
    x = torch.randn(6, 4)
    captured = qc.capture(module, (x,), dynamic_shapes=({0: Dim("batch", min=4, max=64)},))
    program = qc.pipelines.inference().run_on_copy(captured)
    for size in (6, 5, 7, 8, 13):
        check(module, program, torch.randn(size, 4))


def test_a_product_of_sizes_is_computed_as_the_model_runs() -> None:
    check_case((lambda x: x.reshape(x.shape[0] * 2, 3) * (x.shape[0] + 1), (4, 6)))


def test_results_are_taken_out_of_several_by_their_place() -> None:
    check_function(lambda x: (x.topk(2)[1], x.topk(2)[0], torch.split(x, 2, 1)[1]), drawn(3, 4))


def test_a_result_that_onnx_does_not_have_is_refused() -> None:
    told = refusal(lambda x: torch.nn.functional.max_pool2d(x, 2, return_indices=True)[1], drawn(1, 2, 4, 4))
    assert "result 1 of" in told
    assert "has no ONNX form" in told
