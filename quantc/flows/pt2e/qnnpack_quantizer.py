"""`QNNPackQuantizer`, the quantizer that the PT2 export flow began with: QNNPACK's table, with int8 activations.

QNNPACK's kernels compute on uint8; a program on int8 is shifted by 128 when it is lowered, which is exact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from quantc.annotate.quantizer import Backend
from quantc.backends import rules
from quantc.backends.qnnpack import QNNPACK
from quantc.flows.pt2e.backend_quantizer import BackendQuantizer
from quantc.flows.pt2e.quantizer import OperatorConfig, QuantizationConfig
from quantc.flows.pt2e.xnnpack_quantizer import get_symmetric_quantization_config, known_configs
from quantc.spec.capability import Capability
from quantc.spec.formats import DType, Role
from quantc.spec.spec import INT8

QNNPACK_INT8 = replace(
    QNNPACK,
    roles={**QNNPACK.roles, "act": INT8, **rules.known_ranges(INT8)},
    takes=(Capability(role=Role.ACT, dtypes=(DType.INT8,)), *QNNPACK.takes),
)


class QNNPackQuantizer(BackendQuantizer):
    """Quantizes what QNNPACK's kernels take."""

    backend: ClassVar[Backend] = QNNPACK_INT8
    known_configs = staticmethod(known_configs)


__all__ = ["OperatorConfig", "QNNPackQuantizer", "QuantizationConfig", "get_symmetric_quantization_config"]
