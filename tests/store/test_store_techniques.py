"""Programs of every technique are saved, loaded, written as text and read back, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import mode_config, quantizer_of
from quantc.ir.plan import Source
from quantc.ir.program import Program
from quantc.text.digests import constants
from tests.support.store_files import images, small_model
from tests.support.stored_tensors import bits

ALL = qc.QuantConfig().set_all


def prepared_for(program: Program, mode: Any, config: qc.QuantConfig) -> Program:
    base = qc.QuantConfig() if mode == "static" else mode_config(quantizer_of("x86"), mode)
    return qc.prepare(program, "x86", config=base + config)


class Mixed(nn.Module):
    """One of each that a technique takes: embedding, recurrent layers, convolutions, linears; a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 32)
        self.lstm = nn.LSTM(32, 32, batch_first=True)
        self.gru = nn.GRU(32, 32, batch_first=True)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 32)
        self.back = nn.Linear(32, 24, bias=False)
        self.back.weight = self.words.weight

    def forward(self, x: Tensor) -> Any:
        seen = self.words(x)
        y, _ = self.lstm(seen)
        y, _ = self.gru(y)
        y = self.conv(y.transpose(1, 2)).transpose(1, 2)
        return self.second(torch.relu(self.first(y))) + 1.0, self.back(seen)


KINDS: dict[str, tuple[str, qc.QuantConfig]] = {
    "dynamic": ("dynamic", qc.QuantConfig()),
    "per token": ("dynamic", ALL(qc.UINT8_TOKEN)),
    "weight-only": ("weight-only", qc.QuantConfig()),
    "int4 groups": ("weight-only", ALL(qc.INT4_GROUP)),
    "int4 groups, symmetric": ("weight-only", ALL(qc.INT4_GROUP_SYMMETRIC)),
    "int2 groups": ("weight-only", ALL(qc.INT2_GROUP)),
    "fp16": ("weight-only", ALL(qc.FP16_WEIGHT)),
    "fp8 e4m3": ("weight-only", ALL(qc.FP8_E4M3_WEIGHT)),
    "fp8 e5m2": ("weight-only", ALL(qc.FP8_E5M2_WEIGHT)),
    "all in one": (
        "dynamic",
        qc.QuantConfig().set("first", qc.INT4_GROUP).set("second", qc.FP16_WEIGHT).set("lstm", qc.FLOAT),
    ),
}
TOKENS = torch.arange(40).reshape(4, 10) * 7 % 24


@pytest.fixture(scope="module")
def mixed() -> Program:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return qc.capture(Mixed().eval(), (TOKENS,))


@pytest.fixture(scope="module")
def folder(mixed: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each kind, prepared, in Q/DQ form and in integer form, as a file, with what it gives."""
    place = tmp_path_factory.mktemp("kinds")
    for name, (mode, config) in KINDS.items():
        prepared = prepared_for(mixed, mode, config)
        prepared.save(place / f"{name}.prepared.qc")
        for form in ("qdq", "integer"):
            program = qc.convert(prepared, form)
            program.save(place / f"{name}.{form}.qc")
            results = dict(zip("ab", program(TOKENS), strict=True))
            save_file({key: value.detach() for key, value in results.items()}, place / f"{name}.{form}.out")
    return place


def results_of(folder: Path, name: str, form: str) -> list[Tensor]:
    stored = load_file(folder / f"{name}.{form}.out")
    return [stored["a"], stored["b"]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_technique_comes_back(kind: str, folder: Path, tmp_path: Path) -> None:
    for form in ("qdq", "integer"):
        loaded = qc.load(folder / f"{kind}.{form}.qc")
        assert [bits(part) for part in loaded(TOKENS)] == [bits(part) for part in results_of(folder, kind, form)]
        loaded.save(tmp_path / "again.qc")
        assert (tmp_path / "again.qc").read_bytes() == (folder / f"{kind}.{form}.qc").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_program_of_every_technique_goes_on_after_loading(kind: str, folder: Path) -> None:
    loaded = qc.load(folder / f"{kind}.prepared.qc")
    assert loaded.plan.quantizer == quantizer_of("x86")
    found = {group.source for group in loaded.plan.groups}
    assert (Source.RUN_TIME in found) == (KINDS[kind][0] == "dynamic")
    for form in ("qdq", "integer"):
        program = qc.convert(loaded, form)
        assert [bits(part) for part in program(TOKENS)] == [bits(part) for part in results_of(folder, kind, form)]
        assert program.dump() == qc.load(folder / f"{kind}.{form}.qc").dump()


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_every_technique_reads_back(kind: str, folder: Path) -> None:
    for form in ("prepared", "qdq", "integer"):
        program = qc.load(folder / f"{kind}.{form}.qc")
        text = program.dump("text")
        again = qc.parse(text, constants(program))
        again.verify()
        assert again.dump("text") == text
        assert not program.diff(again)
        assert qc.parse(text).dump("text") == text
        assert [bits(part) for part in again(TOKENS)] == [bits(part) for part in program(TOKENS)]


def test_a_new_process_loads_every_technique(folder: Path) -> None:
    """Nothing but quantc is imported there: no op may wait for a verb that registers it."""
    save_file({"x": TOKENS}, folder / "tokens.in")
    code = (
        "import pathlib, quantc, torch\n"
        "from safetensors.torch import load_file\n"
        "x, count = load_file('tokens.in')['x'], 0\n"
        "for out in sorted(pathlib.Path('.').glob('*.out')):\n"
        "    expected = load_file(out)\n"
        "    actual = quantc.load(out.with_suffix('.qc'))(x)\n"
        "    assert all(torch.equal(*pair) for pair in zip(actual, (expected['a'], expected['b']))), out\n"
        "    count += 1\n"
        "for path in sorted(pathlib.Path('.').glob('all*.prepared.qc')):\n"
        "    quantc.convert(quantc.load(path))\n"
        "print(count)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(2 * len(KINDS))


def test_static_and_dynamic_in_one_program_go_on_after_loading(tmp_path: Path) -> None:
    """What was calibrated before saving and after it counts; what is found at run time needs none."""
    config = qc.QuantConfig().set("first", qc.UINT8_DYNAMIC.but(qmax=127))
    prepared = prepared_for(qc.capture(small_model(), (images(),)), "static", config)
    sources = {group.source for group in prepared.plan.groups}
    assert sources >= {Source.DATA, Source.RUN_TIME, Source.CONSTANTS}
    qc.calibrate(prepared, [images(1)])
    prepared.save(tmp_path / "model.qc")
    loaded = qc.load(tmp_path / "model.qc")
    for program in (prepared, loaded):
        qc.calibrate(program, [images(2)])
    ends = [qc.convert(program) for program in (prepared, loaded)]
    assert ends[0].dump() == ends[1].dump()
    assert "choose_qparams" in ends[0].dump()
    assert bits(ends[0](images(3))) == bits(ends[1](images(3)))
