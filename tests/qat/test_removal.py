"""Removal of what training put into a program: the trained values stay, and the graph is what it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quantc.errors import TrainingError
from quantc.ir.dialect import is_op
from quantc.ir.program import Program
from quantc.observe.trained import Trained
from quantc.qat.fake import FakeQuantizer, FollowedRange, OwnRange
from quantc.qat.norms import LiveNorm
from quantc.qat.removal import (
    end_modes,
    fake_quantizers,
    fold_norms,
    forget_places,
    module_calls,
    read_fake_quantizers,
    remove_fake_quantizers,
    unfold_norms,
)
from quantc.spec.spec import INT8_WEIGHT
from tests.support.training import SMALL_BATCH, prepared, small_model, small_prepared


def stepped() -> Program:
    program = small_prepared()
    program(SMALL_BATCH[0])
    return program


def test_what_training_found_is_stored_in_the_plan() -> None:
    program = stepped()
    read_fake_quantizers(program)
    stored = program.plan.statistics
    followed = {fake.group: fake for fake in fake_quantizers(program.root) if isinstance(fake, FollowedRange)}
    assert sorted(stored) == sorted(followed)  # weights are read when they are converted
    for name, fake in followed.items():
        found = stored[name]
        assert isinstance(found, Trained)
        assert found.found.equals(fake.trained())


def test_a_program_that_was_not_trained_is_refused() -> None:
    with pytest.raises(TrainingError, match="was not trained") as caught:
        read_fake_quantizers(small_prepared())
    assert "2 fake quantizers" in str(caught.value.where)


def test_a_single_fake_quantizer_without_a_scale_is_refused_by_name() -> None:
    program = stepped()
    fake = next(fake for fake in fake_quantizers(program.root) if isinstance(fake, FollowedRange))
    fake.batches.zero_()
    with pytest.raises(TrainingError, match=fake.group):
        read_fake_quantizers(program)


def test_fake_quantizers_are_bypassed_and_counted() -> None:
    program = stepped()
    assert remove_fake_quantizers(program) == 4
    left = [module for _, module in module_calls(program)]
    assert not any(isinstance(module, FakeQuantizer | LiveNorm) for module in left)
    linear = next(node for node in program.nodes() if is_op(node, "linear"))
    assert [str(node.op) for node in linear.all_input_nodes] == ["call_function", "get_attr", "get_attr"]


def test_norms_are_folded_into_the_weights_for_good() -> None:
    program = small_prepared()
    remove_fake_quantizers(program)
    program.eval()
    assert fold_norms(program) == 1
    end_modes(program)
    assert [str(node.op) for node in program.nodes() if node.op == "call_module"] == []
    assert torch.allclose(program(SMALL_BATCH[0]), small_model()(SMALL_BATCH[0]), atol=1e-5)
    assert any("folded" in note for note in program.inference_only)


@pytest.mark.parametrize("name", ["1.running_var", "1.running_mean"])  # of the weight, and of the bias alone
def test_a_norm_that_has_diverged_is_not_folded(name: str) -> None:
    program = small_prepared()
    program.state_dict()[name].fill_(torch.nan)
    remove_fake_quantizers(program)
    with pytest.raises(TrainingError, match="NaN or infinite"):
        fold_norms(program)


def test_products_read_their_own_weights_again() -> None:
    program = small_prepared()
    remove_fake_quantizers(program)
    (row,) = unfold_norms(program)
    conv = next(node for node in program.nodes() if is_op(node, "conv2d"))
    assert [str(node.target) for node in (row.weight, row.bias)] == ["0.weight", "0.bias"]
    assert list(conv.args[1:3]) == [row.weight, row.bias]
    names = [str(node.target) for node in row.norm if node is not None]
    assert names == ["1.weight", "1.bias", "1.running_mean", "1.running_var"]
    assert len(program.set_aside) == 0


def test_a_product_that_lost_its_folded_weight_is_refused() -> None:
    program = small_prepared()
    remove_fake_quantizers(program)
    conv = next(node for node in program.nodes() if is_op(node, "conv2d"))
    weight = program.read("0.weight", before=conv)
    conv.args = (conv.args[0], weight, *conv.args[2:])
    with pytest.raises(TrainingError, match="no longer reads"):
        unfold_norms(program)


def test_modes_become_arguments_again() -> None:
    program = prepared()
    remove_fake_quantizers(program)
    fold_norms(program)
    end_modes(program)
    dropout = next(node for node in program.nodes() if is_op(node, "dropout"))
    assert dropout.args[2] is False
    assert not program.training
    assert not list(program.graph.find_nodes(op="call_module"))


def test_places_of_erased_nodes_leave_the_plan() -> None:
    program = prepared()
    pool = next(node for node in program.nodes() if is_op(node, "max_pool2d"))
    before = {site for group in program.plan.groups for site in group.places}
    forget_places(program, {pool})
    after = {site for group in program.plan.groups for site in group.places}
    assert {str(site) for site in before - after} == {"max_pool2d:in0", "max_pool2d:out0"}
    assert not any(site.node == "max_pool2d" for site in program.plan.outcomes)
    assert len(program.plan.groups) == 6  # the group stays, for conv and add still read it


def test_each_fake_quantizer_is_found_once() -> None:
    fake = OwnRange("a", INT8_WEIGHT)
    model = nn.Sequential(fake, nn.Sequential(fake, nn.ReLU()))
    assert list(fake_quantizers(model)) == [fake]
