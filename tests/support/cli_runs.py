"""Runs of commands in a folder with a few models and a program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from quantc.cli.app import app
from quantc.ir.program import Program
from quantc.text.files import Snapshot
from tests.support.by_hand import two_layers

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.example_inputs = (torch.ones(1, 1, 6, 6),)

    def forward(self, x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.norm(self.conv(x)).relu(),))

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count

def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), (torch.ones(2, 4),)

def batches():
    torch.manual_seed(1)
    return [torch.randn(32, 4) for _ in range(4)]

def model():
    return Net().eval()

ready = Net().eval()

def wrong():
    return "a model"

def raises():
    raise ValueError("no weights here")
"""


def enter_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with `cli_models.py`, importable, and the program `two.txt`."""
    (path / "cli_models.py").write_text(MODELS)
    monkeypatch.chdir(path)
    monkeypatch.syspath_prepend(str(path))
    sys.modules.pop("cli_models", None)
    Snapshot.of(two_layers()).write(path / "two.txt")
    return path


def quantc(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def succeed(*args: str) -> str:
    result = quantc(*args)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def example(program: Program) -> torch.Tensor:
    """The one example input of a program."""
    assert program.example_inputs is not None
    (value,) = program.example_inputs
    assert isinstance(value, torch.Tensor)
    return value


def refuse(*args: str) -> str:
    """The message of a command that must be refused: on stderr, without traceback, and nothing on stdout."""
    result = quantc(*args)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    return result.stderr
