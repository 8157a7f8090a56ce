"""`compile=True`: kernels are islands that are opaque to the compiler, and the rest is compiled."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config

import quantc as qc
from quantc.errors import MissingDependencyError
from quantc.ir.program import Program
from quantc.ir.types import TensorType
from quantc.targets.kernels.compiled_islands import RUN_ISLAND, Island, Yield, check_compiler
from tests.support.lowered_nets import dynamic_program, image, static_program


@pytest.fixture(params=[static_program, dynamic_program], ids=["static", "dynamic"])
def program(request: pytest.FixtureRequest) -> Program:
    found: Program = request.param()
    return found


@pytest.mark.slow
def test_the_rest_is_compiled_on_request(program: Program) -> None:
    torch._dynamo.reset()
    plain, made = qc.lower(program, "x86"), qc.lower(program, "x86", compile=True)
    assert made.headline == f"{plain.headline}, the rest compiled"
    assert made.to_data()["compiled"]
    for batch in (4, 5, 1, 0):
        for found, expected in zip(made(image(batch)), plain(image(batch)), strict=True):
            assert found.shape == expected.shape
            assert found.stride() == expected.stride()
            if batch:
                assert float((found - expected).norm() / expected.norm()) < 0.02
    with torch.inference_mode():
        made(image(4))
    again = pickle.loads(pickle.dumps(made))  # noqa: S301 - our own bytes
    assert again.is_compiled


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 16)), (8, 16)),
        (
            nn.Sequential(nn.Conv2d(4, 4, 1), nn.SiLU(), nn.Conv2d(4, 4, 1), nn.Hardswish(), nn.Conv2d(4, 4, 1)),
            (2, 4, 6, 6),
        ),
    ],
    ids=["linear", "conv"],
)
def test_kernels_that_round_for_themselves_are_not_taken_for_quantize_ops(model: nn.Module, shape: Any) -> None:
    """Of one size throughout: a layer that is left out would not be seen in a shape."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    found = qc.quantize(model.eval(), (x,), [(x,)]).program
    plain, made = qc.lower(found, "x86"), qc.lower(found, "x86", compile=True)
    assert float((made(x) - plain(x)).norm() / plain(x).norm()) < 0.02


def test_a_missing_compiler_is_told_before_anything_is_compiled() -> None:
    with (
        config.patch({"cpp.cxx": ("no-such-compiler", None)}),
        pytest.raises(MissingDependencyError, match="no-such-compiler") as caught,
    ):
        qc.lower(static_program(), "x86", compile=True)
    assert "or lower without compile=True" in str(caught.value.advice)


# -- islands -----------------------------------------------------------------------------------------------------------


def island(forward: Any, kinds: Sequence[TensorType], *yields: Yield, written: Sequence[int] = ()) -> Island:
    module = torch.fx.symbolic_trace(forward)
    return Island(module, kinds, yields, frozenset(written))


ROW = TensorType(torch.float32, ("n", 3))
PLAIN = Yield(ROW, torch.contiguous_format)


def test_an_island_is_an_op_that_runs_its_kernels() -> None:
    made = island(lambda x, y: [x + y, x * y], [ROW, ROW], PLAIN, PLAIN)
    x, y = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    total, product = RUN_ISLAND([x, y], made.key)
    assert torch.equal(total, x + 1)
    assert torch.equal(product, x)


def test_results_of_an_island_share_memory_neither_with_inputs_nor_with_each_other() -> None:
    def forward(x: Any) -> Any:
        doubled = x + x
        return [x, doubled, doubled, x.reshape(-1, 3)]

    x = torch.arange(6.0).reshape(2, 3)
    made = island(forward, [ROW], PLAIN, PLAIN, PLAIN, PLAIN)
    found = RUN_ISLAND([x], made.key)
    assert len({part.data_ptr() for part in (x, *found)}) == 5
    assert torch.equal(found[2], 2 * x)


def test_results_lie_in_the_order_that_was_promised() -> None:
    kind = TensorType(torch.float32, (1, 2, 3, 4))
    made = island(lambda x: [x * 2], [kind], Yield(kind, torch.channels_last))
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    (found,) = RUN_ISLAND([x], made.key)
    assert found.stride() == x.to(memory_format=torch.channels_last).stride()
    assert torch.equal(found, x * 2)


def test_an_input_that_a_kernel_writes_over_is_copied_first() -> None:
    made = island(lambda x, y: [x + y.add_(1)], [ROW, ROW], PLAIN, written=[1])
    x, y = torch.zeros(2, 3), torch.zeros(2, 3)
    assert bool((made.run([x, y])[0] == 1).all())
    assert not y.any()


def test_shapes_follow_the_sizes_of_the_inputs() -> None:
    wide = Yield(TensorType(torch.int8, ("2*n", 5)), torch.contiguous_format)
    made = island(lambda x: [x], [ROW], wide)
    (found,) = made.shapes([torch.empty(4, 3, device="meta")])
    assert (found.shape, found.dtype) == ((8, 5), torch.int8)


def test_a_compiler_is_looked_for_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "some-compiler"
    monkeypatch.setenv("PATH", str(tmp_path))
    with config.patch({"cpp.cxx": (None, compiler.name)}):
        with pytest.raises(MissingDependencyError, match=compiler.name) as caught:
            check_compiler()
        assert "CXX" in str(caught.value.advice)
        compiler.write_text("#!/bin/sh\n", encoding="utf-8")
        compiler.chmod(0o755)
        check_compiler()
    with config.patch({"cpp.cxx": str(compiler)}):
        check_compiler()
