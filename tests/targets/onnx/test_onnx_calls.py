"""Every ONNX writer over its arguments, in ONNX Runtime, held against torch; and what such searches found."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random

import pytest

from quantc.ir.size_expressions import least
from quantc.targets.onnx.op_writers import entries
from tests.support import onnx_draws, onnx_draws_layers, onnx_draws_moves
from tests.support.onnx_calls import DRAWERS, Case, Verdict, drawn, verdict_of

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
DRAWN = (onnx_draws, onnx_draws_moves, onnx_draws_layers)
"""Where the draws are."""
EXPLAINED = (
    r"cells of several sizes",
    r"depends on the data",
    r"is indexed by a mask",
    r"parts of sizes that vary",
    r"the sizes of .* vary",
    r"reads a lone sequence",
    r"rounds the number of its windows up, and its sizes vary",
    r"repeats along an axis whose size varies",
)
"""Why calls may be refused, each by name."""
SPELLED_OTHERWISE = {
    *(f"aten.{name}.default" for name in ("_to_copy", "_unsafe_view", "alias", "amax", "bmm", "mean", "mm", "numpy_T")),
    *(f"aten.{name}.default" for name in ("sum", "t", "type_as", "view")),
    *("detach", "dropout", "max_pool2d_with_indices"),
}
"""Ops that `qc.capture` has written otherwise by the time they are exported."""
OF_SIZES = {"operator:", "torch:sym", "sym_size"}
RUN_TIME = {
    "quantc.choose_qparams.default",
    "quantc.dequantize_float.default",
    "quantized_decomposed.choose_qparams.tensor",
    "quantized_decomposed.quantize_per_tensor.tensor",
    "quantized_decomposed.dequantize_per_tensor.tensor",
    "quantized_decomposed.quantize_per_token.default",
    "quantized_decomposed.dequantize_per_token.default",
}
"""Ops that need others beside them: see `test_sizes_that_vary` and `test_scales_found_at_run_time`."""


def calls(rounds: int) -> Iterator[tuple[Case, Verdict]]:
    for op in sorted(DRAWERS):
        for seed in range(rounds):
            case = drawn(op, seed)
            yield case, verdict_of(case)


def unexplained(found: list[tuple[Case, Verdict]]) -> list[str]:
    """Calls that came out otherwise than in torch, or were refused for a reason that is not known."""
    return [
        f"{case}: {verdict.kind}: {verdict.told}"
        for case, verdict in found
        if verdict.kind == "wrong"
        or (verdict.kind == "refused" and not any(re.search(reason, verdict.told) for reason in EXPLAINED))
    ]


def test_calls_are_what_torch_has() -> None:
    rng = Random(0)
    ops = rng.sample(sorted(DRAWERS), 40)
    found = [(case, verdict_of(case)) for case in (drawn(op, rng.randrange(100)) for op in ops)]
    assert not unexplained(found)
    assert sum(verdict.kind == "same" for _, verdict in found) > 34


@pytest.mark.slow
def test_every_writer_over_its_arguments() -> None:
    found = list(calls(8))
    kinds = [verdict.kind for _, verdict in found]
    assert not unexplained(found)
    assert kinds.count("same") >= 1500
    assert kinds.count("illegal") < 20
    reached = set().union(*(verdict.ops for _, verdict in found))
    missing = (
        set(entries())
        - reached
        - RUN_TIME
        - {op for op in entries() if any(op.startswith(start) for start in OF_SIZES)}
    )
    assert missing <= SPELLED_OTHERWISE


def test_every_writer_has_draws() -> None:
    named = set(DRAWERS) | RUN_TIME | {op for op in entries() if any(op.startswith(start) for start in OF_SIZES)}
    assert set(entries()) <= named


def test_least_values_of_sizes() -> None:
    ranges = {"a": (2, None), "b": (3, 8)}
    told = {
        "a": 2,
        "2*a + 1": 5,
        "a*b": 6,
        "b - 1": 2,
        "b//2": 1,
        "Max(1, a)": 2,
        "a - b": None,
        "c": None,
        "a +": None,
    }
    assert {text: least(text, ranges) for text in told} == told
