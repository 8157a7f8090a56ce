"""The quantize and dequantize ops of the Q/DQ form: how they are told apart, and what each spec is written as."""

from __future__ import annotations

from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from quantc.errors import SpecError
from quantc.ir.program import Program
from quantc.ir.types import type_of
from quantc.qdq.ops import (
    FloatScales,
    GroupedScales,
    KnownScales,
    RunTimeScales,
    belongs_to_qdq,
    is_choice,
    is_dequantize,
    is_layout,
    is_quantize,
    scales_for,
)
from quantc.spec.formats import PerGroup, PerToken
from quantc.spec.numerics import QParams
from quantc.spec.spec import (
    FP8_E4M3_WEIGHT,
    FP16_WEIGHT,
    INT4_GROUP,
    INT8,
    INT8_DYNAMIC,
    INT8_TOKEN,
    INT8_WEIGHT,
    UINT8,
    UINT8_DYNAMIC,
    QuantSpec,
)
from tests.support.by_hand import Builder, aten


def qparams(scale: Any, zero_point: Any = 0) -> QParams:
    steps = torch.tensor(scale, dtype=torch.float32)
    return QParams(steps, torch.tensor(zero_point).expand(steps.shape).clone())


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def round_trip(
    value: Tensor, known: QParams | None, spec: QuantSpec, *, constant: bool = False
) -> tuple[Program, list[fx.Node]]:
    """A program that quantizes and dequantizes its input, or a constant; and the nodes that were inserted."""
    build = Builder(w=value)
    x = build.input("x", value)
    source = build.const("w") if constant else x
    root = build.call(aten.neg.default, source)
    program = build.program(root)
    scales = scales_for(program, "w", known, spec)
    before = {node.name for node in program.graph.nodes}
    levels = scales.quantize(source, before=root)
    reals = scales.dequantize(levels, before=root)
    root.replace_input_with(source, reals)
    program.touch()
    made = [node for node in program.graph.nodes if node.name not in before and node.op == "call_function"]
    return program, made


def test_a_spec_by_tensor_is_torchs_fake_quantization() -> None:
    x = drawn(3, 4) * 20  # beyond both ends
    program, (quantize, dequantize) = round_trip(x, qparams(0.1, 7), UINT8.but(qmax=200))
    assert torch.equal(program(x), -torch.fake_quantize_per_tensor_affine(x, 0.1, 7, 0, 200))
    assert is_quantize(quantize)
    assert is_dequantize(dequantize)
    assert (str(type_of(quantize)), str(type_of(dequantize))) == ("u8[3,4]", "f32[3,4]")


def test_a_spec_by_channel_is_torchs_fake_quantization_and_keeps_its_scales_once() -> None:
    w, scales = drawn(3, 4), torch.tensor([0.1, 0.02, 0.3])
    program, _ = round_trip(w, qparams([0.1, 0.02, 0.3]), INT8_WEIGHT, constant=True)
    expected = torch.fake_quantize_per_channel_affine(w, scales, torch.zeros(3, dtype=torch.int32), 0, -128, 127)
    assert torch.equal(program(w), -expected)
    kept = [str(node.target) for node in program.graph.nodes if node.op == "get_attr"]
    assert sorted(kept) == ["w", "w_scale", "w_zero_point"]


def by_groups(w: Tensor, scales: Tensor, size: int, axis: int) -> Tensor:
    """By hand: each run of elements along an axis is divided by its own scale."""
    rows, steps = w.movedim(axis, -1), scales.movedim(axis, -1).repeat_interleave(size, dim=-1)
    levels = torch.round(rows / steps).clamp(-8, 7)
    return (levels * steps).movedim(-1, axis)


