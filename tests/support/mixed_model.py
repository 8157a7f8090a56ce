"""A small model whose layers can each be quantized in their own way: by a config, and by hand in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.backends.executorch import EXECUTORCH
from quantc.backends.qnnpack import QNNPACK
from quantc.backends.x86 import X86
from quantc.config.config import QuantConfig
from quantc.ir.decisions import FLOAT
from quantc.ir.program import Program
from quantc.spec.formats import PerGroup, Timing
from quantc.spec.spec import FP16_WEIGHT, INT4_GROUP_SYMMETRIC, INT8, INT8_WEIGHT_ONLY, UINT8, QuantSpec
from tests.support import fake_quantized as fake

GROUPS = INT4_GROUP_SYMMETRIC.but(granularity=PerGroup(size=2), observe="minmax")
BYTES = INT8_WEIGHT_ONLY.but(qmin=-127)
BACKENDS = {"x86": X86.but(act=UINT8), "qnnpack": QNNPACK.but(act=UINT8), "executorch": EXECUTORCH.but(act=INT8)}
"""As they are, but with ranges that torch's observers find as well."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 12))
        self.out = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.head(self.stem(x).flatten(1)))
        return y


@cache
def net() -> tuple[Net, Tensor, Program]:
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    model, x = Net().eval(), torch.randn(3, 2, 6, 6, generator=generator)
    return model, x, qc.capture(model, (x,))


@dataclass(frozen=True)
class Op:
    """A node of the program: where it comes from, and what a config can know it by."""

    path: str
    kind: str
    op: str


OPS = {
    "conv2d": Op("stem.0", "Conv2d", "conv2d"),
    "relu": Op("stem.1", "ReLU", "relu"),
    "flatten": Op("", "Net", "flatten"),
    "linear": Op("head.0", "Linear", "linear"),
    "gelu": Op("head.1", "GELU", "gelu"),
    "linear_1": Op("head.2", "Linear", "linear"),
    "linear_2": Op("out", "Linear", "linear"),
}
PRODUCTS = ("conv2d", "linear", "linear_1", "linear_2")

Select = Callable[[QuantConfig, Any], QuantConfig]
Picks = Callable[[str, Op], bool]


def _path(glob: str) -> tuple[str, Select, Picks]:
    def picks(name: str, op: Op) -> bool:
        parts = op.path.split(".")
        return any(fnmatchcase(".".join(parts[: n + 1]), glob) for n in range(len(parts)))

    return glob, lambda config, use: config.set(glob, use), picks


SELECTORS: list[tuple[str, Select, Picks]] = [
    ("all", lambda config, use: config.set_all(use), lambda name, op: True),
    *(_path(glob) for glob in ("stem", "stem.*", "head", "head.0", "head.?", "out", "*ea*")),
    ("Linear", lambda config, use: config.set(nn.Linear, use), lambda name, op: op.kind == "Linear"),
    ("Conv2d", lambda config, use: config.set(nn.Conv2d, use), lambda name, op: op.kind == "Conv2d"),
    ("op linear", lambda config, use: config.set_op("linear", use), lambda name, op: op.op == "linear"),
    ("op conv2d", lambda config, use: config.set_op("conv2d", use), lambda name, op: op.op == "conv2d"),
    ("node linear_1", lambda config, use: config.set_node("linear_1", use), lambda name, op: name == "linear_1"),
]
TECHNIQUES = ("float", "static", "dynamic", "token", "bytes", "groups", "fp16")
STATIC, DYNAMIC, WEIGHT_ONLY = Timing.STATIC, Timing.DYNAMIC, Timing.WEIGHT_ONLY
TIMING = {
    "float": None, "static": STATIC, "dynamic": DYNAMIC, "token": DYNAMIC,
    "bytes": WEIGHT_ONLY, "groups": WEIGHT_ONLY, "fp16": WEIGHT_ONLY,
}  # fmt: skip


def use_of(technique: str, act: QuantSpec) -> Any:
    """What to write into a config for a technique."""
    return {
        "float": FLOAT,
        "static": act,
        "dynamic": act.but(timing="dynamic"),
        "token": act.but(timing="dynamic", granularity="per-token"),
        "bytes": BYTES,
        "groups": GROUPS,
        "fp16": FP16_WEIGHT,
    }[technique]


NAMING = ("stem.*", "Conv2d", "op conv2d")
"""The selectors that mean the convolution itself. Others sweep it in, and do not make it dynamic."""


