"""Export of a program for ExecuTorch: flat inputs and outputs, sizes with an end, and a name for every op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.errors import QuantcError, RefusedError
from quantc.pipeline.pipeline import Pipeline
from quantc.qdq.ops import is_dequantize
from quantc.targets.executorch.exporting import examples_of, export_program, keeps_state, size_ranges
from quantc.targets.executorch.partitioning import name_of
from tests.support.executorch_models import (
    Counter,
    conv,
    image,
    net,
    static,
)


def test_a_state_begins_where_the_program_has_it_and_is_kept(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    lowered = qc.lower(static(Counter(), x), "executorch")
    lowered.save(tmp_path / "counter.pte")
    for made in (lowered, qc.load(tmp_path / "counter.pte")):
        assert made.metadata is not None
        assert made.metadata.has_state
        assert [float(made(x).max()) for _ in range(3)] == [1.0, 2.0, 3.0]


def test_a_state_begins_with_its_value() -> None:
    model, x = Counter(), torch.randn(2, 4)
    model.calls.fill_(41.0)
    lowered = qc.lower(static(model, x), "executorch")
    assert [float(lowered(x).max()) for _ in range(2)] == [42.0, 43.0]


def test_a_program_that_writes_to_its_input_is_refused() -> None:
    class Writing(Counter):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.layer(torch.relu(self.layer(x)))
            x[0] += 5.0
            return made

    program = static(Writing(), torch.randn(2, 4))
    with pytest.raises(RefusedError, match="writes to its input 'x'"):
        qc.lower(program, "executorch")


class Sized(nn.Module):
    """Two sizes that vary, one of them with an end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x), {"told": 3, "more": x.sum(1)}


def sized() -> qc.Program:
    sizes = ({0: Dim("batch", min=2), 1: Dim("length", min=1, max=10)},)
    return qc.capture(Sized().eval(), (torch.randn(2, 3, 4),), dynamic_shapes=sizes)


@pytest.mark.parametrize(
    ("largest", "wanted"),
    [
        (64, {"batch": (2, 64), "length": (1, 10)}),
        (5, {"batch": (2, 5), "length": (1, 10)}),
        (1, {"batch": (2, 2), "length": (1, 10)}),
        ({}, {"batch": (2, 64), "length": (1, 10)}),
        ({"batch": 7, "length": 4}, {"batch": (2, 7), "length": (1, 4)}),
        ({"length": 99}, {"batch": (2, 64), "length": (1, 10)}),
    ],
    ids=str,
)
def test_sizes_get_an_end(largest: Any, wanted: dict[str, tuple[int, int]]) -> None:
    assert size_ranges(sized(), largest) == wanted


@pytest.mark.parametrize("largest", [0, 2.5, "8", {"batch": 0}, {"bach": 8}, [8]])
def test_what_is_no_size_is_refused(largest: Any) -> None:
    with pytest.raises(RefusedError) as caught:
        size_ranges(sized(), largest)
    assert "largest" in str(caught.value)
    if largest == {"bach": 8}:
        assert "batch" in str(caught.value.advice)


def test_inputs_and_outputs_are_flat_tensors() -> None:
    program = sized()
    made = export_program(program.clone(), {"batch": (2, 8), "length": (1, 10)})
    x = torch.randn(5, 7, 4)
    first, second = made.module()(x)
    want, rest = Sized()(x)
    assert torch.allclose(first, want)
    assert torch.allclose(second, rest["more"])
    with pytest.raises((RuntimeError, AssertionError)):
        made.module()(torch.randn(9, 7, 4))


def test_every_op_is_named_after_the_node_it_comes_from() -> None:
    program = sized()
    names = {node.name for node in program.graph.nodes if node.op == "call_function"}
    made = export_program(program.clone(), {"batch": (2, 8), "length": (1, 10)})
    found = {name_of(node) for node in made.graph.nodes if node.op == "call_function"} - {""}
    assert found <= names
    assert {"linear", "sum_1"} & found


def test_each_reader_has_a_dequantize_op_of_its_own() -> None:
    x = image(1)
    program = static(net(lambda self, x: (self.a(x), self.b(x), x.relu()), a=conv(), b=conv()), x)
    made = export_program(Pipeline.parse("duplicate-dq{results=own}").run_on_copy(program), {})
    found = [node for node in made.graph.nodes if is_dequantize(node)]
    assert found
    assert {len(node.users) for node in found} == {1}


def test_inputs_that_are_no_tensors_are_what_they_were() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, factor: int) -> Tensor:
            return x * factor

    program = qc.capture(Scaled(), (torch.ones(3), 4), dynamic_shapes=None)
    assert len(examples_of(program)) == 1
    (found,) = export_program(program, {}).module()(torch.ones(3))
    assert found.tolist() == [4.0, 4.0, 4.0]


def test_one_example_of_a_size_that_varies_is_made_two() -> None:
    """torch.export takes a size of one for one that does not vary."""
    sizes = ({0: Dim("batch", min=1, max=8)},)
    program = qc.capture(nn.Linear(4, 4).eval(), (torch.randn(2, 4),), dynamic_shapes=sizes)
    program.example_inputs = (torch.randn(1, 4),)
    (found,) = export_program(program, {"batch": (1, 8)}).module()(torch.randn(5, 4))
    assert found.shape == (5, 4)


def test_examples_are_needed_and_lie_in_order() -> None:
    program = qc.capture(nn.Linear(4, 4).eval(), (torch.randn(4, 2).t(),))
    (found,) = examples_of(program)
    assert found.is_contiguous()
    program.example_inputs = None
    with pytest.raises(QuantcError, match="example inputs"):
        examples_of(program)


def test_a_state_is_found_before_anything_is_lowered() -> None:
    x = torch.randn(2, 4)
    assert keeps_state(export_program(qc.capture(Counter().eval(), (x,), dynamic_shapes=None), {}))
    assert not keeps_state(export_program(qc.capture(nn.Linear(4, 4).eval(), (x,), dynamic_shapes=None), {}))
