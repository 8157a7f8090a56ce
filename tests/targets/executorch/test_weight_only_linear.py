"""Linear layers whose weights alone are quantized: the delegate multiplies floats by integers."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.spec.formats import PerTensor
from quantc.targets.executorch.exporting import export_program
from quantc.targets.executorch.lazy_imports import XNNPACK, package, suppress_warnings
from quantc.targets.executorch.partitioning import guard_partitioners, name_of, reasons
from quantc.targets.executorch.weight_only_linear import xnnpack_partitioner
from tests.support.executorch_models import NEAR, linear_layer, relative, weights_in, without_data

pytest.importorskip("executorch")
NATIVE: dict[str, tuple[str, qc.QuantSpec | None]] = {
    "dynamic": ("dynamic", None),
    "int8 weights": ("weight-only", None),
    "int4 weights": ("weight-only", qc.INT4_WEIGHT.but(timing="weight-only")),
    "dynamic, int4 weights": ("dynamic", qc.INT4_WEIGHT),
    "dynamic, groups of int4": ("dynamic", qc.INT4_GROUP_SYMMETRIC.but(timing="static", scale_bits=8)),
}
"""What the delegate computes on its own kernels."""
FAST = ("dynamic", "int8 weights")


CASES = [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in NATIVE]


@pytest.mark.parametrize("case", CASES)
def test_linear_layers_in_the_delegate(case: str) -> None:
    x = torch.randn(5, 64)
    program = weights_in(linear_layer(), x, *NATIVE[case])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered = qc.lower(program, "executorch")
    assert lowered.delegation().fraction == 1
    assert lowered.delegation().others == ()
    assert relative(program(x), lowered(x)) < NEAR


def test_the_partitioner_knows_one_more_kind_of_linear_layer() -> None:
    known = package(f"{XNNPACK}.partition.config").ALL_PARTITIONER_CONFIGS
    found = xnnpack_partitioner().target_partitioner_configs
    plain = package(f"{XNNPACK}.partition.xnnpack_partitioner").XnnpackPartitioner().target_partitioner_configs
    assert found.keys() == plain.keys()
    changed = {name for name in found if type(found[name]) is not type(plain[name])}
    assert changed == {"linear.default"}
    assert isinstance(found["linear.default"], type(plain["linear.default"]))
    assert any(config.target_name == "linear.default" for config in known), "what is known is not changed"
    assert type(found["linear.default"]) not in known


class Told(logging.Handler):
    """Keeps every reason by the name of its node: what is refused is taken apart, and refused once more."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: dict[str, list[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        said: Any = record.msg
        self.found.setdefault(name_of(said.node), []).append(str(said.reason))


def test_a_bias_and_other_scales_are_refused_with_a_reason() -> None:
    """As the layers are exported, without what `legalize-weights` makes of them."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    whole = qc.INT8_WEIGHT_ONLY.but(granularity=PerTensor())
    config = qc.QuantConfig().set_all(qc.INT8_WEIGHT_ONLY).set("2", whole)
    graph = export_program(without_data(layers, torch.randn(5, 8), mode="weight-only", config=config), {})
    told = Told()
    logger = logging.getLogger(f"{XNNPACK}.partition.config.gemm_configs")
    with reasons(), suppress_warnings():
        logger.addHandler(told)
        try:
            package("executorch.exir").to_edge_transform_and_lower(
                graph, partitioner=guard_partitioners([xnnpack_partitioner()])
            )
        finally:
            logger.removeHandler(told)
    assert any("adds no bias" in reason for reason in told.found["linear"])
    assert any("a scale for each channel" in reason for reason in told.found["linear_2"])
    assert "linear_1" not in told.found
