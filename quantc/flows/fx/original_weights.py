"""The float weights of a quantized model, kept beside it on request."""

from __future__ import annotations

import re
from collections import Counter

from torch import Tensor

from quantc.flows.fx.custom_config import CustomConfigError
from quantc.ir.decisions import Quantize
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.ir.sites import Origin
from quantc.spec.formats import Role

Weights = dict[str, tuple[Tensor, Tensor | None]]


def original_weights(program: Program) -> Weights:
    """The weight and the bias of every op whose weight is quantized, batch norms folded in, by the name of its module:
    `<path>_packed_weight_<n>`, the n-th of that module."""
    if program.is_live:
        raise CustomConfigError(
            "float weights are kept beside those of calibrated models only",
            where="keep_original_weights",
            advice="a trained model has them itself: keep prepared.state_dict()",
        )
    places, counts, found = Places(program), Counter[str](), dict[str, tuple[Tensor, Tensor | None]]()
    sites = {
        (places.node(site), site.operand)
        for group in program.plan.groups
        if isinstance(group.outcome, Quantize) and group.outcome.spec.role is Role.WEIGHT
        for site in group.places
        if site.operand is not None
    }
    for node, operand in sorted(sites, key=lambda row: (row[0], row[1])):
        operands = places.operands(node)
        tensors = [program.tensor(value) for value in operands]
        weight = tensors[operand]
        if weight is None:
            continue
        bias = tensors[operand + 1] if operand + 1 < len(tensors) else None
        is_bias = bias is not None and bias.dim() == 1 and weight.dim() > 1
        path = (program.origins.get(node) or Origin()).module_path
        stem = re.sub(r"\W+", "_", path)
        found[f"{stem}_packed_weight_{counts[stem]}"] = (
            weight.detach().clone(),
            bias.detach().clone() if is_bias and bias is not None else None,
        )
        counts[stem] += 1
    return found
