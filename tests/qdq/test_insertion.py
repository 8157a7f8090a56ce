"""Q/DQ ops written by a plan: each tensor is converted once for each form in which it is yielded or read."""

from __future__ import annotations

import torch
from torch import fx

import quantc as qc
from quantc.ir.decisions import Quantize
from quantc.ir.plan import Group, spec_of
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.passes.share import Share
from quantc.qdq.insertion import PlanWriter
from quantc.qdq.ops import Scales, is_dequantize, is_quantize, scales_for
from quantc.spec.numerics import QParams
from quantc.spec.spec import INT8, INT16, UINT8
from tests.support.by_hand import Builder, aten

STEPS = {UINT8: (0.05, 128), INT8: (0.07, 3), INT16: (0.001, 0)}
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def rounded(x: torch.Tensor, spec: qc.QuantSpec) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x, *STEPS[spec], spec.qmin, spec.qmax)


def diamond() -> Program:
    """tanh, read by a sigmoid, and twice by an add."""
    build = Builder()
    tanh = build.call(aten.tanh.default, build.input("x", X))
    sigmoid, add = build.call(aten.sigmoid.default, tanh), build.call(aten.add.Tensor, tanh, tanh)
    return build.program(sigmoid, add)


def written(program: Program, decided: dict[tuple[str, int | None], qc.QuantSpec]) -> int:
    """Carry out decisions about the operands and outputs of nodes, each spec with the same numbers everywhere."""
    places = Places(program)
    for (name, operand), spec in decided.items():
        node = program.node(name)
        site = places.out(node) if operand is None else places.use(node, operand)
        program.plan.outcomes[site] = Quantize(spec)
    Share().run(program)

    def scales_of(group: Group, hint: str) -> Scales:
        scale, zero_point = STEPS[spec_of(group)]
        return scales_for(program, hint, QParams(torch.tensor(scale), torch.tensor(zero_point)), spec_of(group))

    count = PlanWriter(program, scales_of).write()
    program.touch()
    return count


def quantizers(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if is_quantize(node)]


def test_an_output_is_converted_once_and_everybody_reads_it() -> None:
    program = diamond()
    assert written(program, {("tanh", None): UINT8}) == 1
    (quantize,) = quantizers(program)
    assert quantize.args[0] is program.node("tanh")
    (dequantize,) = quantize.users
    assert is_dequantize(dequantize)
    assert {user.name for user in dequantize.users} == {"sigmoid", "add"}
    y = rounded(torch.tanh(X), UINT8)
    assert all(map(torch.equal, program(X), (torch.sigmoid(y), y + y)))


def test_an_operand_is_converted_for_its_reader_alone() -> None:
    program = diamond()
    assert written(program, {("sigmoid", 0): INT8}) == 1
    y = torch.tanh(X)
    assert all(map(torch.equal, program(X), (torch.sigmoid(rounded(y, INT8)), y + y)))


def test_readers_of_one_form_share_the_conversion() -> None:
    program = diamond()
    written(program, {("sigmoid", 0): INT8, ("add", 0): INT8, ("add", 1): INT8})
    assert len(quantizers(program)) == 1
    y = rounded(torch.tanh(X), INT8)
    assert all(map(torch.equal, program(X), (torch.sigmoid(y), y + y)))


def test_two_operands_of_one_node_may_come_in_two_forms() -> None:
    program = diamond()
    assert written(program, {("add", 0): INT8, ("add", 1): UINT8}) == 1
    y = torch.tanh(X)
    assert all(map(torch.equal, program(X), (torch.sigmoid(y), rounded(y, INT8) + rounded(y, UINT8))))


def test_a_reader_in_another_form_reads_what_was_yielded() -> None:
    program = diamond()
    written(program, {("tanh", None): UINT8, ("sigmoid", 0): INT8})
    y = rounded(torch.tanh(X), UINT8)
    assert all(map(torch.equal, program(X), (torch.sigmoid(rounded(y, INT8)), y + y)))


def test_a_reader_that_wants_more_bits_reads_the_float_value() -> None:
    program = diamond()
    written(program, {("tanh", None): UINT8, ("sigmoid", 0): INT16})
    y = torch.tanh(X)
    coarse = rounded(y, UINT8)
    assert all(map(torch.equal, program(X), (torch.sigmoid(rounded(y, INT16)), coarse + coarse)))


def test_inputs_are_converted_after_all_inputs() -> None:
    build = Builder(w=torch.ones(4))
    x, y = build.input("x", X), build.input("y", X)
    program = build.program(build.call(aten.add.Tensor, x, y), build.call(aten.mul.Tensor, x, build.const("w")))
    assert written(program, {("add", 0): UINT8, ("mul", 1): INT8}) == 2
    order = [node.op for node in program.graph.nodes]
    assert order[:2] == ["placeholder", "placeholder"]
    program.graph.lint()
    assert torch.equal(program(X, X)[0], rounded(X, UINT8) + X)
