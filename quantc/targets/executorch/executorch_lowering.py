"""Lowering to ExecuTorch: `torch.export`, edge dialect, delegates, `.pte`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from quantc.errors import QuantcError, RefusedError
from quantc.ir.program import Program, check_program
from quantc.pipeline.pipeline import Hook, Pipeline
from quantc.targets.executorch.artifact import TARGET, Pte
from quantc.targets.executorch.call_signature import outputs_of
from quantc.targets.executorch.delegation import delegation_of, misread
from quantc.targets.executorch.exporting import LARGEST, examples_of, export_program, keeps_state, size_ranges
from quantc.targets.executorch.lazy_imports import package, quiet, suppress_warnings
from quantc.targets.executorch.metadata import METHOD, metadata_of
from quantc.targets.executorch.partitioning import guard_partitioners, reasons
from quantc.targets.executorch.weight_only_linear import xnnpack_partitioner
from quantc.targets.provenance import check_quantized
from quantc.targets.target_table import EXECUTORCH


def lower(
    program: Program,
    target: str = TARGET,
    *,
    partitioners: Sequence[Any] | None = None,
    largest: int | Mapping[str, int] | None = None,
    pipeline: Pipeline | str | None = None,
    hooks: Sequence[Hook] = (),
) -> Pte:
    """Lower a quantized program in Q/DQ form to ExecuTorch. The program is not modified.

    `partitioners` assign ops to delegates, the first one first; XNNPACK's by default. `largest` is the size up to which
    memory is reserved for unbounded dynamic dimensions: one for all (64 by default), or by symbol. A batch dimension
    that is dynamic by default only is fixed to that of the example inputs, unless `largest` is given.

    `pipeline` is run on a copy first, watched by `hooks`: by default `quantc.pipelines.lower("executorch")`, without
    `fix-sizes` if `largest` is given, and without `space-to-depth` if `partitioners` are. Any other is run as it is.
    """
    check_program(program, "lower", "qc.convert(prepared), or take result.program of qc.quantize(...),")
    _check_form(program)
    return as_pte(program, partitioners=partitioners, largest=largest, pipeline=pipeline, hooks=hooks)


def as_pte(
    program: Program,
    *,
    partitioners: Sequence[Any] | None = None,
    largest: int | Mapping[str, int] | None = LARGEST,
    pipeline: Pipeline | str | None = None,
    hooks: Sequence[Hook] = (),
) -> Pte:
    """Lower a program to ExecuTorch, quantized or not."""
    exir = package("executorch.exir")
    package("executorch.kernels.quantized")
    package("executorch.exir.passes._quant_patterns_and_replacements")  # registers what exporting its ops needs
    asked = _partitioners(partitioners) if partitioners is not None else [xnnpack_partitioner()]
    without = [name for name, given in (("fix-sizes", largest), ("space-to-depth", partitioners)) if given is not None]
    own = pipeline_for(program, pipeline, without).run_on_copy(program, hooks)
    ranges = size_ranges(own, LARGEST if largest is None else largest)
    try:
        graph = export_program(own, ranges)
        metadata = metadata_of(own, ranges, has_state=keeps_state(graph), source=program)
        with reasons() as refusals, suppress_warnings():
            manager = exir.to_edge_transform_and_lower(
                graph, partitioner=guard_partitioners(asked), constant_methods={METHOD: metadata.to_text()}
            )
        _check_sizes(manager, own)
        _restore_ranges(manager)
        if wrong := misread(manager):
            raise ValueError(f"{wrong} is read by a delegate and by others, which would take its integers for floats")
        _begin_states(manager)
        delegation = replace(delegation_of(program, own, manager, refusals), sizes=fixed_sizes(program, own))
        with quiet():
            content = manager.to_executorch().buffer
    except QuantcError:
        raise
    except Exception as error:  # whatever ExecuTorch and its delegates raise, of any kind
        raise QuantcError(
            f"ExecuTorch cannot lower {program.name}: {str(error).strip().partition(chr(10))[0]}",
            where="\n    ".join([f"{type(error).__name__} in executorch.exir", *_details(error)]),
            advice="leave the op it names float by config, or give other partitioners=",
        ) from error
    made = Pte(
        bytes(content),
        metadata,
        where=f"{program.name} for ExecuTorch",
        signature=own.signature,
        delegation=delegation,
        outputs=outputs_of(own),
    )
    if partitioners is None:
        _check_runs(made, own)
    return made


def pipeline_for(program: Program, given: Pipeline | str | None, without: Sequence[str]) -> Pipeline:
    """The pipeline given; or the default one, without passes that options exclude, or that a float program cannot run."""
    default = Pipeline.parse(EXECUTORCH.pipeline)
    if given is not None and (asked := Pipeline.of(given)) != default:
        return asked
    return Pipeline(tuple(step for step in default if step.name not in without and step.needs <= program.stage))


def fixed_sizes(program: Program, own: Program) -> str:
    """The sizes that are open in a program and fixed in what became of it, as text; empty if there are none."""
    found: dict[str, int] = {}
    for before, after in zip(program.signature.inputs, own.signature.inputs, strict=True):
        if before.type is not None and after.type is not None:
            pairs = zip(before.type.shape, after.type.shape, strict=True)
            found |= {size: now for size, now in pairs if size in program.signature.opened and isinstance(now, int)}
    listed = ", ".join(f"{symbol} is fixed to {size}" for symbol, size in found.items())
    return f"{listed}, as in the example inputs" if listed else ""


def _partitioners(given: Any) -> list[Any]:
    """Those that are given; an error unless they can be asked what ExecuTorch asks them first."""
    listed = list(given) if isinstance(given, Iterable) else [given]
    odd = [each for each in listed if not hasattr(each, "ops_to_not_decompose")]
    if odd:
        raise RefusedError(
            f"{odd[0]!r} is no partitioner",
            where='qc.lower(program, "executorch", partitioners=...)',
            advice="give a list of executorch.exir.backend.partitioner.Partitioner; [] leaves everything to ExecuTorch's own kernels",
        )
    return listed


def _details(error: Exception) -> list[str]:
    """Lines that an exporter lists below its first one: the sizes that it does not allow."""
    return [line.strip() for line in str(error).splitlines()[1:] if line.startswith("  - ")]


def _check_runs(made: Pte, program: Program) -> None:
    """Run it once. ExecuTorch lowers ops for which its kernels then have no such form, as convolutions over three axes."""
    try:
        made.try_out(examples_of(program))
    except QuantcError as error:
        others = made.delegation().others
        raise QuantcError(
            f"ExecuTorch lowers {program.name} and cannot run it: {error.what}",
            where=f"on its own kernels: {', '.join(others)}" if others else "in the delegate",
            advice="write what its kernels do not take otherwise in the model, or run the program by qc.lower(program, 'x86')",
        ) from error


def _check_sizes(manager: Any, program: Program) -> None:
    """Sizes that vary still do. For some ops ExecuTorch settles on those of the example inputs, and says nothing."""
    lowered = manager.exported_program()
    kinds = {node.name: node.meta.get("val") for node in lowered.graph.find_nodes(op="placeholder")}
    given = [item for item in program.signature.inputs if not item.is_constant]
    for name, item in zip(lowered.graph_signature.user_inputs, given, strict=True):
        sizes = item.type.shape if item.type is not None else ()
        pairs = zip(sizes, kinds[name].shape, strict=True) if sizes else ()
        fixed = [size for size, now in pairs if isinstance(size, str) and is_concrete_int(now)]
        if fixed:
            raise QuantcError(
                f"ExecuTorch fixes {', '.join(fixed)} of input {item.name!r}, which may vary, to that of the example inputs",
                where=f"{program.name}: an op whose result has another size for it",
                advice="capture it without dynamic_shapes=, once for each size, or write the op that depends on the size otherwise",
            )


def _begin_states(manager: Any) -> None:
    """Let buffers that are written to begin with their values. ExecuTorch stores none otherwise, and begins with zeros."""
    program = manager.exported_program()
    signature = program.graph_signature
    written = set(signature.buffers_to_mutate.values())
    for node in program.graph.find_nodes(op="placeholder"):
        if signature.inputs_to_buffers.get(node.target) in written:
            node.meta["et_init_buffer"] = True


def _restore_ranges(manager: Any) -> None:
    """Restore the exported size ranges. Meanwhile torch asks for the fastest convolution at the example sizes, and
    records the answer as a bound: memory would be reserved for no more than 15 images.
    """
    program = manager.exported_program()
    for node in program.graph.find_nodes(op="placeholder"):
        for size in getattr(node.meta.get("val"), "shape", ()):
            if isinstance(size, torch.SymInt):
                size.node.shape_env.var_to_range.update(program.range_constraints)


def _check_form(program: Program) -> None:
    check_quantized(program, "a .pte")
    quantizer = program.plan.quantizer
    if quantizer is not None and quantizer.name != TARGET:
        warnings.warn(
            f"{program.name} was quantized for {quantizer.name}: what that leaves float between two ops the delegate "
            f'computes in float; quantize it with backend="{TARGET}"',
            stacklevel=4,
        )
