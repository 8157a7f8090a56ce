"""`qc.lower(program, "x86", engine=...)`."""

from __future__ import annotations

from functools import partial
from typing import Any

from quantc.errors import QuantcError, RefusedError
from quantc.ir.program import Program, check_program
from quantc.pipeline.pipeline import Pipeline, hooks_of
from quantc.targets.engines.engine_module import OnEngine
from quantc.targets.engines.engine_selection import Chosen, choose
from quantc.targets.engines.engine_table import AUTO, ENGINES, TORCH, engine_of
from quantc.targets.kernels.lowered import Lowered, lower
from quantc.targets.provenance import check_quantized
from quantc.targets.target_table import ONNX


def lower_x86(
    program: Program | Lowered, *, engine: str = TORCH, threads: int | None = None, **options: Any
) -> Lowered | OnEngine | Chosen:
    """Lower a quantized program to x86, on an engine.

    `engine="torch"` uses torch's kernels, which `options` are for (`quantc.targets.kernels.lowered.lower`).
    "onnxruntime" and "openvino" read the program as ONNX; each needs its extra. `engine="auto"` builds all that are
    installed, times them on the program's example inputs, and keeps the fastest of those that agree with the Q/DQ form
    as closely as torch's kernels do; `print` shows the measurements.

    An engine outside torch has the pipeline of "onnx"; `pipeline=` and `hooks=` change and watch it. With "auto" they
    are for torch's kernels.

    `threads` is the number of threads of an engine outside torch; by default as many as torch.
    """
    _check_threads(threads, engine)
    if engine == TORCH:
        return lower(program, "x86", **options)
    if isinstance(program, Lowered):
        raise QuantcError(
            f"{program.headline}: engines outside torch read the Q/DQ form",
            where=f'qc.lower(..., "x86", engine={engine!r})',
            advice="give what qc.convert(prepared) gave",
        )
    check_program(program, "lower", "qc.convert(prepared), or take result.program of qc.quantize(...),")
    if engine != AUTO:
        steps = Pipeline.of(options.pop("pipeline", None) or ONNX.pipeline)
        program = steps.left_for(program).run_on_copy(program, hooks_of(options.pop("hooks", ())))
    if options and engine != AUTO:
        raise QuantcError(
            f"{', '.join(options)}: these are options of torch's kernels",
            where=f'qc.lower(..., "x86", engine={engine!r})',
            advice='leave them out, or give engine="torch"',
        )
    if engine != AUTO:
        found = engine_of(engine)
        check_quantized(program, engine)
        return OnEngine(program, found, threads)
    check_quantized(program, "an engine outside torch")
    reasons = {name: why for name, each in ENGINES.items() if (why := each.why_not()) is not None}
    own = program.clone()
    makers = {TORCH: partial(lower, program, "x86", **options)} | {
        name: partial(OnEngine, own, each, threads) for name, each in ENGINES.items() if name not in reasons
    }
    return choose(program, makers, reasons)


def _check_threads(threads: Any, engine: str) -> None:
    if threads is not None and (type(threads) is not int or threads < 1):
        raise RefusedError(
            f"threads is {threads!r}",
            where=f'qc.lower(..., "x86", engine={engine!r}, threads={threads!r})',
            advice="give a whole number of at least 1, or leave it out for as many as torch uses",
        )
