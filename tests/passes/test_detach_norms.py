"""detach-norms: norms behind convolutions and linears are taken out of the graph and recorded, the others stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.ir.sites import SetAside
from quantc.passes.detach_norms import DetachNorms
from quantc.pipeline.pipeline import Pipeline
from tests.support.programs import small_net


def detached(model: nn.Module, *shape: int) -> Program:
    program = qc.capture(model.eval(), (torch.randn(shape),), method="fx")
    return Pipeline((DetachNorms(),)).run(program)


def ops(program: Program) -> list[str]:
    return [op_name(node) for node in program.graph.nodes if node.op == "call_function"]


def test_a_norm_is_recorded_behind_its_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=1e-3, momentum=0.3), nn.ReLU())
    program = detached(model, 2, 3, 4, 4)
    assert ops(program) == ["conv2d", "relu"]
    (row,) = program.set_aside.rows.values()
    assert row == SetAside(
        gamma="1.weight",
        beta="1.bias",
        mean="1.running_mean",
        var="1.running_var",
        eps=1e-3,
        momentum=0.3,
        counter="1.num_batches_tracked",
        follows_mode=True,
        name="batch_norm",
    )
    assert list(program.set_aside.rows) == [program.node("conv2d")]
    assert program.log[-1].notes == ("set 1 batch norms aside",)


def test_what_a_norm_has_learned_stays_on_the_program() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    program = detached(model, 2, 3)
    after = program.root.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.allclose(program(torch.ones(2, 3)), model[0](torch.ones(2, 3))), "in between it is the linear alone"


def test_a_norm_without_scale_and_shift_has_none() -> None:
    (row,) = detached(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)), 2, 3).set_aside.rows.values()
    assert (row.gamma, row.beta) == (None, None)


@pytest.mark.parametrize(
    ("product", "shape", "channels"),
    [
        (nn.Conv1d(4, 6, 1, bias=False), (2, 4, 5), 6),
        (nn.Conv2d(4, 6, 1, groups=2, bias=False), (2, 4, 5, 5), 6),
        (nn.ConvTranspose2d(4, 6, 1, bias=False), (2, 4, 5, 5), 6),
        (nn.ConvTranspose2d(4, 6, 1, groups=2, bias=False), (2, 4, 5, 5), 6),
        (nn.Linear(4, 6, bias=False), (2, 4), 6),
    ],
    ids=lambda value: str(value) if isinstance(value, nn.Module) else "",
)
def test_a_product_without_a_bias_is_given_one_of_zeros(
    product: nn.Module, shape: tuple[int, ...], channels: int
) -> None:
    norms = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    program = detached(nn.Sequential(product, norms[len(shape)](channels)), *shape)
    (node,) = program.set_aside.rows
    bias = program.tensor(node.all_input_nodes[2])
    assert bias is not None
    assert torch.equal(bias, torch.zeros(channels))
    x = torch.randn(shape)
    assert torch.equal(program(x), product(x))


class Tied(nn.Module):
    """One convolution, called twice; a norm after the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.conv(self.norm(self.conv(x)))
        return found


def test_a_norm_whose_weight_another_op_reads_stays_with_the_reason() -> None:
    program = detached(Tied(), 2, 4, 5, 5)
    assert ops(program) == ["conv2d", "batch_norm", "conv2d"]
    assert not program.log[-1].changed
    (note,) = program.log[-1].notes
    assert "conv.weight" in note
    assert note.startswith("batch_norm")
    assert not program.set_aside.rows


def test_a_norm_of_something_else_stays() -> None:
    program = detached(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)), 2, 4, 5, 5)
    assert ops(program) == ["relu", "batch_norm", "conv2d"]
    assert program.log[-1].notes == ()


def test_counter_and_mode_come_from_the_program() -> None:
    program = small_net()
    assert DetachNorms().run(program)
    (row,) = program.set_aside.rows.values()
    assert (row.counter, row.follows_mode, row.name) == ("count", True, "batch_norm")
    assert not DetachNorms().run(program)
