"""The embedded example: weights that ship, images that are fetched, and how much of it survives int8."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from examples import train_digits
from quantc.cli.example import IMAGES, Digits, digits_cnn, digits_data, digits_split
from quantc.pipeline.registry import BACKENDS

ON_DEVICE = ("x86", "qnnpack", "executorch")


@pytest.fixture(scope="module")
def captured() -> qc.Program:
    model, inputs = digits_cnn()
    return qc.capture(model, inputs, dynamic_shapes=({0: Dim("batch")},))


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    return digits_data()[0]


@pytest.fixture(scope="module")
def held_out() -> Digits:
    return digits_data()[1]


def outputs(model: nn.Module | qc.Program, images: Tensor) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(images)
        return found


def accuracy(model: nn.Module | qc.Program, data: Digits) -> float:
    return float((outputs(model, data.images).argmax(1) == data.labels).double().mean())


def sqnr(reference: Tensor, found: Tensor) -> float:
    return float(10 * torch.log10(reference.square().sum() / (reference - found).square().sum()))


# -- what ships -----------------------------------------------------------------------------------------------


def test_the_weights_are_small_and_the_model_is_not_tiny() -> None:
    file = resources.files("quantc") / "data" / "digits_cnn.safetensors"
    assert len(file.read_bytes()) <= 250_000
    model, (images,) = digits_cnn()
    assert 90_000 < sum(parameter.numel() for parameter in model.parameters()) < 130_000
    assert not model.training
    assert images.shape == (4, 1, 8, 8)
    assert 0 <= float(images.min()) < float(images.max()) == 1


def test_the_example_inputs_are_held_out_images(held_out: Digits) -> None:
    _, (images,) = digits_cnn()
    assert images.equal(held_out.images[:4])


def test_the_split_is_all_of_the_images_and_no_image_twice() -> None:
    train, held = digits_split()
    pixels, labels = load_digits(return_X_y=True)
    assert (len(train.images), len(held.images)) == (1078, 719)
    together = torch.cat([train.images, held.images]).reshape(-1, 64).numpy() * 16
    assert sorted(together.tolist()) == sorted(pixels.tolist())
    everything = torch.bincount(torch.from_numpy(labels)) / len(labels)
    assert torch.allclose(torch.bincount(held.labels) / len(held.labels), everything, atol=1e-3), "stratified"


def test_calibration_never_sees_what_is_measured_on(batches: list[Tensor], held_out: Digits) -> None:
    train, _ = digits_split()
    seen = torch.cat(batches)
    assert len(seen) == 256
    assert seen.equal(train.images[: len(seen)])


def test_loading_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    digits_cnn()
    assert torch.rand(4).equal(expected)


def test_two_copies_do_not_share_weights() -> None:
    (first, _), (second, _) = digits_cnn(), digits_cnn()
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert next(second.parameters()).abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", list(train_digits.MODELS))
def test_training_again_gives_a_model_as_good(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build, *_ = train_digits.MODELS[name]
    try:
        train_digits.main(name, tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    stored = load_file(tmp_path / f"{name}.safetensors")
    stored.pop(IMAGES)
    model = build()
    model.load_state_dict(stored)
    assert accuracy(model.eval(), digits_split()[1]) > 0.985
    assert "held-out" in capsys.readouterr().out


# -- what int8 makes of it ------------------------------------------------------------------------------------


def test_the_float_model_knows_its_digits(held_out: Digits) -> None:
    assert accuracy(digits_cnn()[0], held_out) > 0.99


@pytest.mark.parametrize("backend", ON_DEVICE)
def test_int8_is_as_accurate(backend: str, captured: qc.Program, batches: list[Tensor], held_out: Digits) -> None:
    if backend not in BACKENDS:
        pytest.fail(f"{backend} is not installed")
    result = qc.quantize(captured, None, batches, backend)
    before, after = accuracy(captured, held_out), accuracy(result.program, held_out)
    assert abs(before - after) <= 0.003
    assert result.report.coverage.int8_share == 1.0
    assert result.report.size.ratio < 0.27


def test_per_channel_weights_beat_per_tensor_weights(
    captured: qc.Program, batches: list[Tensor], held_out: Digits
) -> None:
    reference = outputs(captured, held_out.images)
    per_tensor = qc.QuantConfig().set_all(qc.INT8_TENSOR_WEIGHT)
    found = {
        name: sqnr(reference, outputs(qc.quantize(captured, None, batches, config=config).program, held_out.images))
        for name, config in {"per channel": None, "per tensor": per_tensor}.items()
    }
    assert found["per channel"] > found["per tensor"] + 0.5


def test_a_range_that_leaves_outliers_out_beats_min_max(captured: qc.Program, batches: list[Tensor]) -> None:
    """One hot pixel in one image: min-max gives nearly all its levels to it."""
    spoilt = [batch.clone() for batch in batches]
    spoilt[0][0, 0, 0, 0] = 50.0
    images = torch.cat(batches[1:])
    reference = outputs(captured, images)
    found = {}
    for name in ("minmax", "mse", "percentile{percentile=99.9}"):
        config = qc.QuantConfig().set_all(qc.UINT8.but(observe=name))
        found[name] = sqnr(reference, outputs(qc.quantize(captured, None, spoilt, config=config).program, images))
    assert found["mse"] > found["minmax"]
    assert found["percentile{percentile=99.9}"] > found["minmax"] + 10
