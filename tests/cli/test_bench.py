"""`quantc bench` on the command line: what it prints where, what it writes, what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import quantc as qc
from quantc.bench.contenders import CONTENDERS
from quantc.bench.models import MODELS
from quantc.bench.race import EAGER
from quantc.cli.app import app

FIELDS = {"model", "contender", "milliseconds", "speed", "sqnr", "size", "build_seconds", "reason"}
MODULE = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))
    return net.eval(), (torch.randn(2, 3, 8, 8),), [torch.randn(2, 3, 8, 8) for _ in range(8)]

def bare():
    return model()[:2]

def training():
    net, inputs, _ = model()
    return net.train(), inputs

def named():
    net, inputs, batches = model()
    return net, inputs, [{"input": batch} for batch in batches]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("QUANTC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bench_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("bench_models", None)


def quantc(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", *args])


SMALL = ("--contender", "quantc", "--contender", "openvino", "--rounds", "2")


def test_a_model_of_yours(folder: Path) -> None:
    done = quantc("bench_models:model", *SMALL, "--ops", "--json", "out/bench.json", "--plot", "out/bench.svg")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert any(line.split()[:2] == ["Sequential", "quantc"] for line in lines)
    assert any("floor / whole" in line for line in lines)
    assert any("onednn" in line or "fbgemm" in line for line in lines), "the ops with their kernels"
    assert "building quantc" in done.stderr
    assert "note:" not in done.stderr
    ElementTree.parse(folder / "out" / "bench.svg")
    document = json.loads((folder / "out" / "bench.json").read_text(encoding="utf-8"))
    assert {"quantc", "torch", "processor", "threads", "rounds", "rows", "floors"} == set(document)
    assert [row["contender"] for row in document["rows"]] == [EAGER, "quantc", "openvino"]
    assert all(set(row) == FIELDS for row in document["rows"])
    assert document["rounds"] == 2
    floor = document["floors"][0]
    assert (floor["model"], floor["contender"]) == ("Sequential", "quantc")
    assert set(floor["ops"][0]) == {"node", "op", "kernel", "shape", "microseconds"}


def test_json_on_standard_output_is_all_there_is(folder: Path) -> None:
    done = quantc("bench_models:bare", *SMALL, "--json", "-")
    assert done.exit_code == 0, done.output
    assert [row["contender"] for row in json.loads(done.stdout)["rows"]] == [EAGER, "quantc", "openvino"]
    assert "note: there are no batches" in done.stderr


def test_an_exported_file_with_data(folder: Path) -> None:
    model, inputs = import_module("bench_models").bare()
    torch.export.save(torch.export.export(model, inputs), folder / "model.pt2")
    np.savez(folder / "data.npz", np.random.default_rng(0).normal(size=(8, 3, 8, 8)).astype(np.float32))
    args = ("model.pt2", "--data", "data.npz", "--contender", "quantc", "--contender", "fx-x86", "--rounds", "1")
    done = quantc(*args, "--json", "-")
    assert done.exit_code == 0, done.output
    rows = {row["contender"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["quantc"]["sqnr"] > 20
    assert "quantized nothing" in rows["fx-x86"]["reason"], "its ops are ATen's, which FX graph mode does not know"


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--model", "resnet81"), 1, "resnet18"),
        (("--contender", "fx-x68"), 1, "fx-x86"),
        (("--plot", "chart.png"), 1, ".svg"),
        (("--data", "x.npz"), 2, "SOURCE"),
        (("bench_models:model", "--model", "mlp"), 2, "built-in"),
        (("bench_models:model", "--batch", "2"), 2, "built-in"),
        (("bench_models:training",), 1, "eval()"),
        (("bench_models:named",), 1, "tuples"),
        (("--rounds", "0"), 2, "rounds"),
        (("nowhere.pt2",), 1, "no such file:"),
    ],
)
def test_what_is_refused(folder: Path, args: tuple[str, ...], code: int, said: str) -> None:
    done = quantc(*args)
    assert done.exit_code == code, done.output
    assert said in done.stderr


def test_quantized_programs_are_refused(folder: Path) -> None:
    model, inputs, batches = import_module("bench_models").model()
    qc.quantize(model, inputs, batches).save(folder / "small.qc")
    done = quantc("small.qc", *SMALL)
    assert done.exit_code == 1
    assert "give the float model" in done.stderr


def test_the_list_names_all() -> None:
    done = quantc("--list")
    assert done.exit_code == 0
    assert all(name in done.stdout for name in (*MODELS, *CONTENDERS))