@pytest.mark.parametrize(("shape", "axis"), [((4, 6), 1), ((6, 4), 0), ((2, 6, 3, 2), 1), ((6, 2, 3), 0)])
def test_groups_of_any_weight_are_those_of_a_matrix(shape: tuple[int, ...], axis: int) -> None:
    w = drawn(*shape)
    steps = drawn(*[size // 2 if dim == axis else size for dim, size in enumerate(shape)]).abs() + 0.5
    spec = INT4_GROUP.but(scheme="symmetric", granularity=PerGroup(axis=axis, size=2))
    program, made = round_trip(w, QParams(steps, torch.zeros_like(steps, dtype=torch.int64)), spec, constant=True)
    torch.testing.assert_close(program(w), -by_groups(w, steps, 2, axis), rtol=1e-6, atol=1e-6)
    assert type_of(made[-1]) == type_of(program.node("w"))
    layouts = [node for node in made if is_layout(node)]
    assert bool(layouts) == (len(shape) > 2 or axis == 0)
    assert all(belongs_to_qdq(node) for node in made)


def test_groups_are_for_constants() -> None:
    with pytest.raises(SpecError, match="x is not a constant"):
        round_trip(drawn(4, 6), qparams([[1.0, 1.0]] * 4), INT4_GROUP.but(granularity=PerGroup(axis=1, size=3)))


def test_halves_have_no_scale_and_bytes_have_one_each_channel() -> None:
    w = drawn(3, 4)
    program, _ = round_trip(w, qparams(1.0), FP16_WEIGHT, constant=True)
    assert torch.equal(program(w), -w.half().float())
    assert [node.target for node in program.graph.nodes if node.op == "get_attr"] == ["w"]
    steps = torch.tensor([0.5, 2.0, 0.25])
    program, _ = round_trip(w, qparams([0.5, 2.0, 0.25]), FP8_E4M3_WEIGHT, constant=True)
    expected = (w / steps[:, None]).to(torch.float8_e4m3fn).float() * steps[:, None]
    assert torch.equal(program(w), -expected)


@pytest.mark.parametrize("spec", [UINT8_DYNAMIC, INT8_DYNAMIC.but(scheme="symmetric"), INT8_TOKEN])
def test_scales_found_as_it_runs_hold_the_extremes_of_each_tensor(spec: QuantSpec) -> None:
    program, made = round_trip(drawn(4, 16), None, spec)
    (choice,) = [node for node in made if is_choice(node)]
    assert all(belongs_to_qdq(node) for node in made)
    assert sum(node.target is getitem and node.args[0] is choice for node in made) == 2
    for size in (1.0, 100.0):
        x = drawn(4, 16) * size
        span = x.amax(1, keepdim=True) - x.amin(1, keepdim=True) if spec == INT8_TOKEN else x.max() - x.min()
        widest = span if spec.scheme == "affine" else 2 * x.abs().max()
        assert bool(((program(x) + x).abs() <= widest / 255 / 2 * 1.001).all())


def test_torchs_own_choice_is_used_where_there_is_one() -> None:
    build = Builder()
    program = build.program(build.call(aten.neg.default, build.input("x", drawn(2))))
    assert RunTimeScales(program, UINT8_DYNAMIC).uses_torch
    assert not RunTimeScales(program, INT8_TOKEN).uses_torch
    assert not RunTimeScales(program, INT8_DYNAMIC.but(scheme="symmetric")).uses_torch


@pytest.mark.parametrize(
    ("spec", "given", "kind"),
    [
        (INT8, qparams(0.1), KnownScales),
        (INT8_WEIGHT, qparams([0.1]), KnownScales),
        (INT4_GROUP, qparams([[0.1]]), GroupedScales),
        (FP16_WEIGHT, qparams(1.0), FloatScales),
        (INT8_DYNAMIC, None, RunTimeScales),
    ],
)
def test_the_spec_says_which_kind_of_scales(spec: QuantSpec, given: QParams | None, kind: type) -> None:
    build = Builder()
    program = build.program(build.call(aten.neg.default, build.input("x", drawn(2))))
    assert type(scales_for(program, "x", given, spec)) is kind


def test_a_granularity_without_a_static_form_is_refused() -> None:
    with pytest.raises(SpecError, match="no static Q/DQ form"):
        round_trip(drawn(4, 6), qparams([1.0] * 4), INT8_DYNAMIC.but(granularity=PerToken()))


def test_ops_of_the_model_do_not_belong_to_it() -> None:
    build = Builder(w=drawn(2, 3))
    x = build.input("x", drawn(4, 6))
    reshaped = build.call(aten.reshape.default, x, [6, 4])
    items = build.call(aten.max.dim, reshaped, 1)
    first = build.call(getitem, items, 0)
    program = build.program(build.call(aten.mul.Tensor, first, 2.0), build.const("w"))
    assert not any(belongs_to_qdq(node) for node in program.graph.nodes)
    assert not is_layout(reshaped)
