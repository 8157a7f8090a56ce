"""Observations of some batches, and all the bits that they hold."""

from __future__ import annotations

import torch
from torch import Tensor

from quantc.observe import Observation, start
from quantc.spec.spec import QuantSpec


def observed(spec: QuantSpec, batches: list[Tensor]) -> Observation:
    observation = start(spec)
    for batch in batches:
        observation.update(batch)
    return observation


def bits_of(observation: Observation) -> dict[str, object]:
    """All it holds, in a form in which -0.0 is not 0.0."""
    state = observation.to_state()
    tensors = {name: x.view(torch.int32) if x.dtype == torch.float32 else x for name, x in state.tensors.items()}
    return {**{name: (str(x.dtype), x.tolist()) for name, x in tensors.items()}, **state.values}
