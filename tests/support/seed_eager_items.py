"""The items of the eager document: filled by the two halves of its test, what it promises and the names it lists."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quantc.flows import eager
from tests.support.eager_models import CASES, QUANTC, TORCH

torch_flow: Any = TORCH.flow
ITEMS: dict[str, Callable[[], None]] = {}


def item(number: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(test: Callable[[], None]) -> Callable[[], None]:
        assert number not in ITEMS
        ITEMS[number] = test
        return test

    return add


def quantized(case: str = "convnet", qconfig: Any = None) -> nn.Module:
    made = CASES[case]
    return QUANTC.quantized(
        made.made(QUANTC), made.fuse, made.data(), qconfig or eager.get_default_qconfig("fbgemm")
    )  # fmt: skip


def size_of(state: Any) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getbuffer().nbytes


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
