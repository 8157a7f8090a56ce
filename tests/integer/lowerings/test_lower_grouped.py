"""Weights with a scale for each group: their Q/DQ form, and the integer product, against NumPy and torch's own ops."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.integer.library import OPS
from quantc.integer.lowerings.lower_grouped import linear_grouped
from quantc.ir.program import Program
from quantc.patterns import aten
from quantc.patterns.dsl import optional
from quantc.patterns.operand_patterns import const
from quantc.patterns.table import Rule, RuleTable
from quantc.qdq.registration import decomposed_ops
from quantc.spec.formats import PerGroup
from quantc.spec.spec import INT8_WEIGHT, INT16, UINT8, QuantSpec
from tests.support import fake_quantized as fake

SIZE = 8
WEIGHT = INT8_WEIGHT.but(granularity=PerGroup(axis=1, size=SIZE))
AFFINE4 = WEIGHT.but(scheme="affine", dtype="int4")
ROLES = {"x": "act", "w": "weight", "out": "act"}
GROUPED = Backend(
    "grouped",
    RuleTable(
        "grouped",
        (
            Rule("linear", aten.linear("x", const("w"), "b?") >> optional(aten.clamp), ROLES),
            Rule("conv", aten.conv("x", const("w"), "b?"), ROLES),
            Rule("matmul", aten.matmul("x", const("y")), {"x": "act", "y": "weight", "out": "act"}),
        ),
    ),
    roles={"act": UINT8, "weight": WEIGHT},
    summary="linear layers with a scale for each group, for tests",
)


# -- the op against NumPy ----------------------------------------------------------------------------------------------


def oracle(case: dict[str, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The sums of the groups in int64, and their float64 products added one after the other, in plain loops."""
    x = case["x"].astype(np.int64) - case["x_zero"]
    rows, groups = case["w_zero"].shape
    w = case["w"].astype(np.int64) - np.repeat(case["w_zero"], case["size"], axis=1)
    acc = np.einsum("bgs,ngs->gbn", x.reshape(len(x), groups, -1), w.reshape(rows, groups, -1))
    total = np.zeros(acc.shape[1:])
    for group in range(groups):
        product = acc[group].astype(np.float64) * case["multiplier"][:, group]
        total = product if group == 0 else total + product
    return acc, total + case["offset"]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size, groups, rows = draw(st.sampled_from([2, 3, 32, 300])), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(["uint8", "int8", "int16"]))
    limits = np.iinfo(np.dtype(dtype))
    affine = draw(st.booleans())
    return {
        "size": size,
        "x": rng.integers(limits.min, limits.max, (draw(st.integers(1, 4)), size * groups), dtype, endpoint=True),
        "x_zero": draw(st.integers(limits.min, limits.max)),
        "w": rng.integers(-128, 127, (rows, size * groups), np.int8, endpoint=True),
        "w_zero": rng.integers(-128, 127, (rows, groups)) if affine else np.zeros((rows, groups), np.int64),
        "multiplier": 2.0 ** rng.uniform(-20, -4, (rows, groups)),
        "offset": rng.normal(0, draw(st.sampled_from([0.0, 1.0, 1e4])), rows),
        "out_zero": draw(st.integers(0, 255)),
    }


def arguments(case: dict[str, Any]) -> tuple[Any, ...]:
    zeros = torch.from_numpy(case["w_zero"]) if case["w_zero"].any() else None
    return (torch.from_numpy(case["x"]), case["x_zero"], torch.from_numpy(case["w"]), zeros, case["size"])


@settings(max_examples=120)
@given(cases())
def test_products_of_groups_are_added_in_order_and_rounded_once(case: dict[str, Any]) -> None:
    _, total = oracle(case)
    numbers = (torch.from_numpy(case["offset"]), torch.from_numpy(case["multiplier"]), None)
    expected = np.clip(np.rint(total) + case["out_zero"], 0, 255).astype(np.uint8)
    for function in (linear_grouped, OPS["linear_grouped"].target):
        found = function(*arguments(case), *numbers, case["out_zero"], 0, 255, torch.uint8)
        np.testing.assert_array_equal(found.numpy(), expected)
        real = function(*arguments(case), *numbers, 0, 0, 0, torch.float32)
        np.testing.assert_array_equal(real.numpy().view(np.int32), total.astype(np.float32).view(np.int32))


