"""What `quantc compare` finds: numbers of outputs, ops that differ, and what it was measured on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import quantc as qc
from quantc.cli.run_compare import carry_out, structure_of
from quantc.errors import DataError, LoadError
from tests.support import cli_sources as sources

HERE = sources.HERE


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    sources.any_size().save(folder / "float.qc")
    sources.quantized().save(folder / "quantized.qc")
    qc.lower(sources.quantized(), "x86").save(folder / "lowered.qc")
    return folder


def decibels(reference: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    left, right = (np.concatenate([x.detach().numpy().ravel() for x in each]) for each in (reference, found))
    return float(10 * np.log10((left.astype(float) ** 2).sum() / ((left.astype(float) - right) ** 2).sum()))


def test_programs_are_compared_op_by_op(saved: Path) -> None:
    found = carry_out(str(saved / "float.qc"), str(saved / "quantized.qc"), f"{HERE}:batches", None, None, "auto")
    assert found.comparison is not None
    assert found.structure is not None
    assert found.structure.is_quantizing
    assert found.given.told == f"3 batches, --data {HERE}:batches"
    wanted = decibels(*([program(x) for x in sources.listed] for program in (sources.any_size(), sources.quantized())))
    assert found.sqnr == pytest.approx(wanted, abs=0.01)
    data = json.loads(json.dumps(found.to_data()))
    assert data["batches"] == 3
    assert not data["structure"]["same"]


def test_kernels_are_compared_by_what_they_yield(saved: Path) -> None:
    found = carry_out(str(saved / "quantized.qc"), str(saved / "lowered.qc"), f"{HERE}:batches", None, 2, "auto")
    assert (found.comparison, found.structure) == (None, None)
    assert len(found.given.batches) == 2
    assert any("not compared one by one" in note for note in found.notes)
    lowered = qc.lower(sources.quantized(), "x86")
    pairs = [(sources.quantized()(x), lowered(x)) for x in sources.listed[:2]]
    (largest,) = found.largest
    assert largest == pytest.approx(max(float((a - b).abs().max()) for a, b in pairs))


def test_a_program_is_equal_to_itself(saved: Path) -> None:
    path = str(saved / "quantized.qc")
    found = carry_out(path, path, None, None, None, "auto")
    assert found.sqnr == math.inf
    assert found.structure is not None
    assert not found.structure.diff
    assert (found.structure.ops, found.structure.decisions) == ((), ())
    assert any("--data" in note for note in found.notes)


def test_noise_is_said_to_be_noise(saved: Path) -> None:
    path = str(saved / "quantized.qc")
    found = carry_out(path, path, None, 4, None, "auto")
    assert found.given.told.startswith("4 batches of noise")
    assert len(found.given.batches) == 4


def test_batches_that_come_with_a_model_are_used(saved: Path) -> None:
    found = carry_out(f"{HERE}:complete", str(saved / "quantized.qc"), None, None, None, "auto")
    assert found.given.told == f"3 batches, those of {HERE}:complete"


def test_zero_batches_are_refused(saved: Path) -> None:
    path = str(saved / "quantized.qc")
    with pytest.raises(DataError, match="zero batches"):
        carry_out(path, path, f"{HERE}:batches", None, 0, "auto")


def test_files_of_runtimes_alone_do_not_say_how_inputs_are_arranged(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    path = tmp_path / "net.onnx"
    qc.lower(sources.quantized(), "onnx").save(path)
    with pytest.raises(LoadError, match="inputs"):
        carry_out(str(path), str(path), None, None, None, "auto")


def test_ops_and_decisions_that_differ_are_told() -> None:
    program = sources.any_size()
    one = qc.prepare(program, "x86")
    other = qc.prepare(program, "x86", config=qc.QuantConfig().set("0", qc.FLOAT), allow_empty=True)
    found = structure_of(one, other)
    assert ("linear", "float") in [(row.node, row.b) for row in found.decisions]
    assert not found.is_quantizing
    quantized = structure_of(program, sources.quantized())
    assert quantized.decisions == ()
    assert quantized.is_quantizing
    assert all(row.a != row.b for row in quantized.ops)
    assert any("quantize" in row.op and row.a == 0 for row in quantized.ops)
