"""Programs with products that find their scales as they run: the proof, coverage, torch.export, torch.compile, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.integer.proof.overflow_report import accumulators
from quantc.ir.dialect import argument
from quantc.spec.spec import QuantSpec
from tests.support.dynamic_programs import CASES, UINT8, dear, every_case, every_spec, forms, prepared, seeded
from tests.support.integer_oracle_dynamic import Forms

pytestmark = pytest.mark.filterwarnings("ignore")

# -- the proof -------------------------------------------------------------------------------------------------------


@every_case
def test_the_proof_counts_them_as_products_of_integers_in_both_forms(name: str) -> None:
    found, _ = forms(name)
    before, after = accumulators(found.qdq).rows, accumulators(found.integer).rows
    assert len(before) == len(after) == len(CASES[name][-1])
    for one, other in zip(before, after, strict=True):
        assert (one.node, one.low, one.high, one.bits) == (other.node, other.low, other.high, other.bits)
        assert [pair.high for pair in one.pairs] == [pair.high for pair in other.pairs]


def test_the_bounds_are_reached() -> None:
    """Weights all 127; the scale of numbers from -1 to 1 is such that they are 255 steps apart."""
    layer = nn.Linear(6, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    integer = qc.convert(prepared(layer, (seeded(1, 6),), UINT8), to="integer", reduce_range="no")
    (row,) = accumulators(integer).rows
    assert (row.low, row.high) == (-6 * 127 * 255, 6 * 127 * 255)
    (scale,) = (float(integer.tensor(node)) for node in integer.nodes() if "weight_scale" in str(node.target))  # type: ignore[arg-type]
    for sign in (1, -1):
        x = torch.full((1, 6), float(sign))
        assert round(float(integer(x)) / (scale / 255)) == sign * 6 * 127 * 255


@pytest.mark.parametrize("reduce_range", ["weights", "activations"])
@every_spec
def test_ranges_are_reduced_so_that_pairs_fit(spec: QuantSpec, reduce_range: Any) -> None:
    x = seeded(9, 32, seed=12)
    program = prepared(nn.Linear(32, 8), (x,), spec)
    full = accumulators(qc.convert(program, reduce_range="no"))
    safe = qc.convert(program, reduce_range=reduce_range)
    assert full.is_safe == (spec.qmax == 127)
    assert accumulators(safe).is_safe
    integer = qc.convert(program, to="integer", reduce_range=reduce_range)
    assert accumulators(integer).is_safe
    found = Forms(safe, integer)
    assert found.differences((x,)) == []
    if not full.is_safe and reduce_range == "activations":
        (node,) = [node for node in integer.nodes() if "linear_dynamic" in str(node.target)]
        assert argument(node, "qmax") == 127


# -- other tools ------------------------------------------------------------------------------------------------------


@dear
@pytest.mark.parametrize("style", ["fused", "decomposed"])
def test_they_are_exported_compiled_and_saved(name: str, style: str, tmp_path: Path) -> None:
    found, inputs = forms(name, style=style)
    expected = found.integer(*inputs)
    torch._dynamo.reset()
    path = tmp_path / "program.qc"
    found.integer.save(path)
    others: list[Any] = [
        torch.export.export(found.integer.module, inputs).module(),
        torch.compile(found.integer.module, backend="aot_eager", fullgraph=True),
        qc.load(path),
    ]
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(other(*inputs), expected, strict=True))


@pytest.mark.parametrize("name", ["convolutions", "matrices, tokens"])
@pytest.mark.parametrize("style", ["fused", "decomposed"])
def test_a_dynamic_batch_stays_dynamic(name: str, style: Any, tmp_path: Path) -> None:
    model, inputs, spec, named, _ = CASES[name]
    program = prepared(model, inputs, spec, *named, dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    integer = qc.convert(program, to="integer", style=style)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(integer.module, inputs, dynamic_shapes=({0: batch},)).module()
    integer.save(tmp_path / "program.qc")
    loaded = qc.load(tmp_path / "program.qc")
    for rows in (1, 2, 7):
        x = seeded(rows, *inputs[0].shape[1:], seed=rows)
        expected = integer(x)
        for other in (exported, loaded):
            assert all(torch.equal(one, two) for one, two in zip(other(x), expected, strict=True))


@every_case
def test_coverage_counts_their_multiply_adds_as_those_of_bytes(name: str) -> None:
    found, _ = forms(name)
    before, after = found.qdq.coverage(), found.integer.coverage()
    assert after.int8_share == before.int8_share == 1.0
    assert after.macs == before.macs
