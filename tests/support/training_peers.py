"""The settings and the loop of a training that runs beside those of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.backends.x86 import X86

STEPS = 20

RATE = 0.05

ACT = qc.UINT8.but(observe=f"moving-average{{rate={RATE}}}", eps=2.0**-23)

WEIGHT = qc.INT8_WEIGHT.but(qmin=-127)


def backend() -> Backend:
    """x86 for processors that add products in 32 bits: weights keep their whole range."""
    return replace(X86, instruction_set="avx-vnni", roles={**X86.roles, "act": ACT, "weight": WEIGHT})


def trained(model: Any, parameters: Any, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    losses = []
    for x, target in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
