"""`Program.slice` and `Program.partition`: parts compute what the whole computes, at every stage."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor, fx, nn

import quantc as qc
from quantc.errors import PipelineError, UnknownNameError
from quantc.ir.types import TensorType

X = torch.linspace(-2, 2, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(256, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x).relu()
        low, high = (self.second(y) + y).chunk(2, dim=1)
        return self.head(torch.cat([low.sin(), high], dim=1)), low


@pytest.fixture(scope="module")
def prepared() -> qc.Program:
    torch.manual_seed(0)
    made = qc.prepare(qc.capture(Net().eval(), (X,)), "x86")
    qc.calibrate(made, [X])
    return made


def results(program: qc.Program) -> list[Tensor]:
    with torch.no_grad():
        return list(program(X))


def forms(prepared: qc.Program) -> list[qc.Program]:
    return [prepared, qc.convert(prepared), qc.convert(prepared, to="integer")]


@pytest.mark.parametrize("form", range(3))
def test_any_set_of_ops_can_be_taken_out_and_called(prepared: qc.Program, form: int) -> None:
    program = forms(prepared)[form]
    before = str(program)
    expected = results(program)
    for seed in range(12):
        random = Random(seed)
        taken = {node.name for node in program.graph.nodes if random.random() < 0.5}
        parts = program.partition(taken)
        assert all(torch.equal(*pair) for pair in zip(parts(X), expected, strict=True))
        for region in parts.regions:
            region.program.verify()
    assert str(program) == before


def test_claimed_ops_are_the_default(prepared: qc.Program) -> None:
    converted = qc.convert(prepared)
    parts = converted.partition()
    inside = {node.name for region in parts.regions for node in region.program.graph.nodes}
    assert {node.name for node in converted.plan.claims.rows} <= inside
    assert not any(converted.plan.claims.get(node) for node in converted.graph.nodes if node.name not in inside)
    assert all(torch.equal(*pair) for pair in zip(parts(X), results(converted), strict=True))


def test_a_region_has_the_types_of_its_boundary(prepared: qc.Program) -> None:
    parts = prepared.partition(lambda node: node.name in ("conv2d", "relu"))
    (region,) = parts.regions
    assert region.name == "region_0"
    assert region.inputs == {"x": TensorType(torch.float32, ("batch", 3, 8, 8))}
    assert region.outputs == {"relu": TensorType(torch.float32, ("batch", 4, 8, 8))}


def test_something_else_can_run_the_regions(prepared: qc.Program) -> None:
    parts = prepared.partition(["conv2d_1"])
    seen: list[str] = []

    def run(region: object) -> object:
        def zero(y: Tensor) -> Tensor:
            seen.append("called")
            return torch.zeros_like(y)

        return zero

    parts.run_with(run)  # type: ignore[arg-type]
    found, _ = parts(X)
    assert seen == ["called"]
    assert not torch.equal(found, results(prepared)[0])


def test_a_path_that_leaves_and_comes_back_makes_two_regions(prepared: qc.Program) -> None:
    """relu goes to the sum directly, and by way of a convolution on the host."""
    parts = prepared.partition(["relu", "add"])
    assert [set(region.outputs) for region in parts.regions] == [{"relu"}, {"add"}]
    assert all(torch.equal(*pair) for pair in zip(parts(X), results(prepared), strict=True))


def test_a_module_is_sliced_by_its_path(prepared: qc.Program) -> None:
    head = prepared.slice("head")
    (name,) = (item.name for item in head.signature.inputs)
    assert prepared.has_node(name)
    with torch.no_grad():
        assert head(torch.ones(3, 4, 8, 8)).shape == (3, 5)


def test_a_slice_of_a_prepared_program_converts_as_the_whole_does(prepared: qc.Program) -> None:
    names = ["conv2d", "relu", "conv2d_1"]
    whole, part = qc.convert(prepared), qc.convert(prepared.slice(names))
    scales = {name: found.one for name, found in part.plan.qparams.items() if found.scale.dim() == 0}
    assert scales
    assert all(whole.plan.qparams[name].one == found for name, found in scales.items())


def test_several_values_of_one_op_stay_together(prepared: qc.Program) -> None:
    chunk = next(node for node in prepared.graph.nodes if "chunk" in node.name or "split" in node.name)
    part = prepared.slice([chunk])
    assert len(part(torch.ones(2, 4, 8, 8))) == 2


def test_what_is_no_part_is_refused(prepared: qc.Program) -> None:
    with pytest.raises(UnknownNameError, match="unknown module 'haed'"):
        prepared.slice("haed")
    with pytest.raises(UnknownNameError, match="unknown node 'conv'"):
        prepared.slice(["conv"])
    with pytest.raises(PipelineError, match="has no ops"):
        prepared.slice(["x"])
    other = qc.capture(nn.ReLU(), (X,))
    strange = next(node for node in other.graph.nodes if node.op == "call_function")
    assert isinstance(strange, fx.Node)
    with pytest.raises(PipelineError, match="not in the top graph"):
        prepared.slice([strange])


def test_a_range_is_a_part_in_every_form(prepared: qc.Program) -> None:
    program = qc.convert(prepared)
    names = [node.name for node in program.graph.nodes if node.op == "call_function"]
    first, last = names[2], names[6]
    part = program.slice(f"{first}..{last}")
    calls = [node.name for node in part.graph.nodes if node.op == "call_function"]
    assert calls == names[2:7]
    for form in ("text", "table", "json", "dot", "graphml"):
        text = part.dump(form)
        assert first in text
        assert last in text
        assert names[8] not in text
    assert {first, last} <= set(part.to_networkx().nodes)
    assert program.slice(program.node(first)).dump() == program.slice([first]).dump()


@pytest.mark.parametrize(
    ("part", "told"), [("", "unknown module"), ("cat..relu", "does not come after"), (3, "is no part")]
)
def test_what_names_no_ops_is_refused(prepared: qc.Program, part: str, told: str) -> None:
    with pytest.raises(qc.QuantcError, match=told):
        prepared.slice(part)
