"""`qc.quantize`: the verbs in one call, with nothing lost on the way and nothing of the caller's touched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import quantc as qc
from quantc.cli.example import digits_cnn
from quantc.errors import AnnotationError, CalibrationError, InputError, ModeError
from quantc.verbs.quantize_model import KEPT

BATCH = ({0: Dim("batch")},)


@pytest.fixture
def model() -> nn.Module:
    return digits_cnn()[0]


@pytest.fixture(scope="module")
def program() -> qc.Program:
    return qc.capture(digits_cnn()[0], (images(99),))


def images(seed: int, count: int = 8) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def batches(count: int = 4) -> list[Tensor]:
    return [images(seed) for seed in range(count)]


def digest(module: nn.Module) -> str:
    """Names, kinds and bits of everything a module holds, and its mode."""
    found = hashlib.sha256(repr((type(module).__name__, module.training)).encode())
    for name, tensor in sorted(module.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def by_hand(model: nn.Module, data: list[Tensor], backend: str = "x86") -> qc.Program:
    prepared = qc.prepare(qc.capture(model, (images(99),)), backend)
    qc.calibrate(prepared, data)
    return qc.convert(prepared)


def test_it_is_the_four_verbs(model: nn.Module) -> None:
    result = qc.quantize(model, (images(99),), batches(), "x86")
    expected = by_hand(model, batches())
    x = images(5)
    assert result.program(x).equal(expected(x))
    assert result(x).equal(expected(x)), "the result is callable too"
    assert str(result.program) == str(expected)
    assert result.captured.stage is qc.Stage.CANONICAL
    assert result.prepared.stage is qc.Stage.CALIBRATED
    assert result.program.stage is qc.Stage.FOLDED


def test_neither_the_model_nor_the_captured_program_is_changed(model: nn.Module) -> None:
    program = qc.capture(model, (images(99),))
    text, before = program.dump(), (digest(model), digest(program.root))
    x = images(5)
    expected = model(x)
    result = qc.quantize(program, None, batches())
    qc.quantize(model, (images(99),), batches())
    assert (digest(model), digest(program.root)) == before
    assert program.dump() == text
    assert program.plan.is_empty
    assert model(x).equal(expected)
    assert program(x).equal(result.captured(x))
    assert result.captured is program


def test_a_model_in_training_mode_is_refused_and_stays_so() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    before = digest(model), [module.training for module in model.modules()]
    with pytest.raises(ModeError, match="training mode") as caught:
        qc.quantize(model, (images(0),), batches())
    assert "model.eval()" in str(caught.value.advice)
    assert (digest(model), [module.training for module in model.modules()]) == before


def test_a_generator_is_gone_through_once(program: qc.Program) -> None:
    asked: list[int] = []

    def stream() -> Iterator[Tensor]:
        for seed in range(5):
            asked.append(seed)
            yield images(seed)

    result = qc.quantize(program, None, stream())
    assert asked == [0, 1, 2, 3, 4]
    assert result.report.calibration is not None
    assert result.report.calibration.batches == 5
    x = images(7)
    assert result(x).equal(qc.quantize(program, None, batches(5))(x))


def test_a_dataloader_of_tuples_serves(program: qc.Program) -> None:
    data = torch.utils.data.TensorDataset(torch.cat(batches()))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    x = images(7)
    assert qc.quantize(program, None, loader)(x).equal(qc.quantize(program, None, batches())(x))


def test_few_batches_are_held_however_many_there_are(program: qc.Program) -> None:
    alive: list[int] = []

    class Counted:
        """A batch that tells how many others are alive."""

        living = 0

    def stream() -> Iterator[Tensor]:
        import weakref

        for seed in range(10):
            batch = images(seed)
            Counted.living += 1
            weakref.finalize(batch, lambda: setattr(Counted, "living", Counted.living - 1))
            alive.append(Counted.living)
            yield batch
            del batch

    qc.quantize(program, None, stream())
    assert max(alive) <= KEPT + 2


@pytest.mark.parametrize("kind", ["exported", "pt2", "fx"])
def test_whatever_capture_takes_is_taken(kind: str, model: nn.Module, tmp_path: Path) -> None:
    x = images(7)
    expected = by_hand(model, batches())(x)
    if kind == "fx":
        found = qc.quantize(model, (images(99),), batches(), method="fx")
    else:
        exported = export(model, (images(99),))
        torch.export.save(exported, tmp_path / "digits.pt2")
        given = exported if kind == "exported" else tmp_path / "digits.pt2"
        found = qc.quantize(given, None, batches())
    assert found(x).equal(expected)


def test_sizes_may_vary(model: nn.Module) -> None:
    result = qc.quantize(model, (images(99),), [images(0, 3), images(1, 12)], dynamic_shapes=BATCH)
    x = images(5, 20)
    assert torch.cat([result(part) for part in torch.split(x, 7)]).allclose(result(x), atol=1e-5)
    with pytest.raises(InputError):
        qc.quantize(model, (images(99),), [images(0, 3)], dynamic_shapes=None)


def test_config_reaches_prepare(program: qc.Program) -> None:
    config = qc.QuantConfig().set("head", qc.FLOAT)
    coverage = qc.quantize(program, None, batches(), config=config).report.coverage
    (row,) = [row for row in coverage.rows if row.module == "head"]
    assert row.verdict == "float"
    assert "head" in row.reason


def test_nothing_to_quantize_is_refused_unless_allowed() -> None:
    model, x = nn.Softplus().eval(), torch.rand(2, 3)
    with pytest.raises(AnnotationError, match="nothing was quantized"):
        qc.quantize(model, (x,), [x])
    result = qc.quantize(model, (x,), [x], allow_empty=True)
    assert result(x).equal(model(x))
    assert result.report.comparison is not None
    assert result.report.comparison.sqnr == float("inf")


def test_a_batch_is_not_taken_for_batches(program: qc.Program) -> None:
    with pytest.raises(CalibrationError, match="not an iterable of batches"):
        qc.quantize(program, None, images(0))


def test_an_error_of_the_data_comes_out_as_it_is(program: qc.Program) -> None:
    def stream() -> Iterator[Tensor]:
        yield images(0)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        qc.quantize(program, None, stream())


# -- the report -----------------------------------------------------------------------------------------------


def test_the_report_says_what_was_measured(model: nn.Module) -> None:
    result = qc.quantize(model, (images(99),), batches(), config=qc.QuantConfig().set("block1", qc.FLOAT))
    report = result.report
    float_bytes = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    assert report.size.before == float_bytes
    quantized = result.program.module.state_dict().values()
    assert report.size.after == sum(tensor.numel() * tensor.element_size() for tensor in quantized)
    seen = torch.cat(batches()[:KEPT])
    with torch.inference_mode():
        expected = torch.cat([model(part) for part in torch.split(seen, 8)]).double()
        found = torch.cat([result(part) for part in torch.split(seen, 8)]).double()
    sqnr = 10 * torch.log10(expected.square().sum() / (found - expected).square().sum())
    assert report.comparison is not None
    assert report.comparison.sqnr == pytest.approx(float(sqnr), abs=0.01)
    assert [step.name for step in report.steps] == ["capture", "prepare", "calibrate", "convert", "compare"]
    costs = [layer.local for layer in report.comparison.worst() if layer.local is not None]
    assert costs == sorted(costs)


def test_the_report_prints_and_is_json(program: qc.Program) -> None:
    report = qc.quantize(program, None, batches(), config=qc.QuantConfig().set("block1", qc.FLOAT)).report
    text = str(report)
    assert text.splitlines()[0] == "DigitsCNN, quantized for x86"
    for part in (
        "coverage: ",
        "SQNR: ",
        "size: ",
        "time: ",
        "the worst first",
        "left float",
        "block1.conv1",
        "as the config",
    ):
        assert part in text
    assert "\x1b" not in text
    data = json.loads(report.to_json())
    assert data == json.loads(json.dumps(report.to_data()))
    assert data["backend"] == "x86"
    assert data["size"]["after"] == report.size.after
    assert {row["verdict"] for row in data["coverage"]["rows"]} == {"quantized", "float"}
    assert data["comparison"]["layers"]
    assert data["calibration"]["batches"] == 4
    assert any(entry["name"] == "fold" for entry in data["log"])


def test_the_result_is_saved_and_read_back(program: qc.Program, tmp_path: Path) -> None:
    result = qc.quantize(program, None, batches())
    result.save(tmp_path / "digits.qc")
    x = images(5)
    assert qc.load(tmp_path / "digits.qc")(x).equal(result(x))


@pytest.mark.parametrize("room", ["no", "weights"])
def test_passes_fit_to_the_room_that_convert_leaves(room: Literal["no", "weights"]) -> None:
    """Every pass that asks for `reduce_range` gets it, and what is fitted is no worse on data of its own."""
    torch.manual_seed(0)
    data = [torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(12)]
    one = nn.Sequential(nn.Linear(16, 8)).eval()
    several = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    for model in (one, several):
        errors = []
        for passes in (False, "equalize,leave-float,rescale,round,correct-bias"):
            result = qc.quantize(model, (data[0],), data[:8], recover=passes, reduce_range=room)
            errors.append(sum(float((result.program(x) - model(x)).detach().square().sum()) for x in data[8:]))
        names = [entry.name for entry in result.prepared.log][-5:]
        assert all(f"reduce-range={room}" in name for name in names), names
        assert errors[1] <= errors[0] * 10**0.02, errors
