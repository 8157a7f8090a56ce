"""qnnpack and executorch against torch.ao's FX graph mode with its tables for them, on the same spec."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.backends.executorch import EXECUTORCH
from quantc.backends.qnnpack import QNNPACK
from tests.support.oracle_models import SUBJECTS, Subject
from tests.support.oracles import EPS, Batches, differences, fx_mode, min_max, placement, whole_sqnr, worst_op_error

RELU6 = "we fuse ReLU6 into the convolution: the range is that of what it lets through; theirs quantizes before it"
LINEAR_RELU = "we fuse ReLU into linear, as the delegate does; their table for it does not"
CONV1D = "the delegate takes conv1d; their table for it has conv2d alone"
NORM = "we quantize what a layer norm reads; their table for qnnpack has no layer norm"
TOKENS = "sums of tokens stay float where a norm reads them: rounding them gains no time and costs 6 to 7 dB"
MATMUL = "the delegate takes no matmul, and what only a matmul reads stays float"


def _first(operands: str) -> tuple[str, ...]:
    return tuple(f"{name}[0]" for name in operands.split())


Listed = dict[str, dict[str, str]]

BOTH: Listed = {
    "inverted": dict.fromkeys(
        _first(
            "hardtanh#0 hardtanh#1 hardtanh#2 hardtanh#3 hardtanh#4 conv2d#1 conv2d#2 conv2d#3 conv2d#5 conv2d#6 add#0"
        ),
        RELU6,
    ),
    "smooth_convs": dict.fromkeys(_first("hardtanh#0 conv2d#3"), RELU6),
}
QNNPACK_LISTED: Listed = {**BOTH, "feed": {"layer_norm#0[0]": NORM}}
EXECUTORCH_LISTED: Listed = {
    **BOTH,
    "perceptron": dict.fromkeys(_first("relu#0 relu#1"), LINEAR_RELU),
    "chain": dict.fromkeys(_first("relu#0"), LINEAR_RELU),
    "waves": dict.fromkeys(("conv1d#0[0]", "conv1d#0[1]", "conv1d#1[0]", "conv1d#1[1]"), CONV1D),
    "attending": dict.fromkeys(("matmul#0[1]", "permute#4[0]", "reshape#3[0]"), MATMUL),
    "feed": dict.fromkeys(_first("add#0 output#0"), TOKENS),
    "moved": dict.fromkeys(_first("relu#1 permute#0 linear#1"), LINEAR_RELU),
    "twice": dict.fromkeys(
        (*_first("relu#0 relu#1 relu#2 relu#3 linear#1 linear#2 linear#3 add#0"), "add#0[1]"), LINEAR_RELU
    ),
}


@dataclass(frozen=True)
class Tool:
    """One of our backends, and theirs for the same kernels."""

    backend: Backend
    dtype: torch.dtype
    listed: Listed
    """Where the table places quantization elsewhere than theirs, by operand, and why."""

    def config(self) -> Any:
        from torch.ao.quantization import backend_config
        from torch.ao.quantization.backend_config import utils  # noqa: F401 - which it reads and does not import

        if self.backend is QNNPACK:
            return backend_config.get_qnnpack_backend_config()
        return backend_config.get_executorch_backend_config()

    def qconfigs(self) -> Any:
        """Min-max for everything, but their fixed qparams for what has a known range."""
        from torch.ao import quantization as ao

        spec, weight = self.backend.outcome("act").spec, self.backend.outcome("weight").spec
        act = ao.MinMaxObserver.with_args(dtype=self.dtype, quant_min=spec.qmin, quant_max=spec.qmax, eps=EPS)
        per_channel = ao.PerChannelMinMaxObserver.with_args(
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=weight.qmin, quant_max=127, eps=EPS
        )
        mapping = ao.QConfigMapping().set_global(ao.QConfig(activation=act, weight=per_channel))  # type: ignore[no-untyped-call]
        for kind, qconfig in _fixed(ao.get_default_qconfig_mapping("qnnpack").object_type_qconfigs.items()):
            mapping.set_object_type(kind, qconfig)
        return mapping


def _fixed(items: Iterable[tuple[Any, Any]]) -> Iterable[tuple[Any, Any]]:
    return ((kind, qconfig) for kind, qconfig in items if qconfig and "FixedQParams" in str(qconfig.activation))


TOOLS = {
    "qnnpack": Tool(QNNPACK, torch.quint8, QNNPACK_LISTED),
    "executorch": Tool(EXECUTORCH, torch.qint8, EXECUTORCH_LISTED),
}
CASES = [(name, subject) for name in TOOLS for subject in SUBJECTS]


@dataclass(frozen=True)
class Pair:
    """One model quantized by both, on the same calibration data."""

    tool: Tool
    subject: Subject
    model: nn.Module
    ours: fx.GraphModule
    theirs: fx.GraphModule
    unseen: Batches

    @property
    def listed(self) -> dict[str, str]:
        return self.tool.listed.get(self.subject.name, {})


@pytest.fixture(scope="module", params=CASES, ids=[f"{name}-{subject.name}" for name, subject in CASES])
def pair(request: pytest.FixtureRequest) -> Pair:
    tool, subject = TOOLS[request.param[0]], request.param[1]
    model, batches = subject.model(), subject.batches(4, seed=1)
    prepared = qc.prepare(qc.capture(model, batches[0]), min_max(tool.backend))
    qc.calibrate(prepared, batches)
    theirs = fx_mode(subject.model(), tool.qconfigs(), tool.config(), batches)
    return Pair(tool, subject, model, qc.convert(prepared).module, theirs, subject.batches(64, seed=2))


def test_placement_and_qparams(pair: Pair) -> None:
    """Every operand that is not listed is quantized by both or by neither, with the same bits."""
    found = differences(placement(pair.ours), placement(pair.theirs))
    assert found.keys() == pair.listed.keys(), "\n".join(f"{name}: {text}" for name, text in found.items())


def test_op_by_op(pair: Pair) -> None:
    """Given what their op reads, our op with our weights yields the same."""
    if CONV1D in pair.listed.values():
        pytest.skip(CONV1D)
    error, name = worst_op_error(pair.ours, pair.theirs, pair.unseen[0])
    assert error <= 1e-5, name


def test_sqnr_is_not_lower(pair: Pair) -> None:
    ours, theirs = (whole_sqnr(pair.model, result, pair.unseen) for result in (pair.ours, pair.theirs))
    assert ours >= theirs - 0.1
