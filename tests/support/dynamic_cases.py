"""Dynamic modules of quantc beside those of torch.ao, made of the same float module."""

from __future__ import annotations

from typing import Any

import torch.ao.nn.quantized.dynamic as ao_dynamic
from torch import Tensor, nn

from quantc.nn import qconfig as qconfigs
from quantc.nn.quantized import dynamic
from tests.support.nn_cases import seeded

MODULES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(24, 10), (5, 24)),
    "Linear-3": (lambda: nn.Linear(24, 10, bias=False), (2, 5, 24)),
    "Linear-1": (lambda: nn.Linear(24, 10), (24,)),
    "LSTM": (lambda: nn.LSTM(8, 12, 2), (6, 3, 8)),
    "LSTM-both": (lambda: nn.LSTM(8, 12, batch_first=True, bidirectional=True), (3, 6, 8)),
    "GRU": (lambda: nn.GRU(8, 12), (6, 3, 8)),
    "LSTMCell": (lambda: nn.LSTMCell(8, 12), (3, 8)),
    "GRUCell": (lambda: nn.GRUCell(8, 12), (3, 8)),
    "RNNCell": (lambda: nn.RNNCell(8, 12), (3, 8)),
    "RNNCell-relu": (lambda: nn.RNNCell(8, 12, nonlinearity="relu"), (3, 8)),
}

QCONFIGS = {"int8": qconfigs.default_dynamic_qconfig, "half": qconfigs.float16_dynamic_qconfig}

ENGINES = [("x86", "int8"), ("x86", "half"), ("qnnpack", "int8")]


def pair_of(name: str, kind: str) -> tuple[Any, Any, nn.Module]:
    made: nn.Module = seeded(MODULES[name][0])().eval()
    made.qconfig = QCONFIGS[kind]  # type: ignore[assignment]
    short = name.partition("-")[0]
    return getattr(dynamic, short).from_float(made), getattr(ao_dynamic, short).from_float(made), made


def flat(value: Any) -> list[Tensor]:
    return [tensor for item in value for tensor in flat(item)] if isinstance(value, tuple) else [value]


def furthest(ours: Any, theirs: Any) -> float:
    return max(float((mine - other).abs().max()) for mine, other in zip(flat(ours), flat(theirs), strict=True))
