"""`compile=True`: kernels are islands that are opaque to the compiler, and the rest is compiled."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.ir.program import Program
from tests.support.lowered_nets import dynamic_program, image, static_program


@pytest.fixture(params=[static_program, dynamic_program], ids=["static", "dynamic"])
def program(request: pytest.FixtureRequest) -> Program:
    found: Program = request.param()
    return found


@pytest.mark.slow
def test_the_rest_is_compiled_on_request(program: Program) -> None:
    torch._dynamo.reset()
    plain, made = qc.lower(program, "x86"), qc.lower(program, "x86", compile=True)
    assert made.headline == f"{plain.headline}, the rest compiled"
    assert made.to_data()["compiled"]
    for batch in (4, 5, 1, 0):
        for found, expected in zip(made(image(batch)), plain(image(batch)), strict=True):
            assert found.shape == expected.shape
            assert found.stride() == expected.stride()
            if batch:
                assert float((found - expected).norm() / expected.norm()) < 0.02
    with torch.inference_mode():
        made(image(4))
    again = pickle.loads(pickle.dumps(made))  # noqa: S301 - our own bytes
    assert again.is_compiled


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 16)), (8, 16)),
        (
            nn.Sequential(nn.Conv2d(4, 4, 1), nn.SiLU(), nn.Conv2d(4, 4, 1), nn.Hardswish(), nn.Conv2d(4, 4, 1)),
            (2, 4, 6, 6),
        ),
    ],
    ids=["linear", "conv"],
)
def test_kernels_that_round_for_themselves_are_not_taken_for_quantize_ops(model: nn.Module, shape: Any) -> None:
    """Of one size throughout: a layer that is left out would not be seen in a shape."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    found = qc.quantize(model.eval(), (x,), [(x,)]).program
    plain, made = qc.lower(found, "x86"), qc.lower(found, "x86", compile=True)
    assert float((made(x) - plain(x)).norm() / plain(x).norm()) < 0.02


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    code = """
import torch, quantc as qc
program = qc.quantize(torch.nn.Linear(4, 4).eval(), (torch.zeros(2, 4),), mode="dynamic").program
try:
    qc.lower(program, "x86", compile=True)
except qc.errors.MissingDependencyError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "there is no C++ compiler" in found.stdout
    assert "or lower without compile=True" in found.stdout
