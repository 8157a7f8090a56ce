"""What the laws have in common: how their cases are drawn, and the capture of a model."""

from __future__ import annotations

from typing import Literal

import torch
from hypothesis import Phase, settings

import quantc as qc
from quantc.ir.program import Program
from tests.support.agree import fingerprint
from tests.support.random_programs import Net, inputs

Method = Literal["fx", "export"]
PHASES = (Phase.explicit, Phase.generate, Phase.target, Phase.shrink)


def law(examples: int) -> settings:
    """As many examples as fit the time; always the same ones."""
    return settings(
        max_examples=examples,
        database=None,
        phases=PHASES,
    )


def captured(net: Net, method: Method = "fx", dtype: torch.dtype = torch.float32) -> Program:
    before = fingerprint(net)
    program = qc.capture(net, inputs(0, dtype), method=method)
    assert fingerprint(net) == before, "capture changed the caller's model"
    return program
