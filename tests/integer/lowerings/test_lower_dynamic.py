"""Programs with products that find their scales as they run: the numbers, what stays float, and seeded faults."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._higher_order_ops.out_dtype import out_dtype

import quantc as qc
from quantc import QuantConfig
from quantc.errors import VerifyError
from quantc.integer.region_check import check_integer_form, stray_floats
from quantc.ir.program import Program
from quantc.ir.types import tensor_type
from quantc.spec.spec import QuantSpec
from tests.support.dynamic_programs import (
    CASES,
    PAIR,
    SYMMETRIC,
    TOKEN,
    UINT8,
    dear,
    every_case,
    every_spec,
    forms,
    left,
    prepared,
    ready,
    seeded,
)
from tests.support.integer_oracle_dynamic import Forms

pytestmark = pytest.mark.filterwarnings("ignore")

# -- numbers ---------------------------------------------------------------------------------------------------------


@every_case
def test_it_is_what_numpy_says_bit_for_bit(name: str) -> None:
    found, inputs = forms(name)
    assert sorted(found.ops()) == sorted(CASES[name][-1])
    assert found.differences(inputs) == []
    assert found.differences(tuple(value * 40 + 3 for value in inputs)) == []


@settings(max_examples=25)
@given(st.sampled_from(list(CASES)), st.integers(0, 2**31), st.sampled_from([1e-6, 1e-2, 1.0, 1e5]), st.floats(-3, 3))
def test_numpy_agrees_on_any_numbers(name: str, seed: int, size: float, offset: float) -> None:
    found, inputs = forms(name)
    drawn = tuple(seeded(*value.shape, seed=seed + index) * size + offset for index, value in enumerate(inputs))
    assert found.differences(drawn) == []


@every_case
def test_it_agrees_with_the_qdq_form_to_the_last_bits_of_float32(name: str) -> None:
    found, inputs = forms(name)
    agreement = qc.agreement(found.qdq, found.integer, [inputs, tuple(value * 3 - 1 for value in inputs)])
    assert len(agreement.rows) == len(CASES[name][-1])
    assert agreement.float_error is not None
    assert agreement.float_error < 1e-6


def test_agreement_finds_a_product_that_is_off() -> None:
    found, inputs = Forms.of(ready("matrices, tokens")), CASES["matrices, tokens"][1]
    scale = next(node for node in found.integer.graph.nodes if "linear_weight_scale" in str(node.target))
    tensor = found.integer.tensor(scale)
    assert tensor is not None
    tensor[2] *= 1.01
    agreement = qc.agreement(found.qdq, found.integer, [inputs])
    off = [row.node for row in agreement.rows if (row.float_error or 0) > 1e-4]
    assert off == ["linear"]


@dear
def test_styles_and_multipliers_give_the_same_bits_and_leave_nothing_behind(name: str) -> None:
    found, inputs = forms(name)
    expected = found.integer(*inputs)
    for options in ({"style": "decomposed"}, {"multiplier": "fixed"}, {"style": "decomposed", "multiplier": "fixed"}):
        other, _ = forms(name, **options)
        other.integer.verify()
        assert stray_floats(other.integer) == []
        check_integer_form(other.integer)
        assert left(other.integer) == []
        if "style" in options:
            assert other.ops() == []
        assert all(torch.equal(one, two) for one, two in zip(other.integer(*inputs), expected, strict=True))


@dear
def test_empty_and_single_batches_of_a_dynamic_size(name: str) -> None:
    model, inputs, spec, named, _ = CASES[name]
    batch = torch.export.Dim("batch", min=0, max=64)
    program = prepared(model, inputs, spec, *named, dynamic_shapes=tuple({0: batch} for _ in inputs))
    for style in ("fused", "decomposed"):
        found = Forms.of(program, style=style)
        assert left(found.integer) == []
        check_integer_form(found.integer)
        for rows in (1, 2, 5) if name.startswith("of two") else (0, 1, 2, 5):  # it reads the first of two
            given_now = tuple(seeded(rows, *value.shape[1:], seed=rows) for value in inputs)
            results, floats = found.integer(*given_now), model(*given_now)
            assert [result.shape for result in results] == [result.shape for result in floats]
            if style == "fused" and rows:
                assert found.differences(given_now) == []


@every_spec
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_so_in_both_forms_and_styles(spec: QuantSpec, bad: float) -> None:
    x = seeded(4, 16, seed=9)
    program = prepared(nn.Linear(16, 3), (x,), spec)
    expected = [False, True, False, False] if spec.granularity == TOKEN.granularity else [True] * 4
    x[1, 3] = bad
    forms = (
        qc.convert(program),
        qc.convert(program, to="integer"),
        qc.convert(program, to="integer", style="decomposed"),
    )
    for form in forms:
        assert (~form.module(x).isfinite()).all(dim=1).tolist() == expected


# -- what stays in float ---------------------------------------------------------------------------------------------


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.matmul(x * 2, y + 1)


@pytest.mark.parametrize("run_time", ["x", "y"])
def test_a_product_of_one_that_comes_and_one_of_known_scale_stays_float_and_says_why(run_time: str) -> None:
    producer = {"x": "mul", "y": "add"}[run_time]
    config = QuantConfig().set_edge(producer, "matmul", UINT8)
    program = qc.prepare(qc.capture(Sum().eval(), PAIR), "x86", config=config)
    qc.calibrate(program, [PAIR])
    found = Forms.of(program)
    assert found.ops() == []
    (reason,) = [text for node, text in found.integer.plan.left_float.rows.items() if node.name == "matmul"]
    expected = {
        "x": "is quantized beforehand, and its other factor as it comes",
        "y": "is not found as the program runs",
    }
    assert expected[run_time] in reason
    check_integer_form(found.integer)
    assert left(found.integer) == []
    assert torch.equal(found.integer(*PAIR), found.qdq(*PAIR))
    assert torch.equal(Forms.of(program, style="decomposed").integer(*PAIR), found.qdq(*PAIR))


@every_spec
def test_scales_found_for_what_stays_float_are_spelled_out_with_the_same_bits(spec: QuantSpec) -> None:
    """A layer whose accumulator 32 bits might not hold: its Q/DQ ops stay."""
    wide = nn.Linear(150_000, 2, bias=False)
    with torch.no_grad():
        wide.weight.fill_(1.0)
    x = seeded(3, 150_000, seed=10)
    found = Forms.of(prepared(wide, (x,), spec), reduce_range="no")
    assert found.ops() == []
    (reason,) = [text for node, text in found.integer.plan.left_float.rows.items() if node.name == "linear"]
    assert "its accumulator could need" in reason
    check_integer_form(found.integer)
    assert left(found.integer) == []
    assert torch.equal(found.integer(x), found.qdq(x))


def test_one_choice_that_several_read_is_written_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(150_000, 2, bias=False), nn.Linear(150_000, 2, bias=False)
            with torch.no_grad():
                self.one.weight.fill_(1.0)
                self.two.weight.fill_(1.0)

        def forward(self, x: Tensor) -> Tensor:
            return torch.add(self.one(x), self.two(x))

    x = seeded(2, 150_000, seed=11)
    found = Forms.of(prepared(Twice(), (x,), UINT8))
    roundings = [node for node in found.integer.nodes() if "round" in str(node.target)]
    assert len(roundings) == 2  # of the zero point, and of the numbers
    assert torch.equal(found.integer(x), found.qdq(x))


# -- seeded faults ---------------------------------------------------------------------------------------------------


def written_out(spec: QuantSpec) -> Program:
    found = Forms.of(prepared(nn.Linear(8, 3), (seeded(2, 8),), spec), style="decomposed").integer
    assert stray_floats(found) == []
    return found


@every_spec
def test_integers_that_are_made_without_rounding_are_found(spec: QuantSpec) -> None:
    count = sum("round" in str(node.target) for node in written_out(spec).nodes()) - 1  # the last is that of the bias
    assert count == (1 if spec.scheme == SYMMETRIC.scheme else 2)
    for index in range(count):
        program = written_out(spec)
        rounding = [node for node in program.nodes() if "round" in str(node.target)][index]
        rounding.replace_all_uses_with(rounding.all_input_nodes[0])
        assert any("without rounding" in str(stray) for stray in stray_floats(program))
        with pytest.raises(VerifyError):
            check_integer_form(program)


@every_spec
def test_a_curve_between_the_sum_and_its_scale_is_found(spec: QuantSpec) -> None:
    program = written_out(spec)
    product = next(node for node in program.nodes() if node.target is out_dtype)
    total = next(node for node in program.nodes() if _casts(node, torch.float64) and _comes_from(node, product))
    after = next(iter(total.users))
    bent = program.emit(torch.ops.aten.exp.default, (total,), before=after, like=total, value=tensor_type(total))
    after.replace_input_with(total, bent)
    assert any("exp is not what a multiplier goes through" in str(stray) for stray in stray_floats(program))


def _casts(node: fx.Node, dtype: torch.dtype) -> bool:
    return node.target is torch.ops.aten.to.dtype and node.args[1] == dtype


def _comes_from(node: fx.Node, source: fx.Node) -> bool:
    while node is not source and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node is source


def test_an_op_that_finds_scales_is_refused_where_it_was_left() -> None:
    program = qc.convert(prepared(nn.Linear(8, 3), (seeded(2, 8),), TOKEN))
    with pytest.raises(VerifyError, match="faults") as caught:
        check_integer_form(program)
    assert "choose_qparams" in str(caught.value)
