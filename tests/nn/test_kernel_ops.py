"""One op of the integer form on the best kernel of a target, outside of any program."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from quantc.errors import QuantcError
from quantc.nn import quantize_per_tensor, quantized
from quantc.nn.kernel_ops import KernelCache, on_kernel, target
from tests.support.nn_cases import engine


def test_engines_without_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = quantize_per_tensor(torch.randn(3, 4), 0.1, 5)
    assert quantized.Linear(4, 2)(x).shape == (3, 2)
    monkeypatch.setattr("quantc.nn.kernel_ops.TARGETS", {})
    with pytest.raises(QuantcError, match="no kernels for the engine"):
        quantized.Linear(4, 2)(x)


@pytest.mark.parametrize(
    ("name", "kernels"), [("x86", "x86"), ("fbgemm", "x86"), ("onednn", "x86"), ("qnnpack", "qnnpack")]
)
def test_engines_of_torch_ask_for_the_kernels_of_a_target(name: str, kernels: str) -> None:
    with engine(name):
        assert target() == kernels


LINEAR: dict[str, Any] = {
    "x_zero_point": 3,
    "w": torch.tensor([[1, -2, 3], [4, 5, -6]], dtype=torch.int8),
    "w_zero_point": None,
    "bias": torch.tensor([10, -10], dtype=torch.int32),
    "parts": 0,
    "multiplier": torch.tensor(0.5, dtype=torch.float64),
    "shift": None,
    "out_zero_point": 100,
    "qmin": 0,
    "qmax": 255,
    "dtype": torch.uint8,
}


@pytest.mark.parametrize("kind", ["x86", "qnnpack"])
def test_an_op_on_a_kernel_computes_what_it_says(kind: str) -> None:
    x = torch.tensor([[3, 4, 5], [13, 3, 3]], dtype=torch.uint8)
    run = on_kernel(kind, "linear", [x], LINEAR)
    # (0 1 2) and (10 0 0) after the zero point; products 4 -7 and 10 40; then the bias, half of it, and 100
    assert run(x).tolist() == [[107, 92], [110, 115]]


def test_what_no_kernel_takes_runs_as_it_is_written() -> None:
    x = torch.tensor([[3, 4, 5]], dtype=torch.uint8)
    zeros = torch.tensor([1, -1], dtype=torch.int32)
    run = on_kernel("qnnpack", "linear", [x], {**LINEAR, "w_zero_point": zeros})
    # products 4 and -7, less 3, which is the sum of what is read, times 1 and -1; half of 11 is rounded to the even 6
    assert run(x).tolist() == [[106, 93]]


def test_a_cache_makes_what_it_lacks_and_forgets_the_oldest() -> None:
    cache, made = KernelCache(), []

    def make(key: int) -> Any:
        made.append(key)
        return lambda: key

    for key in (1, 2, 1, 3, 4, 5):
        assert cache.made(key, lambda key=key: make(key))() == key  # type: ignore[misc]
    assert made == [1, 2, 3, 4, 5]
    assert cache.get(1) is None
    found = cache.get(2)
    assert found is not None
    assert found() == 2
    cache.clear()
    assert cache.get(5) is None


def test_kernels_are_no_part_of_copies_and_pickles() -> None:
    cache = KernelCache()
    cache.made("key", lambda: print)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):  # noqa: S301 - our own bytes
        assert other.get("key") is None
    assert cache.get("key") is print


def test_kernels_made_in_inference_mode_serve_outside_of_it() -> None:
    cache = KernelCache()
    with torch.inference_mode():
        held = cache.made("key", lambda: torch.zeros(2).add_)
    assert held(torch.ones(2).requires_grad_()).tolist() == [1.0, 1.0]
