"""`AutoQuantizationState`: what is known of one module, attached to it as a child, and the hooks around its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantc.capture.runtime.call_tracing import tensors_in
from quantc.errors import InputError, QuantcError
from quantc.flows.tracing.call_sites import END, Context, Key, OpSite, source_of_call
from quantc.flows.tracing.functions import is_product, mode_argument, writes_first
from quantc.flows.tracing.fused_calls import Stage, advance
from quantc.flows.tracing.fused_ops import Unit, reach
from quantc.flows.tracing.run import Run
from quantc.flows.tracing.slicing import subgraph
from quantc.flows.tracing.trace import Phase, Trace, UnseenOpError
from quantc.flows.tracing.traced_tensor import call_on_floats, floats_of, handed_over, on_floats, value_of
from quantc.flows.tracing.weights import digest

if TYPE_CHECKING:
    from quantc.ir.program import Program
    from quantc.spec.observation import Observation

CONTENT = "content"
"""The name of the tensor that holds, as bytes, what no other tensor does: statistics, or the quantized program."""


def _is_same(left: Any, right: Any) -> bool:
    """True if a non-tensor argument is the recorded one. A tensor in its place is not."""
    return left is right or (not isinstance(left, Tensor) and type(left) is type(right) and bool(left == right))


class AutoQuantizationState(nn.Module):
    """The quantization state of its parent module: the ops that were seen in it, what is observed of them, and what runs
    in their place. All states of a model share one trace."""

    def __init__(self, trace: Trace, path: str, kind: str, *, is_whole: bool = False) -> None:
        super().__init__()
        self.trace = trace
        self.path = path
        self.kind = kind
        """The class of the module."""
        self.contexts: list[Context] = []
        """The module as it is called from each place."""
        self.is_whole = is_whole
        """True for a leaf module of the user's: one call, not traced into."""
        self.is_idle = is_whole
        """True if nothing in the module can be quantized, so that its calls are not intercepted."""
        self.arriving: dict[str, Tensor] = {}
        """The weights in the state dict that is being loaded, by name."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse a call of the state: callers that iterate over `_modules` find it there, beside the model's own modules."""
        raise QuantcError(
            f"{self.path or 'the model'} calls all that it finds in _modules, where the state of this flow is too",
            where=f"{self.path or 'the model'} ({self.kind})",
            advice="go through children() or named_children(), which leave it out",
        )

    # -- what it holds ---------------------------------------------------------------------------------------------

    @property
    def first_call(self) -> bool:
        """True while calls are captured; later they are observed, trained, or run quantized."""
        return self.trace.phase is Phase.TRACING

    @property
    def calls(self) -> list[OpSite]:
        """The places in the module where torch functions are called, in the order in which they were first seen."""
        sites = {site.number: site for context in self.contexts for site in context.ops.values()}
        return [sites[number] for number in sorted(sites)]

    @property
    def units(self) -> list[Unit]:
        """The quantized ops of the module."""
        found = [self.trace.units[site.number] for site in self.calls if site.number in self.trace.units]
        return list({id(unit): unit for unit in found}.values())

    @property
    def subgraphs(self) -> list[Program]:
        """The ops that were seen in the module, as programs: one for each place that it is called from."""
        return [
            subgraph(self.trace.held, {site.number for site in context.ops.values()}, f"{self.path}@{index}")
            for index, context in enumerate(self.contexts)
            if any(site.number in self.trace.units for site in context.ops.values())
        ]

    @property
    def observers(self) -> dict[str, Observation]:
        """The statistics of the tensors of the module's ops, by group."""
        plan = self.trace.held.plan
        names = {unit_node for unit in self.units for unit_node in unit.own}
        groups = [group for group in plan.groups if any(site.node in names for site in group.places)]
        return {group.name: plan.statistics[group.name] for group in groups if group.name in plan.statistics}

    @property
    def fake_quants(self) -> dict[str, nn.Module]:
        """The fake quantizers of training, by name."""
        from quantc.ir.program import TRAINED

        holder = self.trace.held.root._modules.get(TRAINED)
        names = {name for unit in self.units for name in unit.fake_quantizers(self.trace.held)}
        return {name: module for name, module in holder.named_children() if name in names} if holder else {}

    # -- which calls, and whether they are those that were seen ------------------------------------------------------

    def cur_op_needs_hooks(self, func: Callable[..., Any]) -> bool:
        """True if a function may be quantized; all others run unchanged."""
        return self.trace.kind_of(func).value == "may be quantized"

    def validate_cur_op(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], key: Key, run: Run
    ) -> OpSite | None:
        """The place of a call, if it is one that was seen. UnseenOpError if the model went another way to it, or never
        was there, and it is one that is quantized."""
        frame = run.frame
        site = frame.context.ops.get(key) if frame.context is not None else None
        if site is None:
            if is_product(func, args, kwargs) and not run.is_left_float(key[0]):
                raise self.unseen(getattr(func, "__name__", str(func)), run, key[0])
            return None
        self.step_to(site, run)
        return site

    def step_to(self, site: OpSite, run: Run) -> None:
        """Go on to a call, if it may follow the one before."""
        frame = run.frame
        if site.number not in self.trace.busy or frame.context is None:
            return
        if site.number not in frame.context.steps.get(frame.previous, ()):
            raise self.unseen(f"{site.name} at {site.where}", run, "")
        frame.previous = site.number

    def _step(self, number: int, seen: str, run: Run) -> None:
        frame = run.frame
        context = frame.context
        if context is None:
            return
        if number not in context.steps.get(frame.previous, ()):
            raise self.unseen(seen, run, "")
        frame.previous = number

    def unseen(self, seen: str, run: Run, leaf: str) -> UnseenOpError:
        file, line = source_of_call(3)
        frame, never = run.frame, leaf
        while frame.context is None and frame.parent is not None:  # it was never called: what was to come instead?
            frame, never = frame.parent, frame.state.path
        allowed = frame.context.steps.get(frame.previous, frozenset()) if frame.context is not None else frozenset()
        expected = [run.step_name(number) for number in sorted(allowed)]
        module = f"{self.path or 'the model'} ({self.kind})"
        by = f" of {leaf}" if leaf else ""
        return run.refuse(
            UnseenOpError(
                f"control flow over quantizable ops that was never seen, in {module}: "
                f"expected {' or '.join(expected) or 'no quantizable op'}, seen {seen}{by}",
                where=f"{file.rsplit('/', 1)[-1]}:{line}",
                advice=self._advice(never, run),
            )
        )

    def _advice(self, module: str, run: Run) -> str:
        """Advice for a path that was never recorded. Examples run in eval mode, so they miss paths that only training takes."""
        if not (run.is_live and self.training and module):
            return (
                "give prepare an example that takes this way too: prepare(model, [example, other_example]); "
                "or leave the module float with a config"
            )
        keep = f"keep it as it is, in float: prepare(model, example, qat=True, leaf={module!r})"
        if any(site.leaf == module for site in run.bound.sites.values()):
            return (
                f"give prepare an example that takes this way too; if only training takes it, which examples do not show since "
                f"they are run in eval mode: call {module} from one place in both modes, or {keep}"
            )
        return f"if {module} is called in training alone, which examples do not show since they are run in eval mode: {keep}"

    # -- hooks around a call ---------------------------------------------------------------------------------------

    def op_prepare_before_hook(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], site: OpSite, run: Run
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Observe what a quantized op reads. Arguments that wait to be fused stay as they are."""
        unit = self.trace.units.get(site.number)
        if unit is not None:
            self._check_call(unit, func, args, kwargs, site, run)
        if unit is None:
            rows = self.trace.rounding.get(site.number)
            if rows is None:
                return args, kwargs
            target = floats_of(args[0]) if args and writes_first(func) else None
            if not isinstance(target, Tensor):
                return self._round_arguments(on_floats((args, kwargs)), rows, run)  # type: ignore[no-any-return]
            # it is written to itself, and no copy; the way back needs what was rounded
            given = self._round_arguments(on_floats(((run.copied(target), *args[1:]), kwargs)), rows, run)
            target.copy_(given[0][0])
            return (args[0], *given[0][1:]), given[1]
        if run.watch is not None:
            for number, path in unit.by_call.get(site.number, ()):
                x = reach(args, kwargs, path)
                run.watch.observe(unit.operands[number].groups, floats_of(x), lambda: f"{site.name} at {site.where}")
        return args, kwargs

    def _check_call(
        self,
        unit: Unit,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        site: OpSite,
        run: Run,
    ) -> None:
        """Check that a call gives a fused op the weights, numbers and modes that it computes with."""
        for path, name in unit.constants[site.number]:
            if reach(args, kwargs, path) is not run.constants[name]:
                run.check_weights()
                raise self.unseen(f"{site.name} with another tensor than {name}", run, site.leaf)
        self._check_derived(unit, args, kwargs, site, run)
        mode = mode_argument(func, args, kwargs) if run.is_live else None
        if mode is not None and not run.is_in_mode(unit, site.number, mode.value):
            raise self.unseen(f"{site.name} with {mode.name}={mode.value} while the model trains", run, site.leaf)
        for path, value in self.trace.fixed[site.number]:
            is_mode = mode is not None and (path == mode.path or (bool(site.leaf) and path in mode.follow))
            if not is_mode and not _is_same(found := reach(args, kwargs, path), value):
                raise self.unseen(f"{site.name} with {found!r} for {value!r}", run, site.leaf)

    def _check_derived(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], site: OpSite, run: Run) -> None:
        """Check that what the model computes of its weights, and quantized ops have folded, is what it was."""
        if not unit.derived:
            return
        if self.trace.phase is Phase.TRAINING:
            self._check_trains(unit, args, kwargs, site, run)
            return
        for path, row in unit.derived.get(site.number, ()):
            given = floats_of(reach(args, kwargs, path))
            found = digest(given) if isinstance(given, Tensor) else repr(given)
            if found != self.trace.made_of.setdefault(row.key, found):
                raise run.refuse(
                    InputError(
                        f"{site.name} is given a weight made of {', '.join(row.sources)} that is another than it was, and "
                        "the quantized op has it as it was",
                        where=site.where,
                        advice="compute with the same numbers as when the model was prepared, or prepare it again",
                    )
                )

    def _check_trains(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], site: OpSite, run: Run) -> None:
        """In training: check that the model lets gradients through to the weights that a fused op computes with."""
        if not torch.is_grad_enabled():
            return
        for path, row in unit.derived.get(site.number, ()):
            given = floats_of(reach(args, kwargs, path))
            sources = [run.constants[name] for name in row.sources if name in run.constants]
            if isinstance(given, Tensor) and not given.requires_grad and any(x.requires_grad for x in sources):
                raise run.refuse(
                    InputError(
                        f"{site.name} is given {', '.join(row.sources)} without gradients, and the fused op would train it",
                        where=site.where,
                        advice="freeze the parameter: requires_grad_(False); or leave the module float with a config",
                    )
                )

    def _round_arguments(self, given: Any, rows: list[tuple[int, str]], run: Run) -> Any:
        """Fake quantize arguments, in training."""
        leaves, spec = pytree.tree_flatten(given)
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for position, target in rows:
            place = places[position]
            leaves[place] = run.rounded_once(target, leaves[place])
        return pytree.tree_unflatten(leaves, spec)

    def op_prepare_function(self, func: Callable[..., Any], site: OpSite, run: Run) -> Callable[..., Any]:
        """The function itself, or what stands for it where several calls are one op or are trained."""
        unit = self.trace.units.get(site.number)
        if unit is None or not (unit.is_fused or self.trace.phase is Phase.TRAINING):
            return lambda *args, **kwargs: call_on_floats(func, args, kwargs)
        return lambda *args, **kwargs: advance(unit, site.number, func, args, kwargs, run)

    def op_prepare_after_hook(
        self,
        func: Callable[..., Any],
        output: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        site: OpSite,
        run: Run,
    ) -> Any:
        """Observe what a call gave, where what is quantized reads it."""
        if run.watch is not None and not self.trace.calls[site.number].computes and type(output) is Tensor:
            run.watch.copy(output, tensors_in(on_floats((args, kwargs), floats_of)))
        if run.is_live and not self.trace.calls[site.number].computes and type(output) is Tensor:
            for source in tensors_in(on_floats((args, kwargs), floats_of)):
                if source.shape == output.shape:
                    run.is_copy(output, source)
        watched = self.trace.watched.get(site.number)
        if watched and run.watch is not None:
            results = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            for index, groups in watched.items():
                if index < len(results) and type(value_of(results[index])) is not Stage:
                    run.watch.observe(groups, floats_of(results[index]), lambda: f"{site.name} at {site.where}")
        return output

    def op_convert_before_hook(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], site: OpSite, run: Run
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check that a quantized op is given the weights it was quantized with."""
        unit = self.trace.units.get(site.number)
        if unit is not None:
            self._check_call(unit, func, args, kwargs, site, run)
        return args, kwargs

    def op_convert_function(self, func: Callable[..., Any], site: OpSite, run: Run) -> Callable[..., Any] | None:
        """The replacement of a quantized function; None if the function itself is called."""
        unit = self.trace.units.get(site.number)
        if unit is None:
            return None
        return lambda *args, **kwargs: advance(unit, site.number, func, args, kwargs, run)

    def op_convert_after_hook(self, func: Callable[..., Any], output: Any, args: tuple[Any, ...], site: OpSite) -> Any:
        """A function that is not quantized gives a traced tensor back as such."""
        return output

    # -- hooks around the module -----------------------------------------------------------------------------------

    def module_before_hook(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> tuple[Any, Any]:
        """The arguments of a module call, as floats if nothing in the module is quantized. Raises if the call was never recorded."""
        if self.is_idle:
            if self.is_whole:
                run.enter_whole(tensors_in((args, kwargs)), self.path)
            return on_floats((args, kwargs))  # type: ignore[no-any-return]
        frame = run.frame
        context, parent = frame.context, frame.parent
        if context is None or parent is None or parent.context is None or context.number not in self.trace.busy:
            return args, kwargs
        if context.number not in parent.context.steps.get(parent.previous, ()):
            run.frame = parent
            error = parent.state.unseen(f"a call of {self.path}", run, "")
            run.frame = frame
            raise error
        parent.previous = context.number
        return args, kwargs

    def module_after_hook(self, output: Any, run: Run) -> Any:
        """The result of a module call: unchanged for an enclosing module, as floats for the caller of the model."""
        if run.frame.parent is not None:
            return output
        return handed_over(output)

    def end(self, run: Run) -> None:
        """The module is left, if that may follow the last call."""
        if run.trace.phase is not Phase.TRACING and run.frame.context is not None and run.frame.context.steps:
            self._step(END, "the end of forward", run)

    # -- saving ----------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.path and (content := self.trace.to_bytes()) is not None:
            destination[f"{prefix}{CONTENT}"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: Any,
        unexpected_keys: Any,
        error_msgs: Any,
    ) -> None:
        content = state_dict.get(f"{prefix}{CONTENT}")
        kept = {name: value for name, value in state_dict.items() if name != f"{prefix}{CONTENT}"}
        super()._load_from_state_dict(kept, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self.trace.bounds.clear()  # tensors of the model were loaded, too
        if content is not None:
            self.trace.from_bytes(content.cpu().numpy().tobytes(), self.arriving)
        elif not self.path and self.trace.phase in (Phase.OBSERVING, Phase.CONVERTED):
            missing_keys.append(f"{prefix}{CONTENT}")
        self.arriving = {}

    def extra_repr(self) -> str:
        return f"{len(self.calls)} calls, {len(self.units)} quantized ops"
