"""Each flow works as the first thing that a process does: nothing leans on what another part has imported before."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = """
import torch
from torch import nn
model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(2, 8)
"""
FLOWS = {
    "eager": "from quantc.flows.eager import quantize_dynamic\nmade = quantize_dynamic(model)",
    "fx": "from quantc.flows.fx import convert_fx, get_default_qconfig_mapping, prepare_fx\n"
    "prepared = prepare_fx(model, get_default_qconfig_mapping('x86'), (x,))\nprepared(x)\nmade = convert_fx(prepared)",
    "pt2e": "from quantc.flows.pt2e import convert_pt2e, prepare_pt2e\n"
    "import quantc.flows.pt2e.qnnpack_quantizer as qq\n"
    "quantizer = qq.QNNPackQuantizer().set_global(qq.get_symmetric_quantization_config(is_per_channel=True))\n"
    "prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)\nprepared(x)\nmade = convert_pt2e(prepared)",
    "tracing": "from quantc.flows.tracing import convert, prepare\n"
    "prepared = prepare(model, x)\nprepared(x)\nmade = convert(prepared)",
}
END = "\nwith torch.no_grad():\n    assert float((made(x) - model(x)).abs().max()) < 0.1\n    made(x)\n"


@pytest.mark.parametrize("flow", FLOWS)
def test_a_flow_is_the_first_thing_a_process_does(flow: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START + FLOWS[flow] + END], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_module_of_steps_that_nothing_has_observed_is_refused() -> None:
    """Without the eager flow, which swaps the steps, nothing can have been observed."""
    code = """
from quantc.errors import RefusedError
from quantc.nn import quantizable, quantized
try:
    quantized.LSTM.from_observed(quantizable.LSTM(4, 4))
except RefusedError as refusal:
    assert refusal.advice == "prepare and calibrate the model first"
else:
    raise SystemExit("it was taken")
"""
    ran = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
