"""The float form of a program, as rules see it: without what quantization has inserted."""

from __future__ import annotations

import torch
from torch import nn

import quantc as qc
from quantc.annotate.float_view import float_view
from quantc.ir.program import Program, Stage
from quantc.ir.types import type_of
from quantc.qdq.ops import belongs_to_qdq
from quantc.spec.formats import PerGroup
from quantc.spec.spec import INT8_WEIGHT_ONLY, UINT8_DYNAMIC


def calls(program: Program) -> list[str]:
    return [f"{node.name} = {node.target}" for node in program.nodes() if node.op == "call_function"]


def types(program: Program) -> dict[str, str]:
    return {node.name: str(type_of(node)) for node in program.nodes() if node.op == "call_function"}


def model() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4)).eval(), torch.randn(2, 2, 4, 4)


def static() -> tuple[Program, Program]:
    made, x = model()
    prepared = qc.prepare(qc.capture(made, (x,)), "x86")
    qc.calibrate(prepared, [x], progress="silent")
    return prepared, qc.convert(prepared)


def test_a_program_without_insertions_is_its_own_view() -> None:
    made, x = model()
    captured = qc.capture(made, (x,))
    assert float_view(captured) is captured


def test_a_converted_program_looks_as_it_did_before() -> None:
    prepared, converted = static()
    before = converted.dump()
    view = float_view(converted)
    assert calls(view) == calls(float_view(prepared))
    assert not any(belongs_to_qdq(node) for node in view.nodes())
    assert view.stage <= Stage.SHARED
    assert converted.dump() == before


def test_weights_in_the_view_have_the_type_of_float_ones() -> None:
    _, converted = static()
    stored = {node.target: type_of(node) for node in converted.nodes() if node.op == "get_attr"}
    assert "i8[4,16]" in map(str, stored.values())
    linear = next(node for node in float_view(converted).nodes() if node.name == "linear")
    assert str(type_of(linear.all_input_nodes[1])) == "f32[4,16]"


def test_choices_of_scales_and_layouts_of_groups_are_taken_out() -> None:
    made, x = model()
    captured = qc.capture(made, (x,))
    groups = INT8_WEIGHT_ONLY.but(dtype="int4", granularity=PerGroup(axis=1, size=2))
    for config in (qc.QuantConfig().set_all(UINT8_DYNAMIC), qc.QuantConfig().set_all(groups)):
        prepared = qc.prepare(captured, "qnnpack", config=config)
        converted = qc.convert(prepared)
        assert any(belongs_to_qdq(node) for node in converted.nodes())
        view = float_view(converted)
        assert calls(view) == calls(float_view(prepared))
        assert types(view) == types(float_view(prepared))
