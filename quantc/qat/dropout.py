"""Dropout as a value-preserving op for rules during training.

Inference has no dropout, so no backend has a rule for it. In training it separates ops that are adjacent in inference.
"""

from __future__ import annotations

from dataclasses import replace

from quantc.annotate.quantizer import Quantizer, Quantizers, TableQuantizer

RULE = "dropout"


def through_dropout(quantizer: Quantizer) -> Quantizer:
    """A quantizer whose tables propagate quantized tensors through dropout. One without a table is unchanged."""
    from quantc.patterns import aten
    from quantc.patterns.table import Rule, RuleTable

    if isinstance(quantizer, Quantizers):
        return replace(quantizer, members=tuple(through_dropout(member) for member in quantizer.members))
    if not isinstance(quantizer, TableQuantizer):
        return quantizer
    backend = quantizer.backend
    rule = Rule(RULE, aten.dropout.having(train=False), {"x": "pass", "out": "like x"}, supports={"qdq"})
    return TableQuantizer(replace(backend, table=backend.table + RuleTable(RULE, (rule,))))
