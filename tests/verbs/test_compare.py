"""Compare: SQNR of the whole and of each op, against values recorded with torch's own interpreter and numpy."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import quantc as qc
from quantc.errors import DataError, InputError, QuantcError
from quantc.inspect.lockstep import Lane, Lockstep
from quantc.inspect.size import size, size_of
from quantc.ir.program import Program


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.norm(self.conv(x)))
        x = F.max_pool2d(x + self.deep(x), 2)
        x = torch.erf(x.mean((2, 3)))
        return self.head(x), x.argmax(1)


@pytest.fixture(scope="module")
def made() -> tuple[Net, Program, Program, Program, list[Tensor]]:
    torch.manual_seed(0)
    model = Net().eval()
    model.norm.running_mean = torch.randn(8)
    model.norm.running_var = torch.rand(8) + 0.5
    batches = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    program = qc.capture(model, (batches[0],))
    prepared = qc.prepare(program, "x86")
    qc.calibrate(prepared, batches)
    return model, program, prepared, qc.convert(prepared), batches


class Recording(fx.Interpreter):
    """Keeps every value: what `compare` must not do, and the independent way to the same numbers."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.root, garbage_collect_values=False, graph=program.graph)

    def values(self, *inputs: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            self.run(*inputs, enable_io_processing=False)
        return {node.name: value for node, value in self.env.items()}


def decibels(reference: list[np.ndarray[Any, Any]], value: list[np.ndarray[Any, Any]]) -> float:
    left = np.concatenate([part.ravel() for part in reference]).astype(np.float64)
    right = np.concatenate([part.ravel() for part in value]).astype(np.float64)
    noise = float(((left - right) ** 2).sum())
    return math.inf if noise == 0 else 10 * math.log10(float((left**2).sum()) / noise)


def test_every_layer_has_the_sqnr_that_numpy_finds(made: tuple[Net, Program, Program, Program, list[Tensor]]) -> None:
    _, _, prepared, quantized, batches = made
    comparison = qc.compare(prepared, quantized, iter(batches))
    assert comparison.batches == 3
    records = [(Recording(prepared).values(batch), Recording(quantized).values(batch)) for batch in batches]
    names = ["conv2d", "relu", "conv2d_1", "add", "max_pool2d", "mean", "erf", "linear"]
    assert [layer.node for layer in comparison.layers] == names
    for layer in comparison.layers:
        left = [reference[layer.node].numpy() for reference, _ in records]
        right = [value[layer.node].numpy() for _, value in records]
        assert layer.sqnr == pytest.approx(decibels(left, right), abs=1e-6), layer.node
    expected = decibels(
        [prepared(batch)[0].detach().numpy() for batch in batches],
        [quantized(batch)[0].detach().numpy() for batch in batches],
    )
    assert comparison.sqnr == pytest.approx(expected, abs=1e-6)
    assert comparison.outputs[0] == comparison.sqnr
    assert math.isnan(comparison.outputs[1])
    assert any("output 1 holds no floats" in note for note in comparison.notes)


def test_what_an_op_costs_alone_is_its_own_error_on_float_values(
    made: tuple[Net, Program, Program, Program, list[Tensor]],
) -> None:
    """The head and the first convolution by hand, quantized with torch's own quantizers from the graph's numbers."""
    _, _, prepared, quantized, batches = made
    comparison = qc.compare(prepared, quantized, batches)
    records = [Recording(prepared).values(batch) for batch in batches]
    for name in ("conv2d", "linear"):
        node, twin = quantized.node(name), prepared.node(name)
        x = prepared_operand(twin, 0)
        weight = torch.dequantize(quantized_weight(prepared, quantized, node, twin))
        bias = prepared.tensor(twin.args[2])  # type: ignore[arg-type]
        results = []
        for record in records:
            scale, zero_point = node.args[0].args[1:3]  # type: ignore[union-attr]
            given = torch.quantize_per_tensor(record[x], scale, zero_point, torch.quint8).dequantize()  # type: ignore[arg-type]
            assert bias is not None
            made_of = F.linear(given, weight, bias) if name == "linear" else F.conv2d(given, weight, bias, padding=1)
            results.append(made_of.detach().numpy())
        layer = comparison.layer(name)
        assert layer is not None
        assert layer.local is not None
        assert layer.local == pytest.approx(decibels([record[name].numpy() for record in records], results), abs=0.05)
    assert comparison.layer("erf").local is None  # type: ignore[union-attr]


def prepared_operand(node: fx.Node, index: int) -> str:
    operand = node.args[index]
    assert isinstance(operand, fx.Node)
    return operand.name


def quantized_weight(prepared: Program, quantized: Program, node: fx.Node, twin: fx.Node) -> Tensor:
    """The float weight, quantized by torch with the scales stored in the quantized program."""
    dequantize, source = node.args[1], twin.args[1]
    assert isinstance(dequantize, fx.Node)
    assert isinstance(source, fx.Node)
    scales, zero_points = (quantized.tensor(part) for part in dequantize.args[1:3])  # type: ignore[arg-type]
    weight = prepared.tensor(source)
    assert weight is not None
    assert scales is not None
    assert zero_points is not None
    return torch.quantize_per_channel(weight.detach(), scales, zero_points, 0, torch.qint8)


def test_the_worst_op_is_the_one_that_was_made_worst() -> None:
    """One column of a weight so large that the others vanish in its steps."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(4)]
    with torch.no_grad():
        layers[2].weight[:, 0] *= 200
    model = nn.Sequential(*layers).eval()
    x = torch.randn(8, 16)
    prepared = qc.prepare(qc.capture(model, (x,)), "x86")
    qc.calibrate(prepared, [x])
    comparison = qc.compare(model, qc.convert(prepared), [x])
    assert [layer.module for layer in comparison.worst(1)] == ["2"]
    assert [layer.node for layer in comparison.worst()] == sorted(
        (layer.node for layer in comparison.layers),
        key=lambda name: comparison.layer(name).local,  # type: ignore[union-attr, arg-type, return-value]
    )


def test_the_model_the_captured_and_the_prepared_program_serve_alike(
    made: tuple[Net, Program, Program, Program, list[Tensor]],
) -> None:
    model, program, prepared, quantized, batches = made
    texts = (program.dump(), prepared.dump(), quantized.dump())
    first = qc.compare(prepared, quantized, batches)
    for reference in (program, model):
        other = qc.compare(reference, quantized, batches)
        assert [layer.node for layer in other.layers] == [layer.node for layer in first.layers]
        for left, right in zip(other.layers, first.layers, strict=True):
            assert left.sqnr == pytest.approx(right.sqnr, abs=0.01)
    assert (program.dump(), prepared.dump(), quantized.dump()) == texts


def test_a_program_compared_with_itself_is_equal(made: tuple[Net, Program, Program, Program, list[Tensor]]) -> None:
    _, _, prepared, quantized, batches = made
    for program in (prepared, quantized):
        comparison = qc.compare(program, program, batches[:1])
        assert comparison.sqnr == math.inf
        assert all(layer.sqnr == math.inf for layer in comparison.layers)
    data = json.loads(comparison.to_json())
    assert data["sqnr"] == "inf"
    assert "equal" in str(comparison)


def test_dicts_and_tuples_are_batches_too(made: tuple[Net, Program, Program, Program, list[Tensor]]) -> None:
    _, _, prepared, quantized, batches = made
    found = [
        qc.compare(prepared, quantized, given).sqnr
        for given in (batches, [(x,) for x in batches], [{"x": x} for x in batches])
    ]
    assert len(set(found)) == 1


def test_batches_of_different_sizes_go_where_sizes_are_dynamic(
    made: tuple[Net, Program, Program, Program, list[Tensor]],
) -> None:
    model, _, prepared, quantized, batches = made
    free = qc.capture(model, (batches[0],), dynamic_shapes=({0: torch.export.Dim("n", min=2, max=64)},))
    flexible = qc.prepare(free, "x86")
    qc.calibrate(flexible, batches)
    mixed = [batches[0], torch.randn(5, 3, 8, 8)]
    comparison = qc.compare(model, qc.convert(flexible), mixed)
    assert comparison.notes[0].startswith("output 1"), "every op has its counterpart"
    assert len(comparison.layers) == 8
    assert len(qc.compare(prepared, quantized, mixed).layers) == 8, "the batch is open unasked"
    fixed = qc.prepare(qc.capture(model, (batches[0],), dynamic_shapes=None), "x86")
    qc.calibrate(fixed, batches)
    with pytest.raises(InputError, match="batch 1"):
        qc.compare(fixed, qc.convert(fixed), mixed)


def test_nothing_is_held_longer_than_needed() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(40) for layer in (nn.Linear(4, 4), nn.Softplus())]
    x = torch.randn(2, 4)
    prepared = qc.prepare(qc.capture(nn.Sequential(*layers).eval(), (x,)), "x86")
    qc.calibrate(prepared, [x])
    lockstep = Lockstep(prepared, qc.convert(prepared))
    held: list[int] = []

    def watch(lane: Lane) -> None:
        step = lane.step

        def watched(node: fx.Node) -> Any:
            held.append(sum(isinstance(value, Tensor) and key.op != "get_attr" for key, value in lane.env.items()))
            return step(node)

        lane.step = watched  # type: ignore[method-assign]

    watch(lockstep.reference)
    watch(lockstep.quantized)
    lockstep.run([x], [x])
    assert len(held) > 200
    assert max(held) <= 4
    assert len(lockstep.local) == 40


def test_branches_are_compared_from_outside_and_that_is_said() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            result: Tensor = torch.cond(x.sum() > 0, self.right, self.left, (x,))
            return result

        def right(self, x: Tensor) -> Tensor:
            return torch.relu(self.inner(x))

        def left(self, x: Tensor) -> Tensor:
            return x - 1

    torch.manual_seed(0)
    batches = [torch.randn(2, 4) for _ in range(4)]
    prepared = qc.prepare(qc.capture(Branch().eval(), (batches[0],)), "x86")
    qc.calibrate(prepared, batches)
    comparison = qc.compare(prepared, qc.convert(prepared), batches)
    assert comparison.sqnr > 15
    assert comparison.layer("linear") is not None
    assert any("not compared one by one" in note for note in comparison.notes)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_zero_batches_and_batches_that_do_not_fit_are_refused(
    made: tuple[Net, Program, Program, Program, list[Tensor]],
) -> None:
    _, _, prepared, quantized, _ = made

    def none() -> Iterator[Tensor]:
        return iter(())

    with pytest.raises(DataError, match="zero batches"):
        qc.compare(prepared, quantized, none())
    with pytest.raises(InputError, match="batch 0"):
        qc.compare(prepared, quantized, [torch.randn(2, 4, 8, 8)])


def test_programs_of_different_inputs_are_refused(made: tuple[Net, Program, Program, Program, list[Tensor]]) -> None:
    _, _, _, quantized, batches = made

    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    other = qc.capture(Two(), (torch.randn(2), torch.randn(2)))
    with pytest.raises(QuantcError, match="take different inputs"):
        qc.compare(other, quantized, batches)


def test_nodes_that_have_no_counterpart_are_named(made: tuple[Net, Program, Program, Program, list[Tensor]]) -> None:
    _, _, prepared, quantized, batches = made
    changed = prepared.clone()
    relu = changed.node("relu")
    relu.target = torch.ops.aten.tanh.default
    comparison = qc.compare(changed, quantized, batches)
    assert comparison.layer("relu") is None
    assert any("1 nodes have no counterpart in the float program: relu" in note for note in comparison.notes)


# -- size -------------------------------------------------------------------------------------------------------------


def test_size_is_what_the_tensors_take(made: tuple[Net, Program, Program, Program, list[Tensor]]) -> None:
    model, _, prepared, quantized, batches = made
    assert size_of(model) == sum(tensor.nbytes for tensor in model.state_dict().values())
    found = size(prepared, quantized)
    assert found.after == sum(tensor.nbytes for tensor in quantized.module.state_dict().values())
    assert found.ratio < 0.5
    assert qc.compare(prepared, quantized, batches[:1]).size == found
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    assert size_of(tied) == 64
