"""Tables that are stored quantized: rows are looked up as integers, and have the bits of the Q/DQ form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.integer.library import OPS
from quantc.integer.lowerings.lower_embedding import embedding
from quantc.ir.program import Program
from quantc.patterns import aten
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.spec import INT8_TENSOR_WEIGHT, INT8_WEIGHT, UINT8, QuantSpec

TABLES = Backend(
    "tables",
    RuleTable("tables", (Rule("embedding", aten.embedding, {"w": "weight"}),)),
    roles={"act": UINT8, "weight": INT8_WEIGHT},
    summary="tables alone, for tests",
)
SPECS = {
    "a scale for each row": INT8_WEIGHT,
    "affine": INT8_WEIGHT.but(scheme="affine"),
    "one scale": INT8_TENSOR_WEIGHT,
    "uint8 affine, one scale": INT8_TENSOR_WEIGHT.but(dtype="uint8", scheme="affine"),
}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(40, 12, padding_idx=0)
        with torch.no_grad():
            self.table.weight.mul_(torch.logspace(-3, 3, 40).unsqueeze(1)).add_(0.3)

    def forward(self, words: Tensor) -> Any:
        return self.table(words)


def prepared(spec: QuantSpec) -> tuple[Program, Tensor]:
    words = torch.randint(0, 40, (5, 9), generator=torch.Generator().manual_seed(2))
    return qc.prepare(qc.capture(Words().eval(), (words,)), TABLES.but(weight=spec)), words


def targets(program: Program) -> list[str]:
    return [str(node.target) for node in program.nodes() if node.op == "call_function"]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_rows_have_the_bits_of_q_dq(spec: QuantSpec) -> None:
    program, words = prepared(spec)
    quantized, integer = qc.convert(program), qc.convert(program, to="integer")
    integer.verify()
    assert targets(integer) == ["quantc.embedding.default"]
    found, expected = integer(words), quantized(words)
    assert found.dtype == torch.float32
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_export_compile_and_decomposition_agree(spec: QuantSpec) -> None:
    program, words = prepared(spec)
    integer = qc.convert(program, to="integer")
    expected = integer(words)
    assert torch.equal(torch.export.export(integer.module, (words,)).module()(words), expected)
    assert torch.equal(torch.compile(integer.module)(words), expected)
    decomposed = qc.convert(program, to="integer", style="decomposed")
    decomposed.verify()
    assert not any("quantc" in target for target in targets(decomposed))
    assert torch.equal(decomposed(words), expected)


def test_the_op_is_what_numpy_says() -> None:
    rng = np.random.default_rng(3)
    w, zeros = rng.integers(-128, 128, (6, 4), np.int8), rng.integers(-9, 9, 6)
    scales, indices = rng.uniform(1e-4, 3, 6).astype(np.float32), rng.integers(0, 6, (2, 3))
    exact = (w.astype(np.int64) - zeros[:, None]).astype(np.float64) * scales[:, None].astype(np.float64)
    arguments = [torch.from_numpy(item) for item in (w, zeros, scales, indices)]
    for function in (embedding, OPS["embedding"].target, make_fx(embedding)(*arguments)):
        np.testing.assert_array_equal(function(*arguments).numpy(), exact.astype(np.float32)[indices])


def test_scales_along_the_columns_stay_in_float() -> None:
    program, words = prepared(INT8_WEIGHT.but(granularity={"kind": "per-channel", "axis": 1}))
    integer = qc.convert(program, to="integer")
    assert "not one for each row" in " ".join(integer.plan.left_float.rows.values())
    assert not any("quantized_decomposed" in target for target in targets(integer))
    assert torch.equal(integer(words), qc.convert(program)(words))
