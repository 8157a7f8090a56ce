"""`qc.compare`: compares a quantized program with its float model or program."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from quantc import pipelines
from quantc.capture.capture_request import AUTO
from quantc.errors import DataError, InputError, QuantcError
from quantc.inspect.comparison import Comparison, compare_programs
from quantc.ir.batch_inputs import check_batches, leaves_of
from quantc.ir.program import Program, Stage
from quantc.ir.types import TensorType
from quantc.verbs.capture import capture


def compare(reference: Program | nn.Module, quantized: Program, batches: Iterable[Any]) -> Comparison:
    """Run a float program and the quantized one on batches and report their differences, op by op.

    `reference` is the prepared program, or the captured one, or the model itself: the latter two are brought into the
    form of the prepared one first. A batch is as in `qc.calibrate`. Batches are consumed once, and peak memory is that
    of running both programs.
    """
    if not isinstance(quantized, Program):
        raise InputError(
            f"qc.compare was given a {type(quantized).__name__} for the quantized program",
            where="the second argument of qc.compare",
            advice="give the float model or program first, then the quantized program",
        )
    check_batches(batches)
    source = iter(batches)
    first = next(source, None)
    if first is None:
        raise DataError("compared on zero batches", where=quantized.name, advice="give at least one batch")
    reference = in_form_of(quantized, reference, first)
    _check_inputs(reference, quantized)
    return compare_programs(reference, quantized, chain([first], source))


def in_form_of(quantized: Program, given: Program | nn.Module, batch: Any) -> Program:
    """The float program in the form that was quantized; unchanged if nothing was."""
    program = given if isinstance(given, Program) else _capture_like(given, quantized, batch)
    if program.stage >= Stage.ANNOTATED or quantized.stage < Stage.ANNOTATED:
        return program
    quantizer = quantized.plan.quantizer
    if quantizer is None:
        return pipelines.inference().run_on_copy(program)
    return pipelines.prepare(quantizer).without("annotate", "share").run_on_copy(program)


def _capture_like(model: nn.Module, quantized: Program, batch: Any) -> Program:
    """The model, captured as the quantized program was: sizes that are dynamic there are so here."""
    signature = quantized.signature
    args, kwargs = pytree.tree_unflatten(leaves_of(quantized, batch, 0), signature.in_spec)
    if signature.opened or quantized.method == "fx":
        how, sizes = quantized.method, AUTO if signature.opened else None
        return capture(model, args, "fx" if how == "fx" else "auto", example_kwargs=kwargs, dynamic_shapes=sizes)
    free = [_dynamic(item.type) for item in signature.inputs]
    shapes, named = pytree.tree_unflatten(free, signature.in_spec)
    # torch.export takes the sizes of keyword inputs after those of the others
    dynamic_shapes = (*shapes, *named.values()) if any(free) else None
    return capture(model, args, example_kwargs=kwargs, dynamic_shapes=dynamic_shapes)


def _dynamic(kind: TensorType | None) -> dict[int, Any] | None:
    """The dimensions of an input that have no fixed size, as torch.export takes them."""
    sizes = () if kind is None else kind.shape
    return {index: Dim.AUTO for index, size in enumerate(sizes) if not isinstance(size, int)} or None


def _check_inputs(reference: Program, quantized: Program) -> None:
    if reference.signature.in_spec != quantized.signature.in_spec:
        raise QuantcError(
            f"{reference.name} and {quantized.name} take different inputs",
            where=f"{reference.signature.in_spec} and {quantized.signature.in_spec}",
            advice="compare a quantized program with the one it was made from",
        )
