"""Checks which rules of a backend ExecuTorch's delegate takes: lowered, run on its runtime, and compared.

    print(check_delegate("executorch"))

A rule is taken if, for every model the kit makes for it, each of its ops is computed by the delegate on integers, and
the result is within a step of the Q/DQ form. That is checked for every technique of the backend's modes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from quantc.annotate.quantizer import Backend, TableQuantizer, quantizer_of
from quantc.errors import PatternError, QuantcError
from quantc.ir.program import Program
from quantc.qdq.ops import is_dequantize
from quantc.spec.formats import Timing
from quantc.spec.spec import QuantSpec
from quantc.targets.executorch.artifact import Pte
from quantc.targets.executorch.executorch_lowering import lower
from quantc.testing.conformance import Fault
from quantc.testing.kernel_checks import FACTORS, MAX_STEPS, KernelReport, Specs, rows_of, specs_of_modes
from quantc.testing.rule_trial import Subject, Trial, scale_inputs, trials_of
from quantc.verbs.convert import convert

DELEGATE = "delegate"
FLOAT_ERROR = 1e-5
"""Allowed float error, relative to the largest value: delegates sum in another order."""
ROUNDING = 1e-3
"""Of a step: dequantized numbers are floats."""
_CLAIM = 'leave "delegate" out of the rule\'s `supports`, or narrow the rule to what the delegate takes'
_NUMBERS = "narrow the rule to what the delegate computes as the Q/DQ form does"


def specs_of_delegate(trial: Trial, timing: Timing) -> list[QuantSpec]:
    """Specs of the backend's modes for a rule; weight-only, XNNPACK supports linear layers alone."""
    is_asked = timing is not Timing.WEIGHT_ONLY or trial.rule.name == "linear"
    return specs_of_modes(trial, timing) if is_asked else []


@dataclass(frozen=True)
class DelegateReport(KernelReport):
    """Rules of a backend in the delegate of a target. Prints as a table."""

    def __str__(self) -> str:
        _, _, table = super().__str__().partition("\n")
        rules = dict.fromkeys(row.rule for row in self.rows)
        return f"{self.backend}: the delegate takes {len(self.carried)} of {len(rules)} rules\n{table}"


def check_delegate(
    backend: str | Backend = "executorch",
    *,
    rules: Sequence[str] = (),
    models: Callable[[Sequence[Trial]], Sequence[Trial]] = list,
    specs: Specs = specs_of_delegate,
) -> DelegateReport:
    """Lower the kit's models for the rules of a backend to ExecuTorch, run them, and report the rules that the delegate takes.

    `rules`, `models` and `specs` are those of `check_kernels`.
    """
    quantizer = quantizer_of(backend)
    if not isinstance(quantizer, TableQuantizer):
        raise PatternError(f"{backend!r} has no table to check", advice="give a Backend, or the name of one")
    given = quantizer.backend
    subject = Subject(given)
    chosen = [rule for rule in subject.demanded.table if not rules or rule.name in rules]
    rows = [row for rule in chosen for row in rows_of(models(trials_of(subject, rule)), rule, _judged, specs)]
    claimed = frozenset(rule.name for rule in given.table if DELEGATE in rule.supports)
    return DelegateReport(given.name, DELEGATE, tuple(rows), claimed)


def _judged(trial: Trial, prepared: Program, where: str, timing: Timing) -> list[Fault]:
    """Faults that keep a rule's ops from the delegate, or its numbers from those of the Q/DQ form."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # models of the kit are quantized by a quantizer of another name
            quantized = convert(prepared)
            lowered = lower(quantized)
            faults = [*_fallen_back(trial, lowered), *_apart(trial, quantized, lowered)]
    except QuantcError as error:
        faults = [Fault(f"lowering fails: {error.what}", error.advice or "")]
    return [Fault(fault.what, fault.advice, where) for fault in faults]


def _fallen_back(trial: Trial, lowered: Pte) -> Iterator[Fault]:
    mine = [row for row in lowered.delegation().rows if row.rule == trial.rule.name]
    if not mine:
        yield Fault("none of its ops is left", _CLAIM)
    for row in mine:
        if not row.is_delegated:
            yield Fault(f"{row.node} runs in {row.place.value}: {row.why}", _CLAIM)


def _apart(trial: Trial, quantized: Program, lowered: Pte) -> Iterator[Fault]:
    """Outputs that differ from the Q/DQ form's, on inputs of several sizes."""
    (output,) = quantized.graph.find_nodes(op="output")
    for factor in FACTORS:
        inputs = scale_inputs(trial.inputs, factor)
        expected = [value for value in quantized.run_flat(inputs) if isinstance(value, Tensor)]
        for node, want, got in zip(output.args[0], expected, lowered.run(*inputs), strict=True):
            step = _step(node)
            unit = step if step is not None else float(want.abs().max()) or 1.0
            worst = float((got.double() - want.double()).abs().max()) / unit if want.numel() else 0.0
            most, word = (MAX_STEPS + ROUNDING, "steps") if step is not None else (FLOAT_ERROR, "of the largest")
            if not worst <= most:
                yield Fault(f"{node.name} is {worst:.3g} {word} from the Q/DQ form", _NUMBERS)


def _step(node: fx.Node) -> float | None:
    """The scale of an output that comes from a dequantize op; None for one that is float."""
    scale = node.args[1] if is_dequantize(node) else None
    return float(scale) if isinstance(scale, int | float) else None


__all__ = ["DelegateReport", "check_delegate", "specs_of_delegate"]