def timing_of(name: str, technique: str) -> Timing | None:
    """How an op with a weight is quantized, by what was asked for last: rows of an image have no scales of their own."""
    return None if technique == "token" and name == "conv2d" else TIMING[technique]


class ByHand:
    """The model with its layers quantized by hand."""

    def __init__(self, backend: str, chosen: dict[str, str]) -> None:
        self.chosen = chosen
        self.yields = backend != "x86"
        """Whether ops that read quantized tensors yield them too."""
        self.has_gelu = backend == "qnnpack"
        self.eps = 2.0**-12 if backend == "executorch" else 2.0**-23
        self.ends = {"qmin": -128, "qmax": 127} if backend == "executorch" else {"qmin": 0, "qmax": 255}

    def weight(self, name: str, w: Tensor) -> Tensor:
        technique = self.chosen[name]
        if timing_of(name, technique) is None:
            return w.detach()
        if technique == "fp16":
            return w.detach().half().float()
        if technique == "groups":
            return fake.weight_by_group(w, 2, -8, 7)
        return fake.weight_by_channel(w, eps=2.0**-23 if technique == "bytes" else self.eps)

    def act(self, name: str, x: Tensor, seen: Tensor) -> Tensor:
        technique = self.chosen[name]
        if technique == "static":
            return fake.known(x, seen, **self.ends)
        if technique == "dynamic":
            return fake.as_it_comes(x, **self.ends)
        return fake.by_token(x, **self.ends) if timing_of(name, technique) is DYNAMIC else x

    def result(self, name: str, y: Tensor, seen: Tensor) -> Tensor:
        """What an op yields: on a grid where its kernels have it so."""
        return fake.known(y, seen, **self.ends) if self.yields and self.chosen[name] == "static" else y

    def run(self, model: Net, x: Tensor) -> Tensor:
        conv, fc1, fc2, out = model.stem[0], model.head[0], model.head[2], model.out
        assert isinstance(conv, nn.Conv2d)
        assert isinstance(fc1, nn.Linear)
        assert isinstance(fc2, nn.Linear)
        with torch.no_grad():
            made, clamped = conv(x), model.stem(x)
            y = F.conv2d(self.act("conv2d", x, x), self.weight("conv2d", conv.weight), conv.bias)
            if self.chosen["relu"] == "float":  # not fused: the convolution itself yields
                y = torch.relu(self.result("conv2d", y, made))
            else:
                y = self.result("conv2d", torch.relu(y), clamped)
            y, seen = y.flatten(1), clamped.flatten(1)
            y, seen = self.linear("linear", fc1, y, seen)
            if self.has_gelu and self.chosen["gelu"] == "static":
                y = fake.known(F.gelu(fake.known(y, seen, **self.ends)), F.gelu(seen), **self.ends)
            else:
                y = F.gelu(y)
            y, seen = self.linear("linear_1", fc2, y, F.gelu(seen))
            return self.linear("linear_2", out, y, seen)[0]

    def linear(self, name: str, layer: nn.Linear, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        made = layer(seen)
        y = F.linear(self.act(name, x, seen), self.weight(name, layer.weight), layer.bias)
        return self.result(name, y, made), made


def _given(name: str, selector: int, technique: str) -> str:
    """What an op gets of a rule."""
    is_swept = name == "conv2d" and TIMING[technique] is DYNAMIC and SELECTORS[selector][0] not in NAMING
    return "float" if is_swept else technique


def expected(rules: list[tuple[int, str]]) -> tuple[dict[str, str], bool]:
    """The technique of each node, by the last rule that picks it; and whether some rule comes to nothing."""
    last = dict.fromkeys(OPS, -1)
    for number, (selector, _) in enumerate(rules):
        last.update({name: number for name, op in OPS.items() if SELECTORS[selector][2](name, op)})
    chosen = {name: "static" if number < 0 else _given(name, *rules[number]) for name, number in last.items()}
    unmet = False
    for number, (selector, technique) in enumerate(rules):
        label, _, picks = SELECTORS[selector]
        picked = [name for name, op in OPS.items() if picks(name, op)]
        is_overridden = any(last[name] != number for name in picked)
        given = {name: _given(name, selector, technique) for name in picked if name in PRODUCTS}
        is_met = any(timing_of(name, what) is TIMING[technique] for name, what in given.items())
        wants = TIMING[technique] in (DYNAMIC, WEIGHT_ONLY)
        unmet |= wants and label != "all" and not is_overridden and not is_met
    return chosen, unmet
