"""Quantization decisions: which tensors are quantized, and how."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer

from quantc.annotate.annotator import Annotator
from quantc.annotate.left_float import why_float
from quantc.annotate.quantizer import Quantizer, instruction_sets_of, quantizer_of
from quantc.annotate.unmet_requests import refuse_unheeded, refuse_unmet
from quantc.config.config import QuantConfig
from quantc.errors import AnnotationError, QuantcError
from quantc.ir.plan import Plan
from quantc.ir.program import Program, Stage
from quantc.ir.types import dtype_of
from quantc.pipeline.pipeline import Outcome, Pass, Preserves


def _checked(value: Any) -> Any:
    try:
        return quantizer_of(value)
    except QuantcError as error:
        raise ValueError(f"{error.what}; {error.advice}") from error


def _name(quantizer: Quantizer) -> str:
    return quantizer.name


class Annotate(Pass):
    """Let a quantizer decide which ops are quantized, and the form of each tensor.

    The decisions are stored in `program.plan`: no node is changed. The quantizer is a backend by name, a `Backend`, or
    any object with the members of `Quantizer`; in pipeline text it is written by name. A config request that the
    backend cannot run is an error, and so is a program of which nothing would be quantized.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    name: ClassVar[str] = "annotate"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage | None] = Stage.ANNOTATED
    before: ClassVar[Stage | None] = Stage.OBSERVED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    backend: Annotated[Quantizer, BeforeValidator(_checked), PlainSerializer(_name, return_type=str)]
    """The backend or quantizer that decides."""
    config: QuantConfig = Field(default_factory=QuantConfig)
    """The user's rules, which override the backend's."""
    allow_empty: bool = False
    """Accept a program in which nothing is quantized."""

    def run(self, program: Program) -> Outcome:
        before = program.plan
        program.plan = Plan(self.backend, self.config, instruction_sets=instruction_sets_of(self.backend))
        try:
            config = self.config.resolve(program)
            self.backend.annotate(Annotator(program, config))
            self.backend.validate(program)
            refuse_unmet(program, config)
            refuse_unheeded(program, config)
        except Exception:
            program.plan = before
            raise
        plan = program.plan
        if not plan.claims and not self.allow_empty:
            error = _nothing(program, self.backend)
            program.plan = before
            raise error
        parts = Counter(claim.part.value for claim in plan.claims.rows.values())
        notes = tuple(f"{count} nodes {part}" for part, count in sorted(parts.items()))
        if plan.decides_like(before):
            program.plan = before  # with its groups and statistics
            authors = [(made.quantizer, made.config, made.instruction_sets, made.absent) for made in (before, plan)]
            before.quantizer, before.config, before.instruction_sets, before.absent = authors[1]
            return Outcome(authors[0] != authors[1], notes)  # who decided on nothing can explain it
        return Outcome(True, notes)


BY_CONFIG = "as the config says: "
"""Prefix of reasons that come from a config, before the rule."""


def _nothing(program: Program, quantizer: Quantizer) -> AnnotationError:
    reasons = why_float(program)
    advice = "prepare it with allow_empty=True, and prepared.explain(node) says what would have to change"
    what = f"nothing was quantized: {quantizer.name} has no rule that fits an op of {program.name}"
    if (floats := _other_floats(program)) and any("only float32 tensors are quantized" in why for why in reasons):
        what = f"{program.name} is in {floats}, and only float32 is quantized: nothing was quantized"
        advice = (
            'write qc.quantize(model, example_inputs, batches, dtype="float32"), give dtype= to qc.capture, or --dtype float32 to quantc quantize: '
            f"a copy is brought to float32, as by model.float(); else {advice}"
        )
    rules = dict.fromkeys(row.partition(BY_CONFIG)[2] for row in reasons if BY_CONFIG in row)
    if rules:
        what = f"nothing was quantized: the config leaves {program.name} float: {', '.join(rules)}"
        advice = f"leave that out of the config, or let it name fewer ops; else {advice}"
    if any("capture with example inputs" in reason for reason in reasons):
        advice = f"give example_inputs when capturing or quantizing, so that types are known; else {advice}"
    if not any(node.op == "call_function" for node in program.nodes()):
        advice = "give a model that computes something"
    return AnnotationError(
        what,
        where="; ".join(reasons) or f"{program.name} has no ops",
        advice=f"{advice}; `quantc backends` and docs/backends.md list the rules",
    )


def _other_floats(program: Program) -> str:
    """The floats that the program computes in besides float32."""
    dtypes = {dtype_of(node) for node in program.nodes()} - {None, torch.float32}
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype and dtype.is_floating_point))
