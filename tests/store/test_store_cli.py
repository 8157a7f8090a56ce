"""`quantc verify` and the other commands on saved programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import quantc as qc
from quantc.cli.app import app
from tests.support.store_files import calibrated, images, put_together, small_model, taken_apart


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def quantc(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def succeed(*args: str) -> str:
    result = quantc(*args)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refuse(*args: str) -> str:
    result = quantc(*args)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def findings(*args: str) -> dict[str, str]:
    data = json.loads(succeed("verify", *args, "--json"))
    return {row["checked"]: row["found"] for row in data["findings"]}


def test_verify_says_what_it_checked() -> None:
    qc.convert(calibrated()).save("model.qc")
    found = findings("model.qc")
    assert list(found) == ["source", "rules of the IR", "plan", "run"]
    assert "every digest agrees" in found["source"]
    assert found["run"] == "1 output from the example inputs"
    out = succeed("verify", "model.qc")
    assert "Small (folded)" in out
    assert all(f"  {name}: {value}" in out.splitlines() for name, value in found.items())


def test_verify_without_example_inputs_says_that_nothing_ran() -> None:
    program = qc.capture(small_model(), (images(),))
    program.example_inputs = None
    program.save("model.qc")
    assert findings("model.qc")["run"] == "not run: there are no example inputs"


def test_verify_tells_of_values_that_are_no_numbers() -> None:
    class Logarithm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.log()

    qc.capture(Logarithm(), (torch.tensor([1.0, 0.0, -1.0]),)).save("model.qc")
    assert findings("model.qc")["run"] == "1 output from the example inputs, 2 values of which are NaN or infinite"


def test_verify_refuses_a_damaged_file() -> None:
    qc.capture(small_model(), (images(),)).save("model.qc")
    whole = bytearray(Path("model.qc").read_bytes())
    whole[-1] ^= 1
    Path("model.qc").write_bytes(whole)
    assert "has been changed" in refuse("verify", "model.qc")
    assert "no such file: missing.qc" in refuse("verify", "missing.qc")
    assert quantc("verify").exit_code == 2


def test_verify_refuses_a_program_that_does_not_run() -> None:
    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.select(0, 1) * 2

    qc.capture(First(), (images(),), dynamic_shapes=None).save("model.qc")
    document, tensors = taken_apart(Path("model.qc"))
    document["text"] = document["text"].replace("index=1", "index=9")
    put_together(Path("model.qc"), document, tensors)
    assert "First does not run on its example inputs" in refuse("verify", "model.qc")


def test_verify_takes_other_sources_too() -> None:
    torch.export.save(torch.export.export(small_model(), (images(),)), "model.pt2")
    found = findings("model.pt2")
    assert "digest" not in found["source"]
    assert found["rules of the IR"].startswith("no fault")


def test_the_other_commands_read_and_write_saved_programs() -> None:
    qc.capture(small_model(), (images(),)).save("model.qc")
    assert json.loads(succeed("inspect", "model.qc", "--json"))["name"] == "Small"
    succeed("run", "strip-dropout,fuse", "model.qc", "--out", "fused.qc")
    fused = qc.load("fused.qc")
    assert [entry.name for entry in fused.log[-2:]] == ["strip-dropout", "fuse"]
    assert " batch_norm(" not in fused.dump()
    assert "conv2d" in succeed("explain", "fused.qc", "conv2d")
