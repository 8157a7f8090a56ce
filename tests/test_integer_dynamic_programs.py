"""Programs with products that find their scales as they run: every rule, every style, from capture to file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._higher_order_ops.out_dtype import out_dtype
from torch.nn import functional as F

import quantc as qc
from quantc import QuantConfig
from quantc.dialect import argument
from quantc.errors import VerifyError
from quantc.integer.proof.report import accumulators
from quantc.integer.regions import check_integer_form, stray_floats
from quantc.program import Program
from quantc.spec import QuantSpec
from quantc.types import tensor_type
from tests.integer_oracle_dynamic import Forms

pytestmark = pytest.mark.filterwarnings("ignore")
UINT8, TOKEN = qc.UINT8_DYNAMIC, qc.UINT8_TOKEN
SYMMETRIC = UINT8.but(scheme="symmetric")
SPECS = {
    "uint8": UINT8,
    "uint8 to 127": UINT8.but(qmax=127, eps=2.0**-14),
    "symmetric": SYMMETRIC,
    "tokens": TOKEN,
    "symmetric tokens": TOKEN.but(scheme="symmetric"),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
AUTO: Any = torch.export.Dim.AUTO


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Convolutions(nn.Module):
    """Over one, two and three axes, plain and transposed, with groups, steps and holes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.back = nn.Conv1d(4, 8, 3, padding=1), nn.ConvTranspose1d(8, 4, 2, stride=2)
        self.two = nn.Conv2d(4, 6, 3, groups=2, dilation=2, bias=False)
        self.grouped = nn.ConvTranspose2d(6, 8, 3, groups=2, padding=1)
        self.three = nn.Conv3d(2, 3, (1, 2, 2), stride=(1, 2, 1))

    def forward(self, x: Tensor) -> Any:
        wide = self.back(torch.relu(self.one(x)))
        image = self.grouped(self.two(wide.unflatten(2, (-1, 8))))
        return image, self.three(image.unflatten(1, (2, 4)))


class Matrices(nn.Module):
    """Every way of writing a product with a constant matrix, or of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(seeded(16, 12, seed=1)), nn.Parameter(seeded(12, seed=2))
        self.layer = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Any:
        y, rows = x @ self.w, x.reshape(-1, 16)
        vector = torch.addmm(self.b, rows, self.w, alpha=0.5, beta=2)
        added = torch.addmm(vector, rows, self.w, beta=0.25)
        return self.layer(y), vector, added


class OfTwo(nn.Module):
    """Products of two tensors that are both computed."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        batches = torch.matmul(x, y)
        rows = F.linear(x, y[0].t())
        summed = torch.baddbmm(batches, x, y, beta=0.5, alpha=2.0)
        return batches, rows, summed, torch.addmm(batches[0], x[0], y[0], alpha=-1.5), torch.matmul(x, y[0, :, 0])


NAMED = ("matmul", "addmm", "baddbmm", "linear")
WINDOWS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d")
IMAGE, ROWS = (seeded(2, 4, 32, seed=3),), (seeded(3, 5, 16, seed=4),)
PAIR = (seeded(3, 5, 16, seed=5), seeded(3, 16, 4, seed=6))


def prepared(model: nn.Module, inputs: tuple[Tensor, ...], spec: QuantSpec, *named: str, **options: Any) -> Program:
    config = QuantConfig().set_all(spec)
    for name in named:
        config = config.set_op(name, spec)
    return qc.prepare(qc.capture(model.eval(), inputs, **options), "x86", config=config)


def left(program: Program) -> list[str]:
    """Ops of the Q/DQ form that are still there."""
    return [str(node.target) for node in program.nodes() if "decomposed" in str(node.target)]


CASES: dict[str, tuple[nn.Module, tuple[Tensor, ...], QuantSpec, tuple[str, ...], list[str]]] = {
    "convolutions": (
        Convolutions(),
        IMAGE,
        UINT8,
        WINDOWS,
        ["conv_dynamic", "conv_transpose_dynamic", "conv_dynamic", "conv_transpose_dynamic", "conv_dynamic"],
    ),
    "convolutions, symmetric": (
        Convolutions(),
        IMAGE,
        SYMMETRIC,
        WINDOWS,
        ["conv_dynamic", "conv_transpose_dynamic", "conv_dynamic", "conv_transpose_dynamic", "conv_dynamic"],
    ),
    **{
        f"matrices, {name}": (Matrices(), ROWS, spec, (), ["matmul_dynamic", "linear_dynamic", *["matmul_dynamic"] * 2])
        for name, spec in SPECS.items()
    },
    **{
        f"of two, {name}": (
            OfTwo(),
            PAIR,
            SPECS[name],
            NAMED,
            ["matmul_both_dynamic", "linear_both_dynamic", *["matmul_both_dynamic"] * 3],
        )
        for name in ("uint8", "uint8 to 127", "symmetric")
    },
}
every_case = pytest.mark.parametrize("name", CASES)


QUICK = ("convolutions", "matrices, tokens", "of two, uint8")
dear = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
"""The same, where a case takes long."""


@cache
def ready(name: str) -> Program:
    model, inputs, spec, named, _ = CASES[name]
    return prepared(model, inputs, spec, *named)


@cache
def forms(name: str, **options: Any) -> tuple[Forms, tuple[Tensor, ...]]:
    """Both forms of a case, to be read and not changed."""
    return Forms.of(ready(name), **options), CASES[name][1]


# -- numbers ---------------------------------------------------------------------------------------------------------


@every_case
def test_it_is_what_numpy_says_bit_for_bit(name: str) -> None:
    found, inputs = forms(name)
    assert sorted(found.ops()) == sorted(CASES[name][-1])
    assert found.differences(inputs) == []
    assert found.differences(tuple(value * 40 + 3 for value in inputs)) == []


@settings(max_examples=25, deadline=None)
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
        for rows in (0, 1, 2, 5):
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
        assert (~form(x).isfinite()).all(dim=1).tolist() == expected


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
    assert "scale" in reason or "beforehand" in reason
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
    found = Forms.of(prepared(wide, (x,), spec))
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
            return self.one(x) + self.two(x)

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
    integer = qc.convert(prepared(layer, (seeded(1, 6),), UINT8), to="integer")
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
    full, safe = accumulators(qc.convert(program)), qc.convert(program, reduce_range=reduce_range)
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
    others = [
        torch.export.export(found.integer.module, inputs).module(),
        torch.compile(found.integer.module, backend="aot_eager", fullgraph=True),
        qc.load(path),
    ]
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(other(*inputs), expected, strict=True))


@pytest.mark.parametrize("name", ["convolutions", "matrices, tokens"])
@pytest.mark.parametrize("style", ["fused", "decomposed"])
def test_a_dynamic_batch_stays_dynamic(name: str, style: str, tmp_path: Path) -> None:
    model, inputs, spec, named, _ = CASES[name]
    program = prepared(model, inputs, spec, *named, dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    integer = qc.convert(program, to="integer", style=style)  # type: ignore[call-overload]
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
