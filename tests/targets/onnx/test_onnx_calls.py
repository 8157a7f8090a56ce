"""Every ONNX writer over its arguments, in ONNX Runtime, held against torch; and what such searches found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

import quantc as qc
from quantc.ir.size_expressions import least
from quantc.targets.onnx.onnx_export import export
from quantc.targets.onnx.op_writers import entries
from quantc.targets.onnx.profiles import PROFILES
from quantc.targets.onnx.sessions import OnnxRuntime
from tests.support import onnx_draws, onnx_draws_layers, onnx_draws_moves, onnx_draws_sizes
from tests.support.onnx_calls import DRAWERS, Case, Verdict, difference, drawn, verdict_of
from tests.support.onnx_functions import Function, check

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
    ops = rng.sample(sorted(DRAWERS), 80)
    found = [(case, verdict_of(case)) for case in (drawn(op, rng.randrange(100)) for op in ops)]
    assert not unexplained(found)
    assert sum(verdict.kind == "same" for _, verdict in found) > 70


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


@pytest.mark.parametrize("name", onnx_draws_sizes.ON_SIZES)
def test_sizes_that_vary(name: str) -> None:
    module = Function(onnx_draws_sizes.ON_SIZES[name]).eval()
    x = torch.randn(6, 4)
    captured = qc.capture(module, (x,), dynamic_shapes=({0: Dim("batch", min=4, max=64)},))
    program = qc.pipelines.inference().run_on_copy(captured)
    for size in (6, 5, 7, 8, 13):
        check(module, program, torch.randn(size, 4))


@pytest.mark.parametrize("name", onnx_draws_sizes.RUN_TIME)
def test_scales_found_at_run_time(name: str) -> None:
    module = Function(onnx_draws_sizes.RUN_TIME[name]).eval()
    x = torch.randn(6, 4)
    program = qc.capture(module, (x,))
    exported = export(program, PROFILES["onnxruntime"])
    session = OnnxRuntime(exported.model.SerializeToString(), 1)
    for size in (1.0, 1e-3, 100.0):
        for given in (x * size, x.abs() * size, -x.abs() * size, x * 0):
            step = float(given.abs().max()) / 100 + 1e-5
            assert difference(module(given), session([given])[0], step) is None


NAMED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "softplus-threshold": (lambda x: F.softplus(x, 0.5, 0.5), (torch.linspace(-4, 4, 33),)),
    "softmax-of-one": (lambda x: x.softmax(1) + x.log_softmax(1), (torch.randn(4, 1, 3) * 40,)),
    "softmax-of-a-number": (lambda x: x.softmax(0), (torch.tensor(3.0),)),
    "average-rounded-up": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (torch.randn(2, 3, 8, 8),)),
    "average-of-real-ones": (lambda x: F.avg_pool2d(x, 3, 2, 1, True, False), (torch.randn(2, 3, 8, 8),)),
    "average-beyond-the-end": (lambda x: F.avg_pool1d(x, 1, 3, 0, True), (torch.randn(2, 3, 8),)),
    "average-own-divisor": (lambda x: F.avg_pool2d(x, 2, 2, 1, divisor_override=3), (torch.randn(2, 3, 8, 8),)),
    "max-rounded-up": (lambda x: F.max_pool2d(x, (3, 1), (1, 3), (1, 0), (1, 2), True), (torch.randn(1, 8, 6),)),
    "floor-divide": (lambda x: x // 0.3, (torch.arange(-40, 40) * 0.3,)),
    "floor-divide-mode": (lambda x: torch.div(x, -0.1, rounding_mode="floor"), (torch.arange(-40, 40) * 0.1,)),
    "remainder": (lambda x: x % 0.7, (torch.arange(-40, 40) * 0.35,)),
    "flip-nothing": (lambda x: x.flip(()), (torch.randn(3, 4),)),
    "squeeze-nothing": (lambda x: torch.ops.aten.squeeze.dims(x, []), (torch.randn(1, 4),)),
    "narrow-from-the-end": (lambda x: x.narrow(1, -2, 2), (torch.randn(3, 4),)),
    "attention-of-nothing": (
        lambda x: F.scaled_dot_product_attention(x, x, x, torch.zeros(5, 5).bool()),
        (torch.randn(2, 5, 4),),
    ),
    "compare-bools": (lambda x: (x > 0) > (x > 1), (torch.randn(9),)),
    "arange-of-floats": (lambda x: x + torch.arange(0.1, -4.9, -1), (torch.randn(1),)),
    "argmax-kept": (lambda x: x.argmax(keepdim=True), (torch.randn(3, 4),)),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_the_search_found(name: str) -> None:
    function, inputs = NAMED[name]
    module = Function(function).eval()
    program = qc.pipelines.inference().run_on_copy(qc.capture(module, inputs))
    check(module, program, *inputs)


SQUEEZED: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x.squeeze(),
    "first": lambda x: x.squeeze(0),
    "several": lambda x: x.squeeze((0, 1)),
    "of-a-sum": lambda x: torch.cat([x, x[:1]]).narrow(0, 0, x.shape[0]).squeeze(0),
}


@pytest.mark.parametrize("name", SQUEEZED)
def test_squeeze_of_a_size_that_varies_is_refused(name: str) -> None:
    program = qc.capture(Function(SQUEEZED[name]).eval(), (torch.randn(4, 5),))
    assert program.signature.ranges == {"batch": (1, None)}
    with pytest.raises(qc.QuantcError, match="no ONNX form") as caught:
        export(program, PROFILES["onnxruntime"])
    assert "takes axis 0 away depends on a size that varies (batch)" in str(caught.value)


@pytest.mark.parametrize("name", SQUEEZED)
def test_squeeze_of_a_size_from_two_on_takes_nothing_away(name: str) -> None:
    module = Function(SQUEEZED[name]).eval()
    program = qc.capture(module, (torch.randn(4, 5),), dynamic_shapes=({0: Dim("batch", min=2, max=32)},))
    for size in (2, 7):
        check(module, program, torch.randn(size, 5))


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
