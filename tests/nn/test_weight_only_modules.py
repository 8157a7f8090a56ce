"""Kernels on stored weights: tables, and all of them as modules that are copied, saved and shared among threads."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import quantc as qc
from quantc import QuantSpec
from quantc.errors import DataError
from quantc.integer.library import OPS
from quantc.targets.kernels.embedding import EmbeddingLookup
from tests.support.stored_weights import (
    FORMATS,
    kernels,
    lowered,
    needs_fbgemm,
)

# -- tables --------------------------------------------------------------------------------------------------------------


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest float32 tensor that any op makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for item in made if isinstance(made, tuple | list) else [made]:
            if isinstance(item, Tensor) and item.dtype == torch.float32:
                self.largest = max(self.largest, item.numel())
        return made


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 32)
        self.bag = nn.EmbeddingBag(500, 32, mode="mean", padding_idx=3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.table(x) + self.bag(x).unsqueeze(1)
        return found


@pytest.mark.parametrize("target", ["x86", "qnnpack"])
@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
def test_tables_have_the_bits_of_float_and_never_become_float(spec: QuantSpec, target: str) -> None:
    x = torch.randint(0, 500, (3, 7))
    x[1] = 3
    program, module = lowered(Tables(), x, spec, target)
    lookup = "EmbeddingLookup" if spec.dtype.value.startswith("fp") else "ByteLookup"
    assert [type(kernel).__name__ for kernel in kernels(module)] == [lookup, "BagLookup"]
    assert torch.equal(module(x), program(x))
    with Sizes() as sizes:  # type: ignore[no-untyped-call]
        module(x)
        module.program(x)
    assert 0 < sizes.largest < 500 * 32


@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (2, 0)])
def test_indices_of_any_shape(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    program, module = lowered(nn.Embedding(50, 32), torch.randint(0, 50, (3, 7)), spec)
    (kernel,) = kernels(module)
    x = torch.randint(0, 50, shape)
    plain = [node for node in program.nodes() if "dequantize" in str(node.target)]
    table = plain[0].target(*(program.tensor(arg) if isinstance(arg, torch.fx.Node) else arg for arg in plain[0].args))
    assert torch.equal(kernel(x), F.embedding(x, table))


def test_indices_beyond_the_table_are_refused() -> None:
    (kernel,) = kernels(lowered(nn.Embedding(50, 32), torch.randint(0, 50, (3, 7)), qc.INT4_GROUP)[1])
    for index in (50, -1, 2**40):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            kernel(torch.tensor([index]))


def test_empty_bags() -> None:
    op = OPS["embedding_bag_weight_only"]
    w, scale = torch.ones(4, 3, dtype=torch.int8), torch.ones(4)
    none, offsets = torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0])
    arguments = (w, scale, None, 0, None, none, offsets, 0, None, False, None)
    assert torch.equal(op.target(*arguments), op.reference(*arguments))
    assert torch.equal(op.target(*arguments), torch.zeros(2, 3))


# -- as modules ----------------------------------------------------------------------------------------------------------


@needs_fbgemm
@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
def test_copies_and_state_dicts_hold_what_is_stored(spec: QuantSpec) -> None:
    x = torch.randn(5, 96)
    _, module = lowered(nn.Linear(96, 128), x, spec)
    expected = module(x)
    (kernel,) = kernels(module)
    assert kernel._packed is not None
    plain = kernel.state_dict()
    assert plain["w"].dtype == spec.dtype.storage
    assert all(type(tensor) is Tensor for tensor in plain.values())
    (twin,) = kernels(copy.deepcopy(module))
    assert twin._packed is None
    assert torch.equal(twin(x), expected)
    with io.BytesIO() as file:
        torch.save(kernel, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(x), expected)


@needs_fbgemm
def test_another_state_dict_is_packed_anew() -> None:
    x = torch.randn(5, 96)
    torch.manual_seed(0)
    (one,) = kernels(lowered(nn.Linear(96, 128), x, qc.INT8_WEIGHT_ONLY)[1])
    (other,) = kernels(lowered(nn.Linear(96, 128), x, qc.INT8_WEIGHT_ONLY)[1])
    assert not torch.equal(one(x), other(x))
    one.load_state_dict(other.state_dict())
    assert torch.equal(one(x), other(x))


@needs_fbgemm
def test_weights_that_became_inexact_are_refused() -> None:
    x = torch.randn(5, 96)
    (kernel,) = kernels(lowered(nn.Linear(96, 128), x, qc.INT4_GROUP)[1])
    kernel.load_state_dict({**kernel.state_dict(), "scale": torch.rand(128, 3) + 0.1})
    with pytest.raises(DataError, match="not exact in float16"):
        kernel(x)


@needs_fbgemm
def test_threads_may_call_it_at_once() -> None:
    x = torch.randn(3, 256)
    _, module = lowered(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)), x, qc.INT8_WEIGHT_ONLY)
    batches = [torch.randn(3, 256) for _ in range(4)]
    expected = [copy.deepcopy(module)(batch) for batch in batches]
    wrong: list[int] = []

    def work(index: int) -> None:
        wrong.extend(index for _ in range(20) if not torch.equal(module(batches[index]), expected[index]))

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@needs_fbgemm
def test_inputs_that_want_gradients_are_computed_with() -> None:
    x = torch.randn(5, 96)
    for spec in (qc.INT8_WEIGHT_ONLY, qc.INT4_GROUP):
        (kernel,) = kernels(lowered(nn.Linear(96, 128), x, spec)[1])
        assert torch.equal(kernel(x.clone().requires_grad_()).detach(), kernel(x))


@needs_fbgemm
def test_what_is_returned_is_the_callers() -> None:
    x = torch.randn(5, 96)
    _, module = lowered(nn.Linear(96, 128), x, qc.INT8_WEIGHT_ONLY)
    first = module(x)
    kept = first.clone()
    module(torch.randn(5, 96)).zero_()
    assert torch.equal(first, kept)


def test_saved_and_loaded_it_is_the_same(tmp_path: Any) -> None:
    x = torch.randn(5, 96)
    for spec in FORMATS.values():
        _, module = lowered(nn.Linear(96, 128), x, spec)
        module.save(tmp_path / "net.qc")
        again = qc.lower(qc.load(tmp_path / "net.qc"), "x86")
        assert [row.kernel for row in again.placed] == [row.kernel for row in module.placed]
        assert torch.equal(again(x), module(x))


def test_a_table_of_fp8_is_kept_in_float16_only_where_it_is_packed() -> None:
    _, module = lowered(nn.Embedding(50, 32), torch.randint(0, 50, (3, 7)), qc.FP8_E4M3_WEIGHT)
    (kernel,) = kernels(module)
    assert isinstance(kernel, EmbeddingLookup)
    assert kernel.pack().rows.dtype == torch.float16
    assert kernel.state_dict()["w"].dtype == torch.float8_e4m3fn
