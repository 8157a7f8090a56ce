"""A config that names the ops which a backend quantizes only where they are named."""

from __future__ import annotations

from typing import Any

import quantc as qc
from quantc.annotate.quantizer import TableQuantizer, quantizer_of
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.spec.formats import Offer

MADE_OF_PRODUCTS = ("sdpa", "einsum")
"""Ops that become products when they are taken apart."""


def naming(program: Program, backend: Any) -> qc.QuantConfig:
    """Asks for the backend's own spec at every op of the program that one of its rules takes only by name."""
    quantizer = quantizer_of(backend)
    config = qc.QuantConfig()
    if not isinstance(quantizer, TableQuantizer):
        return config
    targets = [
        target for rule in quantizer.backend.table if rule.static is Offer.NAMED for target in rule.compiled.targets
    ]
    nodes = list(qc.pipelines.inference().run_on_copy(program).nodes())
    names = [op_name(node) for node in nodes if node.target in targets]
    if targets and any(op_name(node) in MADE_OF_PRODUCTS for node in nodes):
        names.append("matmul")
    for name in dict.fromkeys(names):
        config = config.set_op(name, quantizer.backend.outcome("act"))
    return config
