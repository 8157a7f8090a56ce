"""`prepare` and `convert` of the dynamic tracing flow, and what one can ask of such a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import fx, nn

from quantc import pipelines
from quantc.annotate.quantizer import mode_config, quantizer_of
from quantc.capture.constant_names import name_literals
from quantc.capture.leaf_modules import leaf_selector
from quantc.capture.runtime.call_tracing import tensors_in
from quantc.config.config import QuantConfig
from quantc.errors import AnnotationError, CaptureError, InputError, QuantcError, UnknownNameError
from quantc.flows.tracing.auto_trace import (
    Intercepted,
    InterceptedLeaf,
    add_auto_convert,
    add_auto_observation,
    own_class,
)
from quantc.flows.tracing.call_sites import FIRST_CHILD, Context
from quantc.flows.tracing.copies import changed_names, copy_model, take_back
from quantc.flows.tracing.fused_ops import CallFacts
from quantc.flows.tracing.fusion_groups import FOLDED, Units
from quantc.flows.tracing.quantization_state import AutoQuantizationState
from quantc.flows.tracing.recording import Recording
from quantc.flows.tracing.run import STATE, Bound
from quantc.flows.tracing.trace import Phase, Trace
from quantc.flows.tracing.weights import digests
from quantc.ir.decisions import FLOAT
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.passes.canonicalize import Canonicalize
from quantc.pipeline.pipeline import Pipeline
from quantc.targets.kernels.kernel_table import KERNELS
from quantc.verbs.convert import convert as convert_program
from quantc.verbs.prepare import prepare as prepare_program
from quantc.verify.finite_constants import refuse_unsound_module

if TYPE_CHECKING:
    from quantc.inspect.coverage import Coverage, Row
    from quantc.inspect.explain import NodeExplanation

Mode = Literal["static", "dynamic", "weight-only"]


def prepare(
    model: nn.Module,
    example_inputs: Any,
    backend: Any = "x86",
    *,
    config: QuantConfig | None = None,
    qat: bool = False,
    mode: Mode = "static",
    allow_empty: bool = False,
    leaf: str | type[nn.Module] | Iterable[str | type[nn.Module]] = (),
) -> nn.Module:
    """A copy of a model that is ready to be calibrated: call it with data, then `convert` it.

    `example_inputs` is a tensor, a tuple of arguments, a dict of keywords, or a list of such examples: each is run once,
    and the ways that the model takes with them are those it may take later. No line of the model is rewritten, and any
    Python in it works. `backend`, `config` and `qat` are those of `qc.prepare`; `mode` is that of `qc.quantize`. `leaf` is
    that of `qc.capture`: modules, by name or class, that run in float as they are, and may do in them what they like. With `qat` the
    copy is in training mode; modules that are in eval mode in a model that is in training mode stay so.
    """
    examples = examples_in(example_inputs)
    _refuse_prepared(model)
    own = copy_model(model)
    quantizer = quantizer_of(backend)
    trace = Trace(Context("", FIRST_CHILD), _target(quantizer.name))
    frozen = [module for module in own.modules() if not module.training] if own.training else []
    if not qat and own.training:
        raise CaptureError(
            f"{type(model).__name__} is in training mode",
            where="static quantization is for inference",
            advice="call model.eval() first, or give qat=True",
        )
    own.eval()
    leaves = leaf_selector(own, leaf)
    whole = [name for name, module in own.named_modules() if name and leaves.selects(module, name)] if leaf else []
    recording = add_auto_observation(own, examples, trace, whole)
    written = recording.recorder.written() | changed_names(own, model)
    take_back(own, model)
    _say_what_threads_did(recording)
    _note_what_is_not_followed(recording)
    trace.captured = _program_of(recording, type(model).__name__)
    trace.trees = recording.trees
    calls = _with_what_computes(recording.facts(trace.captured), trace.captured)
    trace.calls, trace.reasons = calls, _why_not_stable(recording)
    asked = mode_config(quantizer, mode) + (config or QuantConfig()) if mode != "static" else config or QuantConfig()
    trace.recipe = partial(
        _prepare_captured,
        calls=trace.calls,
        backend=backend,
        config=_with_whole_calls(trace.captured, trace, asked),
        qat=qat,
        allow_empty=allow_empty,
    )
    trace.decided(trace.recipe(trace.captured), Phase.TRAINING if qat else Phase.OBSERVING)
    for name in sorted(written.intersection(trace.weights)):
        raise recording.recorder.changed(name)
    if qat:
        _train_together(own, trace)
    else:
        trace.made_of = _weight_digests(own, trace)
    _refuse_many_at_once(recording, trace)
    _find_idle(own, trace)
    own.train(qat)  # whatever a train() of the user's own gives
    for module in frozen:  # the user has put them in eval mode in a model that trains
        module.training = False
    return own


def _refuse_prepared(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, Intercepted):
            raise CaptureError(
                f"{name or 'the model'} ({type(module).__name__}) was prepared or converted by this flow already",
                where=name or type(model).__name__,
                advice="prepare the whole model once, with the float module in its place",
            )


def _prepare_captured(
    captured: Program, *, calls: Sequence[CallFacts], backend: Any, config: QuantConfig, qat: bool, allow_empty: bool
) -> Program:
    """Prepare a captured program. Nodes that no call can run stay float, since their operands are never observed."""
    given = _to_be_trained(captured) if qat else captured
    while True:
        try:
            program = prepare_program(given, backend, config=config, qat=qat, allow_empty=allow_empty)
        except AnnotationError as error:
            if error.advice:  # there is no program for the user to ask
                error.advice = error.advice.replace("prepared.explain(node)", "explain(prepared, node) of this flow")
            raise
        units = Units(program, calls)
        units.build()
        if not units.lost:
            return program
        for name in units.lost:
            config = config.set_node(name, FLOAT)


def _to_be_trained(captured: Program) -> Program:
    """A program that may be trained, whatever was left out of it: Python does that, in the mode that the model is in."""
    made = captured.clone()
    made.inference_only = ()
    return made


def _say_what_threads_did(recording: Recording) -> None:
    if recording.elsewhere:
        names = sorted(recording.elsewhere)
        recording.recorder.reasons.append(f"{names[0]} is called in a thread that the model starts")
        warnings.warn(
            f"{', '.join(names[:5])}{' …' if len(names) > 5 else ''}: called in threads that the model starts itself, where "
            "calls are not intercepted; they run in float, and coverage does not count them",
            stacklevel=3,
        )


def _refuse_many_at_once(recording: Recording, trace: Trace) -> None:
    for number, place in recording.many_at_once.items():
        if number in trace.units:
            raise CaptureError(
                f"{place} is called within torch.vmap or another transform of torch.func, and would be quantized",
                where=place,
                advice="call it on the whole batch; or leave it float: config=QuantConfig().set(name, FLOAT)",
            )


def _train_together(model: nn.Module, trace: Trace) -> None:
    """Let the model and its program have the same parameters and buffers, and go into one mode together."""
    trace.tie(dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False)))
    state_of(model).add_module("trained", trace.held.root)


def _weight_digests(model: nn.Module, trace: Trace) -> dict[str, str]:
    """Digests of the weights that a model's program was just made of, by name."""
    rows = [row for unit in trace.units.values() for pairs in unit.derived.values() for _, row in pairs]
    return digests(model, trace.weights) | {row.key: row.digest for row in rows}


