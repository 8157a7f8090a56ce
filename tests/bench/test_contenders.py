"""Contenders: quantc's own ways to run a model, and those of other tools."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn

from quantc.bench.contenders import CONTENDERS, chosen, torch_dynamic, weights_of
from quantc.bench.models import Task
from quantc.bench.race import EAGER
from quantc.errors import MissingDependencyError, UnknownNameError
from tests.support.bench_tasks import tiny_task


def test_names_are_checked_and_the_float_model_is_always_there() -> None:
    assert list(chosen(["fx-x86"])) == [EAGER, "fx-x86"]
    assert list(chosen(None)) == list(CONTENDERS)
    with pytest.raises(UnknownNameError, match="quantc-tuned"):
        chosen(["quantc-tunned"])


def test_engines_outside_torch_refuse_with_the_extra() -> None:
    for name in ("onnxruntime", "openvino"):
        if not CONTENDERS[name].missing():
            continue
        with pytest.raises(MissingDependencyError, match=r"quantc\[bench\]"):
            CONTENDERS[name].make(tiny_task())


def test_weights_are_what_a_module_saves() -> None:
    layer = nn.Linear(256, 256, bias=False)
    assert 256 * 256 * 4 <= weights_of(nn.Sequential(layer, layer)) < 256 * 256 * 5, "what is tied counts once"
    for made in (nn.Sequential(nn.Linear(256, 256)), nn.Sequential(nn.LSTM(256, 256))):
        whole = weights_of(made)
        small = torch_dynamic(Task("", made, [], [])).weight_bytes
        assert small is not None
        assert 0.25 < small / whole < 0.3, "packed weights are counted as integers"


def test_importing_quantc_imports_neither_this_nor_other_tools() -> None:
    code = """
import sys
import quantc
print([name for name in sys.modules if name.startswith(("quantc.bench", "torchao"))])
import quantc.cli.app
print([name for name in sys.modules if name.startswith(("quantc.bench.models", "quantc.bench.contenders", "torchao"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]