@settings(max_examples=60)
@given(cases(), st.integers(28, 34))
def test_the_fixed_form_is_exact_in_integers(case: dict[str, Any], shift: int) -> None:
    acc, _ = oracle(case)
    mantissas = np.rint(case["multiplier"] * 2.0**shift).astype(np.int32)
    offset = np.rint(case["offset"] * 2.0**shift).astype(np.int64)
    place = torch.tensor(shift, dtype=torch.int32)
    numbers = (torch.from_numpy(offset), torch.from_numpy(mantissas), place)
    for function in (linear_grouped, OPS["linear_grouped"].target):
        found = function(*arguments(case), *numbers, case["out_zero"], 0, 255, torch.uint8)
        for (row, column), level in np.ndenumerate(found.numpy()):
            terms = [int(a) * int(m) for a, m in zip(acc[:, row, column], mantissas[column], strict=True)]
            exact = round(Fraction(sum(terms) + int(offset[column]), 2**shift)) + case["out_zero"]
            assert level == max(0, min(255, exact))


def test_the_order_of_the_groups_is_kept() -> None:
    """1e20 + 1 - 1e20 is 0 in this order, and 1 in others."""
    x, w = torch.ones(1, 6, dtype=torch.int8), torch.tensor([[1, 0, 1, 0, -1, 0]], dtype=torch.int8)
    multiplier = torch.tensor([[1e20, 1.0, 1e20]], dtype=torch.float64)
    for function in (linear_grouped, OPS["linear_grouped"].target):
        assert function(x, 0, w, None, 2, None, multiplier, None, 0, 0, 0, torch.float32).item() == 0.0


def test_the_op_is_traced_into_aten_ops() -> None:
    case = (torch.randint(0, 255, (2, 3, 6), dtype=torch.uint8), 7, torch.ones(4, 6, dtype=torch.int8), None, 3)
    rest = (None, torch.full((4, 2), 0.01, dtype=torch.float64), None, 5, 0, 255, torch.uint8)
    traced = make_fx(lambda x: linear_grouped(x, *case[1:], *rest))(case[0])
    assert {str(node.target).partition(".")[0] for node in traced.graph.nodes if node.op == "call_function"} == {"aten"}
    assert torch.equal(traced(case[0]), OPS["linear_grouped"].target(*case, *rest))
    assert traced(case[0]).shape == (2, 3, 4)


# -- end to end --------------------------------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 24), nn.ReLU6(), nn.Linear(24, 16, bias=False)).eval()


def prepared(backend: Backend = GROUPED) -> tuple[Program, Tensor]:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(4)) * 3
    program = qc.prepare(qc.capture(model(), (x,)), backend)
    qc.calibrate(program, [x])
    return program, x


def calls(program: Program, name: str) -> list[Any]:
    return [node for node in program.nodes() if name in str(node.target)]


