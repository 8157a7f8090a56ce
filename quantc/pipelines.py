"""The named pipelines, as values to print, change and run: `pipelines.inference().without("fuse")`.

Each is also known to pipeline text by its name, and its parameters are options there.
"""

from typing import Any, Literal, get_args

from quantc.annotate.quantizer import Quantizer, finishing_passes, quantizer_of
from quantc.config.config import QuantConfig
from quantc.errors import QuantcError, suggest
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.pipeline.pipeline import Pass, Pipeline
from quantc.spec.arithmetic import MultiplierChoice
from quantc.targets.target import TARGETS


def inference() -> Pipeline:
    """Tidy a model for inference: one spelling for each op, no dropout, constants folded, written activations and batch
    norms fused."""
    return Pipeline.parse(
        "sink-constants,canonicalize,strip-dropout,fold-constants,fuse-activations,fuse,eliminate-dead"
    )


def prepare(backend: Any, config: QuantConfig | None = None, allow_empty: bool = False) -> Pipeline:
    """The pipeline of `qc.prepare`: tidy for inference, decompose as the backend asks, annotate, share."""
    return inference().then(*_decide(quantizer_of(backend), config, allow_empty))


def training(backend: Any, config: QuantConfig | None = None, allow_empty: bool = False) -> Pipeline:
    """The pipeline of `qc.prepare(..., qat=True)`: as `prepare`, keeping what training needs; then fake quantizers."""
    from quantc.passes.fold_constants import FoldConstants
    from quantc.passes.insert_fake_quantize import InsertFakeQuantize
    from quantc.qat.dropout import through_dropout

    keep = FoldConstants(parameters="keep")
    steps = _decide(through_dropout(quantizer_of(backend)), config, allow_empty)
    kept = (keep if isinstance(step, FoldConstants) else _with_dropout(step) for step in steps)
    fake = InsertFakeQuantize(untrained="allow" if allow_empty else "refuse")
    tidy = Pipeline.parse("sink-constants{purpose=training},canonicalize").then(keep)
    return tidy.then(Pipeline.parse("fuse-activations,detach-norms,eliminate-dead"), *kept, fake)


def _with_dropout(step: Pass) -> Pass:
    from quantc.passes.decompose_attention import DecomposeAttention

    return step.model_copy(update={"dropout": "keep"}) if isinstance(step, DecomposeAttention) else step


def _decide(quantizer: Quantizer, config: QuantConfig | None, allow_empty: bool) -> tuple[Pass, ...]:
    """Take apart what the backend wants in parts, annotate, share."""
    from quantc.passes.annotate import Annotate
    from quantc.passes.share import Share

    annotate = Annotate(
        backend=quantizer, config=config if config is not None else QuantConfig(), allow_empty=allow_empty
    )
    transforms = (step.for_config(annotate.config) for step in quantizer.transforms())
    return (*transforms, annotate, Share())


def recover() -> Pipeline:
    """The pipeline of `qc.recover`: leave ops float whose grids cost more than they gain; then fit the scales of weights to
    what their layers read, then the weights, then the biases."""
    return Pipeline.parse("leave-float,rescale,round,correct-bias")


def convert(backend: Any = None, reduce_range: RangeReduction = "auto") -> Pipeline:
    """The pipeline of `qc.convert`: carry out the plan, merge duplicate Q/DQ, store weights quantized; then the
    backend's finishing passes and the accumulator proof. `reduce_range` is that of `quantize`."""
    from quantc.passes.prove_accumulators import ProveAccumulators

    _check("reduce_range", reduce_range, get_args(RangeReduction))
    last = finishing_passes(quantizer_of(backend)) if backend is not None else ()
    return Pipeline.parse(f"quantize{{reduce-range={reduce_range}}},dedup-qdq,fold").then(*last, ProveAccumulators())


Style = Literal["fused", "decomposed"]


def integer(multiplier: MultiplierChoice = "target", style: Style = "fused") -> Pipeline:
    """The pipeline of `qc.convert(prepared, to="integer")` after `quantize` and `fold`: integer ops in place of Q/DQ;
    with the style "decomposed", ATen primitives in place of those. `multiplier` overrides that of the target."""
    _check("multiplier", multiplier, get_args(MultiplierChoice))
    _check("style", style, get_args(Style))
    written = "decompose-integer," if style == "decomposed" else ""
    return Pipeline.parse(f"lower-integer{{multiplier={multiplier}}},{written}eliminate-dead")


def lower(target: str = "x86") -> Pipeline:
    """The pipeline of `qc.lower`, from a converted program to a target: see `quantc.targets.target.Target.pipeline`."""
    return Pipeline.parse(TARGETS[target].pipeline)


def _check(option: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise QuantcError(
            f"unknown {option} {given!r}",
            where=f"{option}={given!r}",
            advice=suggest(str(given), known, noun=f"values of {option}"),
        )
