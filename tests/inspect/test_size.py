"""Sizes of parameters and buffers, in memory and in a file that is not written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import mode_config, quantizer_of
from quantc.inspect.size import FileSize, Size, file_size, size, size_and_file, size_of
from quantc.ir.program import Program
from tests.support.store_files import calibrated, images, small_model


def test_the_size_that_is_told_is_that_of_the_file(tmp_path: Path) -> None:
    for name, program in programs().items():
        found = size_and_file(program, program)
        program.save(tmp_path / "model.qc")
        assert found.file == (tmp_path / "model.qc").stat().st_size, name
        with safe_open(tmp_path / "model.qc", framework="pt") as file:
            stored = {key: file.get_tensor(key).nbytes for key in file.keys()}  # noqa: SIM118 - it is not a dict
        assert found.stored == sum(count for key, count in stored.items() if key.startswith("constants/")), name
        assert (found.before, found.after, found.ratio) == (size(program, program).after,) * 2 + (1.0,)


def test_a_report_tells_memory_and_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)).eval()
    config = qc.QuantConfig().set_all(qc.INT4_GROUP)
    result = qc.quantize(model, (torch.randn(2, 128),), mode="weight-only", config=config)
    result.save(tmp_path / "model.qc")
    found = result.report.size
    assert found.before == sum(tensor.nbytes for tensor in model.state_dict().values())
    assert found.after == sum(tensor.nbytes for tensor in result.program.module.state_dict().values())
    assert found.file == (tmp_path / "model.qc").stat().st_size
    assert found.stored is not None
    assert found.stored < 0.16 * found.before < 0.3 * found.before < found.after
    data = json.loads(result.report.to_json())["size"]
    assert data == {
        "before": found.before,
        "after": found.after,
        "ratio": found.after / found.before,
        "stored": found.stored,
        "stored_ratio": found.stored / found.before,
        "file": found.file,
    }
    assert f"{found.stored:,} stored" in str(found)
    line = next(line for line in str(result.report).splitlines() if line.strip().startswith("size:"))
    assert f"({found.ratio:.1%})" in line
    assert f"({found.stored / found.before:.1%})" in line


class Kept(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_what_cannot_be_saved_has_no_size_in_a_file() -> None:
    program = qc.capture(nn.Sequential(nn.Linear(3, 3), Kept()).eval(), (torch.ones(2, 3),), method="fx", leaf=Kept)
    found = size_and_file(program, program)
    assert (found.after, found.stored, found.file, found.stored_ratio) == (48, None, None, None)
    assert str(found) == str(size(program, program))


class Narrowed(nn.Module):
    """Names that are no ASCII, types of all kinds, empty tensors: what a header can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("größe", torch.rand(5, 3))
        kinds = [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]
        for index, kind in enumerate(kinds):
            values = torch.rand(7) * 200
            self.register_buffer(f"b{index}", values > 99 if kind == torch.bool else values.to(kind))
        self.register_buffer("nothing", torch.empty(0, 4))

    def forward(self, x: Tensor) -> Any:
        rows = [(x + getattr(self, f"b{index}").sum().real) for index in range(7)]
        return rows, self.get_buffer("größe") * x.sum(), self.nothing


def programs() -> dict[str, Program]:
    prepared = calibrated()
    captured = qc.capture(small_model(), (images(),))
    bare = captured.clone()
    bare.example_inputs = None
    return {
        "captured": captured,
        "without example": bare,
        "calibrated": prepared,
        "quantized": qc.convert(prepared),
        "integer": qc.convert(prepared, "integer"),
        "dynamic": qc.convert(qc.prepare(captured, "x86", config=mode_config(quantizer_of("x86"), "dynamic"))),
        "types": qc.capture(Narrowed(), (torch.ones(2),)),
    }


def test_bytes_are_those_of_the_tensors_and_tied_ones_count_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert size_of(model) == 4 * (16 + 4) + 4 * 4 * 4 + 8, "two parameters, two statistics, and an int64 counter"
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    assert size_of(tied) == 64
    assert size_of(nn.ReLU()) == 0


def test_the_rest_is_a_fraction_and_of_nothing_it_is_one() -> None:
    assert (Size(400, 100).ratio, Size(0, 0).ratio) == (0.25, 1.0)
    assert (Size(400, 100).stored_ratio, Size(400, 100, 50, 80).stored_ratio) == (None, 0.125)
    assert Size(0, 0, 0, 80).stored_ratio == 1.0


def test_sizes_are_told_with_the_file_where_it_is_known() -> None:
    assert str(Size(4000, 1000)) == "4,000 bytes before, 1,000 after (0.250 of it)"
    told = "4,000 bytes before, 1,000 after (0.250 of it), 500 stored (0.125) in a file of 2,500"
    assert str(Size(4000, 1000, 500, 2500)) == told


def test_a_file_is_measured_without_writing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = qc.capture(nn.Linear(3, 3).eval(), (torch.ones(2, 3),))
    program.save(tmp_path / "model.qc")
    whole = (tmp_path / "model.qc").stat().st_size
    (tmp_path / "model.qc").unlink()
    monkeypatch.chdir(tmp_path)
    found = file_size(program)
    assert isinstance(found, FileSize)
    assert found.whole == whole > found.constants > 0
    assert list(tmp_path.iterdir()) == []
