"""remove-fake-quantize: what is left of training is a calibrated program with folded norms, and the same bits."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

import quantc as qc
from quantc.annotate.quantizer import quantizer_of
from quantc.ir.dialect import op_name
from quantc.ir.program import Program, Stage
from quantc.passes.annotate import Annotate
from quantc.passes.detach_norms import DetachNorms
from quantc.passes.insert_fake_quantize import InsertFakeQuantize
from quantc.passes.quantize import QuantizePass
from quantc.passes.remove_fake_quantize import RemoveFakeQuantize, as_inference_has_it
from quantc.passes.share import Share
from quantc.pipeline.pipeline import Pipeline
from quantc.spec.spec import UINT8
from tests.support.small_backend import SMALL

BACKEND = SMALL.but(act=UINT8.but(observe="minmax"))
TRAINING = Pipeline((DetachNorms(), Annotate(backend=quantizer_of(BACKEND)), Share(), InsertFakeQuantize()))


def batch(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(seed))


def trained() -> Program:
    """A convolution with a norm and dropout, after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2))
    program = TRAINING.run(qc.capture(model.eval(), (batch(),), method="fx"))
    optimizer = torch.optim.SGD(list(program.parameters()), 0.1)
    for seed in range(2):
        optimizer.zero_grad()
        program(batch(seed)).square().mean().backward()
        optimizer.step()
    return program


def test_what_is_left_has_neither_modules_nor_norms_nor_dropout() -> None:
    program = Pipeline((RemoveFakeQuantize(),)).run(trained())
    assert [op_name(node) for node in program.graph.nodes if node.op.startswith("call_")] == ["conv2d", "relu"]
    assert program.stage is Stage.CALIBRATED
    assert not program.is_live
    assert not program.training
    assert program.log[-1].notes == ("2 fake quantizers removed, 1 norms folded",)
    assert len(program.inference_only) == 2


def test_the_norm_is_folded_as_torch_folds_it() -> None:
    program = trained()
    parts = {**dict(program.root.named_parameters()), **dict(program.root.named_buffers())}
    weight, bias = fuse_conv_bn_weights(
        cast(nn.Parameter, parts["0.weight"]),
        None,
        parts["1.running_mean"],
        parts["1.running_var"],
        1e-5,
        cast(nn.Parameter, parts["1.weight"]),
        cast(nn.Parameter, parts["1.bias"]),
    )
    RemoveFakeQuantize().run(program)
    conv = program.node("conv2d")
    found = [program.tensor(node) for node in conv.all_input_nodes[1:]]
    for expected, actual in zip((weight, bias), found, strict=True):
        assert actual is not None
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_quantizing_it_gives_the_bits_of_the_trained_program() -> None:
    program = trained()
    program.eval()
    expected = program(batch(7)).detach()
    Pipeline((RemoveFakeQuantize(), QuantizePass())).run(program)
    assert torch.equal(program(batch(7)), expected)


def test_a_program_that_does_not_train_is_left_alone() -> None:
    program = Pipeline((DetachNorms(), Annotate(backend=quantizer_of(BACKEND)), Share())).run(
        qc.capture(nn.Sequential(nn.Linear(3, 4), nn.Dropout()).eval(), (torch.randn(2, 3),), method="fx")
    )
    before = program.dump("text")
    assert not RemoveFakeQuantize().run(program)
    assert program.dump("text") == before


def test_a_copy_for_inspection_leaves_training_as_it_is() -> None:
    program = trained()
    before = program.dump("text")
    weight = dict(program.root.named_parameters())["0.weight"].clone()
    copy = as_inference_has_it(program)
    assert [op_name(node) for node in copy.graph.nodes if node.op.startswith("call_")] == ["conv2d", "relu"]
    assert program.dump("text") == before
    assert program.is_live
    assert torch.equal(dict(copy.root.named_parameters())["0.weight"], weight), "nothing is folded"


class Joined(nn.Module):
    """Two results on one scale."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.other(x)], 1)


def test_as_many_are_removed_as_were_inserted() -> None:
    """A fake quantizer that several tensors share counts once."""
    x = torch.randn(4, 3, 6, 6)
    program = qc.prepare(qc.capture(Joined(), (x,)), "qnnpack", qat=True)
    program(x)
    inserted, removed = (
        next(note for entry in log if entry.name.startswith(name) for note in entry.notes)
        for name, log in (("insert-fake", program.log), ("remove-fake", qc.convert(program).log))
    )
    assert inserted.split()[0] == removed.split()[0]
