"""A model with one of each kind of product, calibrated, for the proofs about its sums."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.backends.x86 import X86
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.ir.program import Program


class Products(nn.Module):
    """One of each kind of product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8, bias=False)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.up_grouped = nn.ConvTranspose2d(4, 4, 2, groups=2)
        self.matrix = nn.Parameter(torch.randn(13, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.depthwise(torch.relu(self.conv(x))))
        x = self.up_grouped(self.up(x)) @ self.matrix
        return torch.as_tensor(self.head(x @ x.transpose(-1, -2) @ x))


@cache
def prepared_products() -> Program:
    """Not to be changed: it is made once."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    named = qc.QuantConfig().set_op("matmul", X86.outcome("act"))
    found = qc.prepare(qc.capture(Products().eval(), (x,)), "x86", config=named)
    qc.calibrate(found, [(x,)])
    return found


def linear_for(instruction_set: str, reduce_range: RangeReduction = "no") -> Program:
    """A linear layer for an instruction set, converted."""
    torch.manual_seed(1)
    x = torch.randn(4, 16)
    backend = replace(X86, instruction_set=instruction_set)
    program = qc.prepare(qc.capture(nn.Sequential(nn.Linear(16, 8)).eval(), (x,)), backend)
    qc.calibrate(program, [(x,)])
    return qc.convert(program, reduce_range=reduce_range)
