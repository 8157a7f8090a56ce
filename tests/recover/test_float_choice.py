"""Which ops may be left float, and when enough of them are."""

from __future__ import annotations

import quantc as qc
from quantc.recover.float_choice import _most_quantized, candidates
from tests.support.costly_nets import NETS


def test_bisection_finds_the_last_count_within_the_limit() -> None:
    for limit in range(-1, 12):
        assert _most_quantized(float, 10, limit) == min(max(limit, 0), 10)


def test_large_products_are_no_candidates() -> None:
    case = NETS["post-norm encoder, outliers"]()
    program = qc.prepare(qc.capture(case.model, (case.batches[0],)), "qnnpack")
    light = {each.nodes[0].target.name() for each in candidates(program, 0.0)}  # type: ignore[union-attr]
    assert {"aten::layer_norm", "aten::add.Tensor", "aten::gelu"} <= light
    assert "aten::linear" not in light
    every = candidates(program, 1.0)
    assert any(each.nodes[0].target.name() == "aten::linear" for each in every)  # type: ignore[union-attr]
    assert 0.5 < sum(each.macs for each in every) <= 1 + 1e-9
    assert sum(each.elements for each in every) <= 1 + 1e-9
