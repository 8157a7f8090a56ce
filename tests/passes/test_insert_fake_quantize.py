"""insert-fake-quantize: who can be trained, what trains on which grid, and what stands in the graph for it."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from quantc.annotate.quantizer import Backend, quantizer_of
from quantc.errors import TrainingError
from quantc.ir.program import Program
from quantc.passes.annotate import Annotate
from quantc.passes.detach_norms import DetachNorms
from quantc.passes.insert_fake_quantize import InsertFakeQuantize
from quantc.passes.share import Share
from quantc.pipeline.pipeline import Pipeline
from quantc.qat.fake import FakeQuantizer, FollowedRange, GivenScale, OwnRange
from quantc.qat.norms import LiveNorm
from quantc.qat.removal import module_calls
from quantc.spec.spec import UINT8
from tests.support.small_backend import SMALL
from tests.support.text_programs import inputs_of, program_of

LINEAR = """program "Head" stage=canonical method=export mode=eval
  input %x : f32[4,3]
  const %w = "head.weight" : f32[5,3] param
  %head : f32[4,5] = linear(%x, %w)
  %unit : f32[4,5] = sigmoid(%head)
  output (%unit,)
"""
NORM = """program "Net" stage=canonical method=export mode=eval
  input %x : f32[4,3]
  const %w = "head.weight" : f32[5,3] param
  const %mean = "norm.running_mean" : f32[5] buffer
  const %var = "norm.running_var" : f32[5] buffer
  %head : f32[4,5] = linear(%x, %w)
  %norm : f32[4,5] = batch_norm(%head, None, None, %mean, %var, training=False, momentum=0.5, eps=1e-05, cudnn_enabled=False) {mode_arg=5, train=True, eval=False}
  %drop : f32[4,5] = dropout(%norm, p=0.5, train=False) {mode_arg=2, train=True, eval=False}
  output (%drop,)
"""
BACKEND = SMALL.but(act=UINT8.but(observe="minmax"))


def prepared(text: str, backend: Backend = BACKEND) -> Program:
    steps = (DetachNorms(), Annotate(backend=quantizer_of(backend)), Share())
    return Pipeline(steps).run(program_of(text))


def live(text: str, backend: Backend = BACKEND) -> Program:
    return Pipeline((InsertFakeQuantize(),)).run(prepared(text, backend))


def fakes(program: Program) -> dict[str, FakeQuantizer]:
    return {str(node.args[0]): module for node, module in module_calls(program) if isinstance(module, FakeQuantizer)}


def test_each_group_trains_as_its_spec_says() -> None:
    program = live(LINEAR)
    kinds = {source: type(module) for source, module in fakes(program).items()}
    assert kinds == {"x": FollowedRange, "w": OwnRange, "head": FollowedRange, "unit": GivenScale}
    assert program.log[-1].notes == ("4 fake quantizers, 0 norms",)


def test_the_program_ends_in_training_mode_and_gradients_pass() -> None:
    program = live(LINEAR)
    assert program.is_live
    assert program.training
    (x,) = inputs_of(program)
    program(x).sum().backward()
    (weight,) = program.parameters()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


def test_a_forward_pass_in_eval_rounds_as_torchs_fake_quantize_does() -> None:
    program = live(LINEAR)
    (x,) = inputs_of(program)
    program(x)
    program.eval()
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = (high - low) / 255
    expected = torch.fake_quantize_per_tensor_affine(x, scale, round(-low / scale), 0, 255)
    assert torch.allclose(fakes(program)["x"](x), expected, atol=1e-6)


def test_norms_come_back_and_learn_their_statistics_in_training_alone() -> None:
    program = live(NORM)
    assert sum(isinstance(module, LiveNorm) for _, module in module_calls(program)) == 1
    mean, var = (program.root.get_buffer(f"norm.running_{name}") for name in ("mean", "var"))
    norm = nn.BatchNorm1d(5, momentum=0.5)
    norm.load_state_dict({"running_mean": mean.clone(), "running_var": var.clone()}, strict=False)
    (x,), (weight,) = inputs_of(program), program.parameters()
    program(x)
    norm(nn.functional.linear(x, weight))
    assert torch.allclose(mean, cast(Tensor, norm.running_mean), atol=0.02), "of what the product is without the norm"
    assert torch.allclose(var, cast(Tensor, norm.running_var), rtol=0.05)
    learned = mean.clone()
    program.eval()
    program(x)
    assert torch.equal(mean, learned)


def test_modes_are_asked_for_as_the_program_runs() -> None:
    program = live(NORM)
    text = program.dump("text").replace("mode=train", "mode=eval")
    (x,) = inputs_of(program)
    program(x)
    assert (program(x) == 0).any(), "dropout is on"
    program.eval()
    assert torch.equal(program(x), program(x))
    assert program.dump("text").count("call_module") == text.count("call_module")


def test_calibrations_observers_become_moving_averages_and_the_log_says_so() -> None:
    program = live(LINEAR, SMALL.but(act=UINT8.but(observe="mse")))
    assert "2 ranges follow a moving average in training; mse is for calibration" in program.log[-1].notes


def test_what_trains_already_is_left_alone() -> None:
    program = live(LINEAR)
    before = program.dump("text")
    outcome = InsertFakeQuantize().run(program)
    assert not outcome.changed
    assert program.dump("text") == before


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_program_that_is_for_inference_is_refused_with_the_reason() -> None:
    program = prepared(LINEAR)
    program.note_inference_only("a batch norm was folded")
    with pytest.raises(TrainingError, match="Head cannot be trained: a batch norm was folded"):
        InsertFakeQuantize().run(program)
    assert not program.is_live


def test_a_program_without_parameters_is_refused_unless_it_is_allowed() -> None:
    text = LINEAR.replace('"head.weight" : f32[5,3] param', '"head.weight" : f32[5,3] param frozen')
    with pytest.raises(TrainingError, match="no parameter that takes a gradient"):
        InsertFakeQuantize().run(prepared(text))
    program = Pipeline((InsertFakeQuantize(untrained="allow"),)).run(prepared(text))
    assert program.is_live
    program(*inputs_of(program))
    assert not [parameter for parameter in program.parameters() if parameter.requires_grad]


def test_inference_mode_is_refused() -> None:
    program = prepared(LINEAR)
    with torch.inference_mode(), pytest.raises(TrainingError, match="inference mode"):
        InsertFakeQuantize().run(program)
