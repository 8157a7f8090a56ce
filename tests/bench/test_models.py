"""The models of the benchmark: seeded weights and inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.bench.models import COUNT, MODELS, STD, calibrate_norms, initialise, noise, task_of, tokens
from quantc.bench.networks import ViT


def test_tasks_are_seeded_and_calibrate_with_other_inputs_than_they_measure_on() -> None:
    one, other, wide = task_of("lstm"), task_of("lstm"), task_of("lstm", batch=3)
    assert torch.equal(one.model.state_dict()["head.weight"], other.model.state_dict()["head.weight"])
    assert torch.equal(one.unseen[0][0], other.unseen[0][0])
    assert not torch.equal(one.unseen[0][0], one.calibration[0][0])
    assert wide.unseen[0][0].shape == (3, 64, 512)
    assert wide.name == "lstm, batch 3"


def test_random_weights_keep_activations_in_range() -> None:
    net = calibrate_norms(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3)), size=16)
    assert not net.training
    out = net(torch.randn(2, 3, 16, 16)).detach()
    assert 0.1 < float(out.std()) < 10
    small = initialise(ViT(width=32, heads=2, depth=1, image=32))
    assert float(small(torch.randn(1, 3, 32, 32)).detach().std()) > 0


def test_noise_and_tokens_are_seeded_batches() -> None:
    one, same, other = (noise(3, 5)(seed, 2) for seed in (1, 1, 2))
    assert len(one) == COUNT
    assert one[0][0].shape == (2, 3, 5)
    assert torch.equal(one[3][0], same[3][0])
    assert not torch.equal(one[0][0], other[0][0])
    assert not torch.equal(one[0][0], one[1][0])
    (words,) = tokens(length=7, words=4)(1, 3)[0]
    assert words.shape == (3, 7)
    assert words.dtype is torch.int64
    assert set(words.unique().tolist()) <= {0, 1, 2, 3}


def test_batch_norms_know_their_inputs_once_settled() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))
    calibrate_norms(net, size=8)
    norm: Any = net[1]
    assert int(norm.num_batches_tracked) == 3
    assert not torch.equal(norm.running_var, torch.ones(4))
    again = calibrate_norms(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)), size=8)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), again.state_dict().values(), strict=True))


def test_weights_of_encoders_are_small_and_their_biases_zero() -> None:
    net: Any = initialise(ViT(width=32, heads=2, depth=1, image=32))
    assert float(net.head.weight.detach().std()) == pytest.approx(STD, rel=0.1)
    assert not bool(net.head.bias.detach().any())
    assert float(net.position.detach().std()) == pytest.approx(STD, rel=0.3)
    assert not net.training


def test_a_model_at_its_own_batch_size_goes_by_its_own_name() -> None:
    assert MODELS["resnet18-batch8"].batch == 8
    assert task_of("lstm", batch=1).name == "lstm"