def examples_in(given: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments and keywords of each example."""
    rows = given if isinstance(given, list) else [given]
    if not rows:
        raise InputError("no examples", where="example_inputs", advice="give at least one")
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for row in rows:
        if isinstance(row, dict):
            found.append(((), row))
        else:
            found.append((row if isinstance(row, tuple) else (row,), {}))
    return found


def _target(name: str) -> str:
    """The target whose kernels run the ops of a backend, by name."""
    if name in KERNELS:
        return name
    raise UnknownNameError(
        f"there are no kernels for {name!r}, and this flow runs its ops one by one on kernels",
        where=f"backend={name!r}",
        advice=f"take one of {', '.join(sorted(KERNELS))}, or capture the model: qc.capture, qc.prepare, qc.lower",
    )


def _program_of(recording: Recording, name: str) -> Program:
    program = recording.recorder.program(name, tensors_in(recording.last))
    Pipeline((Canonicalize(),)).run(program)
    name_literals(program)
    return program


def _note_what_is_not_followed(recording: Recording) -> None:
    if recording.made_of_nothing:
        recording.recorder.reasons.append(
            f"{recording.made_of_nothing} makes a tensor of nothing, which may be another one next time"
        )
    if not recording.gives_tensors:
        recording.recorder.reasons.append("the model gives values other than tensors")


def _why_not_stable(recording: Recording) -> tuple[str, ...]:
    repeated = [f"{call.name} was called {call.times} times" for call in recording.recorder.calls if call.times > 1]
    return tuple(dict.fromkeys([*recording.recorder.reasons, *repeated]))


def _with_what_computes(calls: tuple[CallFacts, ...], captured: Program) -> tuple[CallFacts, ...]:
    """Tell calls that do nothing, and so are nothing in the tidy program, from those that are folded into others later."""
    tidy = pipelines.inference().without("fuse").run_on_copy(captured)
    there = {number: {op_name(node) for node in nodes} for number, nodes in Units(tidy, calls).of_call.items()}
    return tuple(
        replace(call, computes=call.number in there, may_fold=there.get(call.number, set()) <= FOLDED) for call in calls
    )


def _with_whole_calls(captured: Program, trace: Trace, config: QuantConfig) -> QuantConfig:
    """Leave float what one call of the model became several ops of: they cannot be run apart."""
    tidy = pipelines.inference().run_on_copy(captured)
    for name in Units(tidy, trace.calls).several():
        config = config.set_node(name, FLOAT)
    return config


def _find_idle(model: nn.Module, trace: Trace) -> None:
    """Modules in which nothing is quantized, observed or rounded are not looked into."""
    calls_seen_to = trace.units.keys() | trace.watched.keys() | trace.rounding.keys()
    busy = {
        site.leaf for context in trace.context.walk() for site in context.ops.values() if site.number in calls_seen_to
    }
    for name, module in model.named_modules():
        if issubclass(type(module), InterceptedLeaf) and name not in busy and not module._parameters:
            module.__class__ = own_class(type(module))
        if STATE not in module._modules:
            continue
        state = state_of(module)
        within = [child for child in module.modules() if isinstance(child, AutoQuantizationState)]
        calls = [site for child in within for site in child.calls]
        seen = any(site.number in calls_seen_to or site.is_product for site in calls)
        # one that calls nothing may stand inside of a fused op, and hands on what waits there
        does_nothing = bool(calls) and not seen and bool(state.path) and not any(True for _ in module.parameters())
        state.is_idle = state.is_whole or does_nothing


def state_of(model: nn.Module) -> AutoQuantizationState:
    """The state of a model that was prepared or converted by this flow."""
    found = model._modules.get(STATE)
    if not isinstance(found, AutoQuantizationState):
        raise QuantcError(
            f"{type(model).__name__} was not prepared by this flow",
            where="quantc.flows.tracing",
            advice="call prepare(model, example_inputs) first",
        )
    return found


def convert(prepared: nn.Module) -> nn.Module:
    """The quantized model: a copy of a calibrated model, whose quantizable ops run on int8 kernels."""
    trace = state_of(prepared).trace
    if trace.phase is Phase.CONVERTED:
        raise QuantcError("the model is converted already", advice="convert what prepare gave")
    refuse_unsound_module(prepared)
    Bound(trace, prepared, "")  # which looks at the weights
    quantized = convert_program(trace.held)
    own = copy_model(prepared)
    own.eval()
    was_trained = trace.phase is Phase.TRAINING
    made = add_auto_convert(own, state_of(own).trace, quantized)
    if was_trained:
        state_of(own).trace.made_of = digests(own, state_of(own).trace.weights)
    _find_idle(made, state_of(made).trace)
    return made


def to_program(model: nn.Module) -> Program:
    """The recorded calls as a normal Program, to prepare or lower like any other. Raises CaptureError if the trace is not stable: if
    Python branched on numbers, or a call was made more than once from one site."""
    trace = state_of(model).trace
    if trace.reasons:
        raise CaptureError(
            f"the trace of {type(model).__name__} is not stable: {trace.reasons[0]}",
            where="; ".join(trace.reasons[:5]),
            advice="use the model as it is: convert(prepared)",
        )
    program = trace.held.clone()
    for reason in trace.captured.inference_only if trace.captured is not None else ():
        program.note_inference_only(reason)
    in_spec, out_spec = trace.trees or (program.signature.in_spec, program.signature.out_spec)
    program.signature = replace(program.signature, in_spec=in_spec, out_spec=out_spec)
    program.touch()
    return program


def coverage(model: nn.Module) -> Coverage:
    """The outcome of every op that was recorded, also of those in no graph."""
    trace = state_of(model).trace
    found = trace.held.coverage()
    return replace(found, rows=(*found.rows, *_whole_calls(trace)))


def _whole_calls(trace: Trace) -> Iterator[Row]:
    """The calls that have no form in ATen, as that of an LSTM on a packed sequence: they run in float."""
    from quantc.annotate.reasons import Why
    from quantc.inspect.coverage import Row, Verdict

    for call in trace.calls:
        if not any(name.startswith("made_") for name in call.makes) or call.number not in trace.sites:
            continue
        site = trace.sites[call.number]
        macs = None if any(call.parameters) else 0
        reason = f"{call.name} has no form in ATen on what it is given, so it runs as it is"
        yield Row(
            f"{call.name}@{call.number}", call.name, Verdict.FLOAT, "", "", "", Why.OPAQUE, reason, site.leaf, site.where, macs, 0,
        )  # fmt: skip


def explain(model: nn.Module, node: fx.Node | str) -> NodeExplanation:
    """The outcome of one op, and its reasons."""
    return state_of(model).trace.held.explain(node)


__all__ = ["convert", "coverage", "explain", "prepare", "to_program"]
