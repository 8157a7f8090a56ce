"""Quantization-aware training, from `prepare(qat=True)` to `convert`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.ir.dialect import is_op
from quantc.ir.program import Program
from quantc.qat.norms import LiveNorm
from tests.support.training import CONFIGS, assert_converts_exactly, batches, net, prepared, trained
from tests.zoo import BY_NAME


@pytest.mark.parametrize("backend", ["x86", "qnnpack", "executorch"])
def test_eval_is_the_converted_program_bit_for_bit(backend: str) -> None:
    program = trained(prepared(backend))
    converted = assert_converts_exactly(program, batches(1)[0][0])
    assert not any(is_op(node, "batch_norm", "dropout") for node in converted.nodes() if node.name.startswith("drop"))
    converted.verify()


@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_kind_of_scale_converts_exactly(name: str) -> None:
    program = trained(prepared(config=CONFIGS[name]))
    for x, _ in batches(3):
        assert_converts_exactly(program, x)


@pytest.mark.parametrize(
    "name", ["exotic_convs", "audio_conv1d", "video_conv3d", "conv_transpose_decoder", "super_resolution"]
)
def test_models_of_the_zoo_convert_exactly(name: str) -> None:
    case = BY_NAME[name]
    args, kwargs = case.example()
    program = qc.prepare(qc.capture(case.model(), args, example_kwargs=kwargs or None), "x86", qat=True)
    optimizer = torch.optim.SGD(program.parameters(), lr=1e-3)
    for seed in range(2):
        args, kwargs = case.example(seed)
        outputs = pytree.tree_leaves(program(*args, **kwargs))
        optimizer.zero_grad()
        torch.stack([output.square().mean() for output in outputs]).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert_converts_exactly(program, *args, **kwargs)


def test_live_norms_learn_what_float_training_does_where_rounding_is_fine() -> None:
    """With 16 bits there is next to nothing to round: training must go as it does without."""
    model = net().train()
    reference = copy.deepcopy(model)
    from dataclasses import replace

    from quantc.backends.x86 import X86

    even = qc.INT16.but(qmin=-32767)  # else the largest number of all is clipped, and has no gradient
    fine_roles = {"act": even.but(eps=1e-9), "weight": even.but(role="weight", eps=1e-12)}
    fine = replace(X86, roles={**X86.roles, **fine_roles}, takes=(), instruction_set="")
    program = qc.prepare(qc.capture(model.eval(), (batches(1)[0][0],)), fine, qat=True)
    drop = [module for module in program.root.modules() if getattr(module, "op", "") == "dropout"]
    for flag in drop:
        flag.train_value = False  # type: ignore[assignment]
    reference.drop.p = 0.0  # type: ignore[union-attr]
    for module, parameters in ((program, program.parameters()), (reference, reference.parameters())):
        optimizer = torch.optim.SGD(parameters, lr=0.02)
        for x, y in batches(5):
            optimizer.zero_grad()
            functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    state = program.state_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.allclose(state[name].float(), tensor.float(), rtol=2e-3, atol=2e-3), name


def test_integer_form_of_what_was_trained() -> None:
    program = trained(prepared())
    x = batches(1)[0][0]
    found = qc.agreement(qc.convert(program), qc.convert(program, to="integer"), [x])
    assert found.rows
    assert found.worst <= 1
    assert found.clear_equal >= 0.999


def test_the_model_is_not_changed() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    program = qc.capture(model, (batches(1)[0][0],))
    text = str(program)
    trained(qc.prepare(program, "x86", qat=True))
    assert str(program) == text
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_train_and_eval_keep_every_attribute() -> None:
    program = prepared()
    module = program.module
    assert program.training
    drops = [node for node in program.nodes() if is_op(node, "dropout")]
    assert [node.args[1] for node in drops] == [0.3]
    x = batches(1)[0][0]
    program(x)
    program.eval()
    assert program.module is module
    assert torch.equal(program(x), program(x))  # neither dropout nor statistics
    counted = {name: int(value) for name, value in program.state_dict().items() if name.endswith("tracked")}
    program.train()
    assert not torch.equal(program(x), program(x))
    after = {name: int(value) for name, value in program.state_dict().items() if name.endswith("tracked")}
    assert {after[name] - counted[name] for name in after} == {2}
    momenta = sorted(child.momentum or 0.0 for child in program.root.modules() if isinstance(child, LiveNorm))
    assert momenta == pytest.approx([0.1, 0.1, 0.3])
    module.eval()  # a module that somebody holds follows its own mode
    assert torch.equal(module(x), module(x))


def test_what_is_quantized_can_be_asked_while_it_trains() -> None:
    program = prepared()
    before = str(program)
    ours = {row.node: row.verdict for row in program.coverage().rows}
    theirs = {
        row.node: row.verdict for row in qc.prepare(qc.capture(net(), (batches(1)[0][0],)), "x86").coverage().rows
    }
    assert ours == theirs
    assert sum(row.macs or 0 for row in program.coverage().rows) > 0
    assert "✗" not in str(program.explain("conv2d")).splitlines()[0]
    assert str(program) == before


def test_a_trained_program_is_saved_and_lowered_like_any_other(tmp_path: Any) -> None:
    program = trained(prepared())
    x = batches(1)[0][0]
    converted = qc.convert(program)
    converted.save(tmp_path / "trained.qc")
    loaded = qc.load(tmp_path / "trained.qc")
    assert isinstance(loaded, Program)
    assert torch.equal(loaded(x), converted(x))
    fast = qc.lower(converted, "x86")
    with torch.no_grad():
        assert float((fast(x) - converted(x)).abs().max()) < 0.5


def test_preparing_to_train_prints_as_a_pipeline() -> None:
    pipeline = qc.pipelines.training("x86")
    assert qc.Pipeline.parse(str(pipeline)).names == pipeline.names
    assert "insert-fake-quantize" in pipeline.names
