"""`prepare` and `convert` of the dynamic tracing flow, and what one can ask of such a model."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import fx, nn

from quantc import api, pipelines
from quantc.capture.literals import name_literals
from quantc.capture.tracing import tensors_in
from quantc.config import QuantConfig
from quantc.errors import CaptureError, InputError, QuantcError, UnknownNameError
from quantc.flows.tracing.auto_trace import InterceptedLeaf, add_auto_convert, add_auto_observation, own_class
from quantc.flows.tracing.call_sites import FIRST_CHILD, Context
from quantc.flows.tracing.grouping import Units
from quantc.flows.tracing.quantization_state import STATE, AutoQuantizationState
from quantc.flows.tracing.recording import Recording
from quantc.flows.tracing.trace import Phase, Trace
from quantc.flows.tracing.units import CallFacts
from quantc.kernels.table import KERNELS
from quantc.outcomes import FLOAT
from quantc.passes.canonicalize import Canonicalize
from quantc.pipeline import Pipeline
from quantc.program import Program, attribute
from quantc.quantizer import mode_config, quantizer_of

if TYPE_CHECKING:
    from quantc.inspect.coverage import Coverage
    from quantc.inspect.explain import Explanation

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
) -> nn.Module:
    """A copy of a model that is ready to be calibrated: call it with data, then `convert` it.

    `example_inputs` is a tensor, a tuple of arguments, a dict of keywords, or a list of such examples: each is run once,
    and the ways that the model takes with them are those it may take later. No line of the model is rewritten, and any
    Python in it works. `backend`, `config` and `qat` are those of `qc.prepare`; `mode` is that of `qc.quantize`.
    """
    examples = _examples(example_inputs)
    own = copy.deepcopy(model)
    quantizer = quantizer_of(backend)
    trace = Trace(Context("", FIRST_CHILD), _target(quantizer.name))
    training = own.training
    if not qat and training:
        raise CaptureError(
            f"{type(model).__name__} is in training mode",
            where="static quantization is for inference",
            advice="call model.eval() first, or give qat=True",
        )
    own.eval()
    recording = add_auto_observation(own, examples, trace)
    trace.captured = _captured(recording, type(model).__name__)
    trace.trees = recording.trees
    trace.calls, trace.reasons = _with_what_computes(recording.facts(), trace.captured), _why_not_stable(recording)
    asked = mode_config(quantizer, mode) + (config or QuantConfig()) if mode != "static" else config or QuantConfig()
    asked = _with_whole_calls(trace.captured, trace, asked)
    prepared = api.prepare(trace.captured, backend, config=asked, qat=qat, allow_empty=allow_empty)
    while apart := Units(prepared, trace.calls).apart():
        for node in apart:
            asked = asked.set_node(node, FLOAT)
        prepared = api.prepare(trace.captured, backend, config=asked, qat=qat, allow_empty=allow_empty)
    if qat:
        _train_together(own, prepared)
    trace.decided(prepared, Phase.TRAINING if qat else Phase.OBSERVING)
    _find_idle(own, trace)
    return own.train(qat)


def _train_together(model: nn.Module, program: Program) -> None:
    """Let the model and its program have the same parameters and buffers, and go into one mode together."""
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if attribute(program.root, name) is not None:
            owner, _, last = name.rpartition(".")
            program.root.get_submodule(owner)._parameters[last] = tensor
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if attribute(program.root, name) is not None:
            owner, _, last = name.rpartition(".")
            program.root.get_submodule(owner)._buffers[last] = buffer
    program.touch()
    _state(model).add_module("trained", program.root)


def _examples(given: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    rows = given if isinstance(given, list) else [given]
    if not rows:
        raise InputError("there are no examples", where="example_inputs", advice="give at least one")
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for row in rows:
        if isinstance(row, dict):
            found.append(((), row))
        else:
            found.append((row if isinstance(row, tuple) else (row,), {}))
    return found


def _target(name: str) -> str:
    """Whose kernels run the ops of a quantizer's backend."""
    if name in KERNELS:
        return name
    raise UnknownNameError(
        f"there are no kernels for {name!r}, and this flow runs its ops one by one on kernels",
        where=f"backend={name!r}",
        advice=f"take one of {', '.join(sorted(KERNELS))}, or capture the model: qc.capture, qc.prepare, qc.lower",
    )


