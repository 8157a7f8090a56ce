"""The `plan` section of a program's text: the facts of `quantc.store.stored_plan`, one a line.

    plan
      quantizer "x86" {backends=["x86"]}
      config = {"rules": [{"select": {"by": "module", "path": "head"}, "use": "FLOAT"}]}
      instruction_set "x86" = "avx2"
      arithmetic "x86" = {"rounding": "half-up"}
      batches = 4
      claim "conv2d" = "conv" {quantizer="x86", root="relu"}
      left_float "linear" = "left float, as the config says: head"
      lowered "qconv2d" = "conv2d"
      outcome "conv2d:in0" = quantize("UINT8")
      group "conv2d:in0" = quantize("UINT8") {source="data", values=["x:out0"], places=["conv2d:in0"]}
      observer "observer_0" = "conv2d:in0" {where="conv2d", enabled=True}
      statistics "conv2d:in0" = "minmax" {share={"kind": "per-tensor"}, values={"seen": 64}} low : f32[] = -1.0
      fitted "conv2d:in1" {to="51d7e0a4"} value : f32[8, 3, 3, 3] #9f2c01ab
      qparams "conv2d:in0" scale : f32[] = 0.0235, zero_point : i64[] = 128

Nodes and sites are written by name, as in files. An outcome is one of `quantize(spec)`, `fixed(spec, scale, zero_point)`,
`same_as(site)`, `derived(formula, [sites])` and `float(reason)`; a spec is the text that `QuantSpec.parse` reads. A tensor
of one element is written as it is; a larger one, as a histogram, is a constant like those of the graphs: dtype, shape
and digest, to be given as `statistics/<group>/<name>`, `fitted/<site>/value` or `qparams/<group>/<name>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from quantc.ir.decisions import Derived, Fixed, Float, Quantize, SameAs, TensorOutcome
from quantc.ir.plan import Part
from quantc.ir.program import Program
from quantc.ir.types import TensorType
from quantc.spec.formats import Timing
from quantc.spec.spec import name_of
from quantc.store.stored_observers import ObserverData, observer_data, with_observed
from quantc.store.stored_plan import ClaimData, GroupData, PlanData, nodes_of, plan_data
from quantc.text.digests import REMEMBERED, digest
from quantc.text.literals import format_value, no_nodes, quote

INDENT = "  "
QPARAMS = ("scale", "zero_point")
FITTED = ("value",)
INLINE = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)
"""Tensors of one element have these dtypes where the text holds the number itself."""


class _Names(dict[fx.Node, str]):
    """Names of nodes; broken programs have facts about nodes that they lack, and are printed too."""

    def __missing__(self, node: fx.Node) -> str:
        return node.name


class PlanTensors:
    """Tensors of a plan, by the names they have in its text."""

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        self.named[name] = tensor.detach()

    def take(self, name: str) -> Tensor:
        return self.named[name]


def tensors_of(program: Program) -> dict[str, Tensor]:
    """The tensors of a plan that its text names, and does not hold; without those that were not given to it either."""
    named = _data(program)[2].named
    return {name: tensor for name, tensor in named.items() if not _is_inline(tensor) and not tensor.is_meta}


def _data(program: Program) -> tuple[PlanData, dict[str, ObserverData], PlanTensors]:
    names = _Names((node, name) for name, node in nodes_of(program).items())
    tensors = PlanTensors()
    return plan_data(with_observed(program), names, tensors), observer_data(program, names), tensors


def write_plan(program: Program) -> Iterator[str]:
    """The lines of a plan, after the keyword."""
    yield from (f"{INDENT}{line}" for line in _lines(program))


def _lines(program: Program) -> Iterator[str]:
    data, observers, tensors = _data(program)
    if data.quantizer is not None:
        yield f"quantizer {quote(data.quantizer.name)}{_attributes(backends=data.quantizer.backends)}"
    if data.config is not None:
        yield f"config = {_literal(data.config.model_dump(mode='json', exclude_none=True))}"
    yield from (f"instruction_set {quote(name)} = {quote(found)}" for name, found in _given(data.instruction_sets))
    for name, arithmetic in data.arithmetic.items():
        yield f"arithmetic {quote(name)} = {_literal(arithmetic.model_dump(mode='json', exclude_defaults=True))}"
    if data.batches:
        yield f"batches = {data.batches}"
    yield from (_claim(node, claim) for node, claim in data.claims.items())
    yield from (f"left_float {quote(node)} = {quote(reason)}" for node, reason in data.left_float.items())
    yield from (f"lowered {quote(node)} = {quote(old)}" for node, old in data.lowered.items())
    yield from (f"outcome {quote(site)} = {_outcome(data.uses[use])}" for site, use in data.outcomes.items())
    yield from (_group(group, data.uses[group.use]) for group in data.groups)
    yield from _observers(observers)
    described = _Described(program, tensors.named)
    for name, record in data.statistics.items():
        facts = _attributes(share=record.share.model_dump(mode="json"), values=record.values)
        parts = described(f"statistics/{name}", record.tensors)
        yield f"statistics {quote(name)} = {quote(record.statistics)}{facts}{parts}"
    for site in data.fitted:
        to = _attributes(to=data.fitted_to[site]) if site in data.fitted_to else ""
        yield f"fitted {quote(site)}{to}{described(f'fitted/{site}', FITTED)}"
    yield from (f"qparams {quote(name)}{described(f'qparams/{name}', QPARAMS)}" for name in data.qparams)


def _given(rows: Mapping[str, str] | None) -> Iterator[tuple[str, str]]:
    yield from (rows or {}).items()


def _claim(node: str, claim: ClaimData) -> str:
    odd = {} if claim.part is Part.QUANTIZED else {"part": claim.part.value}
    odd |= {} if claim.timing is Timing.STATIC else {"timing": claim.timing.value}
    facts = _attributes(quantizer=claim.quantizer, root=claim.root, **odd)
    return f"claim {quote(node)} = {quote(claim.rule)}{facts}"


def _outcome(outcome: TensorOutcome) -> str:
    match outcome:
        case Quantize(spec=spec):
            return f"quantize({quote(name_of(spec))})"
        case Fixed(scale=scale, zero_point=zero_point, spec=spec):
            return f"fixed({quote(name_of(spec))}, scale={scale!r}, zero_point={zero_point})"
        case SameAs(site=site):
            return f"same_as({quote(str(site))})"
        case Derived(sites=sites, formula=formula):
            return f"derived({quote(formula)}, {_literal([str(site) for site in sites])})"
        case Float(reason=reason):
            return f"float({quote(reason)})"


def _group(group: GroupData, outcome: TensorOutcome) -> str:
    facts = _attributes(source=group.source.value, values=group.values, places=group.places)
    return f"group {quote(group.name)} = {_outcome(outcome)}{facts}"


def _observers(rows: Mapping[str, ObserverData]) -> Iterator[str]:
    for node, row in rows.items():
        yield f"observer {quote(node)} = {quote(row.group)}{_attributes(where=row.where, enabled=row.enabled)}"


def _attributes(**rows: Any) -> str:
    return f" {{{', '.join(f'{name}={_literal(value)}' for name, value in rows.items())}}}"


def _literal(value: Any) -> str:
    return format_value(value, no_nodes)


class _Described:
    """Writes tensors: ` scale : f32[8] #9f2c01ab, zero_point : i64[] = 3`."""

    def __init__(self, program: Program, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.remembered: Mapping[str, str] = getattr(program.root, REMEMBERED, {})

    def __call__(self, prefix: str, names: Sequence[str]) -> str:
        parts = [f"{_name(name)} : {self._one(f'{prefix}/{name}')}" for name in names]
        return f" {', '.join(parts)}" if parts else ""

    def _one(self, name: str) -> str:
        tensor = self.tensors[name]
        kind = TensorType(tensor.dtype, tuple(tensor.shape))
        if _is_inline(tensor):
            return f"{kind} = {_number(tensor)}"
        seal = digest(tensor) or self.remembered.get(name)
        return f"{kind} #{seal}" if seal else str(kind)


def _name(name: str) -> str:
    """A word where it is one, else a string: the tensors of foreign statistics have any names."""
    return name if name.isidentifier() and name.isascii() else quote(name)


def _is_inline(tensor: Tensor) -> bool:
    return tensor.numel() == 1 and not tensor.is_meta and tensor.dtype in INLINE


def _number(tensor: Tensor) -> str:
    """The one number of a tensor, in as few digits as give it back."""
    number = tensor.item()
    if tensor.dtype == torch.float32:
        short = float(str(np.float32(number)))
        if np.float32(short) == np.float32(number):
            return repr(short)
    return repr(number)