@pytest.mark.parametrize("spec", [WEIGHT, AFFINE4], ids=["int8", "int4-affine"])
def test_the_stored_weight_has_the_bits_of_torchs_op(spec: QuantSpec) -> None:
    program, _ = prepared(GROUPED.but(weight=spec))
    quantized = qc.convert(program)
    quantized.verify()
    assert not calls(quantized, ".quantize_per_channel_group")
    first = calls(quantized, "dequantize_per_channel_group")[0]
    stored, scale, zero_point = (quantized.tensor(node) for node in first.args[:3])
    assert isinstance(stored, Tensor)
    assert isinstance(scale, Tensor)
    assert isinstance(zero_point, Tensor)
    assert stored.dtype == torch.int8
    assert scale.shape == zero_point.shape == (24, 32 // SIZE)
    ends = (spec.qmin, spec.qmax, torch.int8, SIZE)
    weight = model()[0].weight.detach()  # type: ignore[index]
    expected = decomposed_ops().quantize_per_channel_group(weight, scale, zero_point, *ends)
    assert torch.equal(stored, expected)
    restored = decomposed_ops().dequantize_per_channel_group(stored, scale, zero_point, *ends, torch.float32)
    assert ((restored - weight).abs() <= scale.repeat_interleave(SIZE, dim=1) * 0.501).all()


@pytest.mark.parametrize("spec", [WEIGHT, AFFINE4], ids=["int8", "int4-affine"])
@pytest.mark.parametrize("multiplier", ["float64", "fixed"])
def test_the_integer_form_is_within_a_step_of_q_dq_and_is_what_numpy_says(spec: QuantSpec, multiplier: Any) -> None:
    program, x = prepared(GROUPED.but(weight=spec))
    quantized, integer = qc.convert(program), qc.convert(program, to="integer", multiplier=multiplier)
    integer.verify()
    assert len(calls(integer, "quantc.linear_grouped")) == 2
    assert not calls(integer, "quantized_decomposed")
    step = quantized.plan.qparams[quantized.plan.groups[-1].name].scale.max().item()
    steps = (quantized(x) - integer(x)).abs() / step
    assert steps.max() < 1.5
    assert (steps > 0.5).float().mean() < 0.02
    np.testing.assert_array_equal(integer(x).detach().numpy(), by_hand(quantized, x.numpy()))


def by_hand(program: Program, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the integer form computes, from the numbers in the Q/DQ program."""
    quantizers = calls(program, ".quantize_per_tensor")
    weights = calls(program, "dequantize_per_channel_group")
    biases = [model()[0].bias.detach().double().numpy(), 0.0]  # type: ignore[index]
    scale, zero = quantizers[0].args[1:3]
    level = np.clip(np.rint(x * np.float32(1 / scale)) + zero, 0, 255)
    for index, bounds in enumerate([(0.0, 6.0), (-np.inf, np.inf)]):
        stored, w_scale, w_zero = (program.tensor(node).numpy() for node in weights[index].args[:3])  # type: ignore[union-attr]
        out_scale, out_zero = quantizers[index + 1].args[1:3]
        case = {
            "x": level.astype(np.int64),
            "x_zero": zero,
            "w": stored,
            "w_zero": w_zero,
            "size": SIZE,
            "multiplier": np.float64(scale) * w_scale.astype(np.float64) / np.float64(out_scale),
            "offset": biases[index] / np.float64(out_scale),
        }
        low, high = (np.clip(np.rint(bound / out_scale) + out_zero, 0, 255) for bound in bounds)
        level = np.clip(np.rint(oracle(case)[1]) + out_zero, low, high)
        scale, zero = out_scale, out_zero
    reals: np.ndarray[Any, Any] = (level.astype(np.float32) - np.float32(zero)) * np.float32(scale)
    return reals


@pytest.mark.parametrize("multiplier", [pytest.param("float64", marks=pytest.mark.slow), "fixed"])
def test_export_compile_and_decomposition_agree(multiplier: Any) -> None:
    program, x = prepared(GROUPED.but(weight=AFFINE4))
    integer = qc.convert(program, to="integer", multiplier=multiplier)
    expected = integer(x)
    decomposed = qc.convert(program, to="integer", multiplier=multiplier, style="decomposed")
    decomposed.verify()
    assert not calls(decomposed, "quantc.")
    assert torch.equal(decomposed(x), expected)
    assert torch.equal(torch.export.export(integer.module, (x,)).module()(x), expected)
    assert torch.equal(torch.compile(integer.module)(x), expected)


def test_a_weight_that_stays_in_float_is_dequantized_in_aten_with_the_same_bits() -> None:
    """Nothing computes a product with a computed bias on integers, so the whole op stays in float."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 16, generator=torch.Generator().manual_seed(5)))

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight, shift.tanh())

    inputs = (torch.randn(9, 16, generator=torch.Generator().manual_seed(6)), torch.ones(6))
    program = qc.prepare(qc.capture(Shifted().eval(), inputs), GROUPED.but(weight=AFFINE4))
    qc.calibrate(program, [inputs])
    quantized, integer = qc.convert(program), qc.convert(program, to="integer")
    assert "not a constant" in " ".join(integer.plan.left_float.rows.values())
    assert not calls(integer, "quantized_decomposed")
    assert torch.equal(quantized(*inputs), integer(*inputs))


def test_groups_of_convolutions_and_of_columns_are_quantized_as_matrices() -> None:
    """torch's ops know groups along the rows of a matrix alone; other weights are brought into that shape and back."""
    generator = torch.Generator().manual_seed(8)
    images, rows = torch.randn(2, 8, 5, 5, generator=generator), torch.randn(2, 32, generator=generator)
    conv, line = nn.Conv2d(8, 4, 3).eval(), nn.Linear(32, 16).eval()
    columns = GROUPED.but(weight=WEIGHT.but(granularity=PerGroup(axis=0, size=SIZE)))
    for layer, x, backend, axis in ((conv, images, GROUPED, 1), (line, rows, columns, 0)):
        prepared = qc.prepare(qc.capture(layer, (x,)), backend)
        qc.calibrate(prepared, [x])
        by_hand = copy.deepcopy(layer)
        by_hand.weight.data = fake.weight_by_group(layer.weight, SIZE, WEIGHT.qmin, WEIGHT.qmax, axis=axis)
        right = fake.known(by_hand(fake.known(x, x)), layer(x))
        assert torch.equal(qc.convert(prepared)(x), right)


def test_sums_of_groups_that_32_bits_might_not_hold_stay_in_float() -> None:
    wide = GROUPED.but(act=INT16, weight=WEIGHT.but(granularity=PerGroup(axis=1, size=1024)))
    x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(7))
    layer = nn.Linear(1024, 2, bias=False).eval()
    with torch.no_grad():
        layer.weight.fill_(0.5)
    program = qc.prepare(qc.capture(layer, (x,)), wide)
    qc.calibrate(program, [x])
    integer = qc.convert(program, to="integer")
    assert "more than 32 bits hold" in " ".join(integer.plan.left_float.rows.values())