def _captured(recording: Recording, name: str) -> Program:
    program = recording.recorder.program(name, tensors_in(recording.last))
    Pipeline((Canonicalize(),)).run(program)
    name_literals(program)
    return program


def _why_not_stable(recording: Recording) -> tuple[str, ...]:
    if recording.made_of_nothing:
        recording.recorder.reasons.append(
            f"{recording.made_of_nothing} makes a tensor of nothing, which may be another one next time"
        )
    if not recording.gives_tensors:
        recording.recorder.reasons.append("the model gives values other than tensors")
    repeated = [f"{call.name} was called {call.times} times" for call in recording.recorder.calls if call.times > 1]
    return tuple(dict.fromkeys([*recording.recorder.reasons, *repeated]))


def _with_what_computes(calls: tuple[CallFacts, ...], captured: Program) -> tuple[CallFacts, ...]:
    """Tell calls that do nothing, and so are nothing in the tidy program, from those that are folded into others later."""
    tidy = pipelines.inference().without("fuse").run_on_copy(captured)
    there = Units(tidy, calls).of_call
    return tuple(replace(call, computes=call.number in there) for call in calls)


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
        state = _state(module)
        within = [child for child in module.modules() if isinstance(child, AutoQuantizationState)]
        calls = [site for child in within for site in child.calls]
        seen = any(site.number in calls_seen_to or site.is_product for site in calls)
        # one that calls nothing may stand inside of a fused op, and hands on what waits there
        state.is_idle = bool(calls) and not seen and bool(state.path) and not any(True for _ in module.parameters())


def _state(model: nn.Module) -> AutoQuantizationState:
    found = model._modules.get(STATE)
    if not isinstance(found, AutoQuantizationState):
        raise QuantcError(
            f"{type(model).__name__} was not prepared by this flow",
            where="quantc.flows.tracing",
            advice="call prepare(model, example_inputs) first",
        )
    return found


def convert(prepared: nn.Module) -> nn.Module:
    """The quantized model: a copy of what was prepared and calibrated, whose quantizable ops run on int8 kernels."""
    trace = _state(prepared).trace
    if trace.phase is Phase.CONVERTED:
        raise QuantcError("the model is converted already", advice="convert what prepare gave")
    quantized = api.convert(trace.held)
    own = copy.deepcopy(prepared)
    own.eval()
    made = add_auto_convert(own, _state(own).trace, quantized)
    _find_idle(made, _state(made).trace)
    return made


def to_program(model: nn.Module) -> Program:
    """The recorded calls as a normal Program, to prepare or lower like any other. CaptureError if the trace is not
    stable: if Python looked at numbers, or a call was made more than once from one place."""
    trace = _state(model).trace
    if trace.reasons:
        raise CaptureError(
            f"the trace of {type(model).__name__} is not stable: {trace.reasons[0]}",
            where="; ".join(trace.reasons[:5]),
            advice="use the model as it is: convert(prepared)",
        )
    program = trace.held.clone()
    in_spec, out_spec = trace.trees or (program.signature.in_spec, program.signature.out_spec)
    program.signature = replace(program.signature, in_spec=in_spec, out_spec=out_spec)
    program.touch()
    return program


def coverage(model: nn.Module) -> Coverage:
    """What became of every op that was seen."""
    return _state(model).trace.held.coverage()


def explain(model: nn.Module, node: fx.Node | str) -> Explanation:
    """What became of one op, and why."""
    return _state(model).trace.held.explain(node)


__all__ = ["convert", "coverage", "explain", "prepare", "to_program"]
