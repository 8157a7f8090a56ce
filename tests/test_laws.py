"""Laws over random eager programs: captures and passes keep the numbers, tell the truth, and are done after one run.

The judge is eager PyTorch, on inputs that neither capture nor pass has seen.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import quantc as qc
from quantc.digests import constants
from quantc.dump import numbered
from quantc.hooks import Guard, Truth, Verify
from quantc.parse import parse
from quantc.patterns.fusions import FUSIONS
from quantc.pipeline import Pass, Pipeline
from quantc.program import Program
from quantc.registry import PASSES
from tests.agree import assert_same, detached, fingerprint
from tests.random_programs import GENTLE, Net, inputs, nets

Method = Literal["fx", "export"]
PHASES = (Phase.explicit, Phase.generate, Phase.target, Phase.shrink)


def law(examples: int) -> Any:
    """As many examples as fit the time; always the same ones."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=PHASES,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )


def captured(net: Net, method: Method = "fx", dtype: torch.dtype = torch.float32) -> Program:
    before = fingerprint(net)
    program = qc.capture(net, inputs(0, dtype), method=method)
    assert fingerprint(net) == before, "capture changed the caller's model"
    return program


class Judge:
    """An eager copy of a net. `agree` runs a program beside it, so that what either keeps between calls is seen."""

    def __init__(self, net: Net, dtype: torch.dtype = torch.float32, tolerance: float = 0.0) -> None:
        self.net = copy.deepcopy(net)
        self.dtype = dtype
        self.tolerance = tolerance
        self.seed = 100

    def agree(self, program: Program) -> None:
        """Outputs, inputs and buffers agree, in a second call too, after the caller has written to the outputs."""
        model, program = copy.deepcopy(self.net), program.clone()
        for _ in range(2):
            self.seed += 1
            theirs, ours = inputs(self.seed, self.dtype), inputs(self.seed, self.dtype)
            with torch.no_grad():
                expected, actual = model(*theirs), program(*ours)
                assert_same(actual, expected, self.tolerance)
                assert_same(ours, theirs, self.tolerance)
                # a buffer that is not written to may be missing from the program
                state = getattr(program.module, "state", self.net.state)
                assert_same(detached(state), detached(model.state), self.tolerance)
                for left, right in zip(actual, expected, strict=True):
                    if _may_scribble(model, right):
                        left.add_(1)
                        right.add_(1)
                # whatever shares memory with an output has changed on both sides, and nothing else has
                assert_same(actual, expected, self.tolerance)
                assert_same(ours, theirs, self.tolerance)


def _may_scribble(model: Net, output: Tensor) -> bool:
    """Not on an expanded tensor, which has several elements in one place, and not on what is the model's own: that
    was folded once and for all."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (model.scale, model.shift, model.state)}
    return 0 not in output.stride() and output.untyped_storage().data_ptr() not in own


@pytest.mark.parametrize("name", PASSES.names())
@law(40)
@given(net=nets())
def test_try(name: str, net: Net) -> None:
    Judge(net).agree(captured(net))
