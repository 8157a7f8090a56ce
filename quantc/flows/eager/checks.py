"""The checks of the eager flow: what upstream lets pass in silence."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from quantc.flows.eager.attach_observers import FUNCTIONALS, is_observer_like, observer_of
from quantc.flows.eager.faults import MISSING_STUB, MODE, NO_EFFECT, NOT_OBSERVED, REUSED, Fault, NoStaticFormError
from quantc.flows.eager.fusers import FUSER_METHODS
from quantc.flows.eager.layer_runs import Ledger
from quantc.flows.eager.propagate import is_dynamic, qconfig_of
from quantc.flows.foreign_observers import has_seen, inner
from quantc.nn import quantizable
from quantc.nn.intrinsic import _FusedModule
from quantc.nn.observers import WithoutRange
from quantc.nn.quantized import Quantize
from quantc.nn.stubs import DeQuantStub, QuantStub

WITHOUT_SCALE = (nn.ReLU6, nn.Dropout, nn.Embedding, nn.EmbeddingBag, DeQuantStub, nn.Sequential)
"""Layers whose result has no scale of its own: what observes them is not asked."""
DYNAMIC_ALONE = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
MAX_NAMES = 5


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are quantized as one piece, with their paths: not what is inside them, nor observers."""
    pending = [("", model)]
    while pending:
        path, module = pending.pop()
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        is_whole = isinstance(module, (*FUNCTIONALS, _FusedModule)) or hasattr(module, "weight_fake_quant")
        inside = [] if is_whole else [(name, child) for name, child in children if not is_observer_like(child)]
        if not inside or is_whole:
            yield path, module
        pending += reversed([(f"{path}.{name}" if path else name, child) for name, child in inside])


def has_scale(module: nn.Module) -> bool:
    """True if the layer's observer determines its output scale: it has a static qconfig and is no class without a scale."""
    qconfig = qconfig_of(module)
    if qconfig is None or (isinstance(module, WITHOUT_SCALE) and not isinstance(module, _FusedModule)):
        return False
    return not is_dynamic(qconfig)


def is_to_observe(module: nn.Module, kinds: Collection[Any]) -> bool:
    """True if `prepare` gives the layer an observer for its output scale."""
    is_known = type_before_parametrizations(module) in kinds or isinstance(module, (*FUNCTIONALS, _FusedModule))
    return is_known and has_scale(module)


def shared_layers(model: nn.Module, kinds: Collection[Any]) -> Iterator[Fault]:
    """Layers that are at several places of a model under several names."""
    paths: dict[int, list[str]] = {}
    found: dict[int, nn.Module] = {}
    for path, module in layers(model):
        paths.setdefault(id(module), []).append(path)
        found[id(module)] = module
    for key, names in paths.items():
        module = found[key]
        if len(names) > 1 and is_to_observe(module, kinds):
            what = f"{type(module).__name__} is one module at {len(names)} places: {', '.join(names)}"
            yield Fault(REUSED, names[0], what)


def reused_layers(model: nn.Module, ledger: Ledger) -> Iterator[Fault]:
    """Layers that ran more than once in one call of the model. The steps of a recurrent layer are meant to."""
    recurrent = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, quantizable.LSTM))
    for path, module in layers(model):
        times = 0 if path.startswith(recurrent) else ledger.most_calls[path]
        if times > 1 and observer_of(module) is not None and has_scale(module):
            what = (
                f"{type(module).__name__} ran {times} times in one call of the model, and would have one output scale"
            )
            yield Fault(REUSED, path, what)


def watched_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The module to watch for each layer: for functional modules, which are never called themselves, their observer."""
    found = {path: (observer_of(module), module) for path, module in layers(model)}
    return {
        path: observer if observer is not None and isinstance(module, FUNCTIONALS) else module
        for path, (observer, module) in found.items()
    }


def missing_stub(model: nn.Module, kinds: Collection[Any]) -> Iterator[Fault]:
    """Layers to be quantized, and nothing to quantize what they read."""
    if any(isinstance(module, QuantStub | Quantize) and qconfig_of(module) is not None for module in model.modules()):
        return
    static = [path for path, module in layers(model) if is_to_observe(module, kinds)]
    if static:
        what = f"nothing quantizes what {_few(static)} read: there is no QuantStub with a qconfig"
        yield Fault(MISSING_STUB, static[0], what)


def without_effect(model: nn.Module, own: Mapping[str, Any], kinds: Collection[Any]) -> Iterator[Fault]:
    """Faults for qconfigs on parts of a model without quantizable layers."""
    known = tuple(kinds) + FUNCTIONALS
    for path in own:
        part = model.get_submodule(path)
        is_known = any(type_before_parametrizations(module) in known for module in part.modules())
        if path and not is_known and not any(map(is_observer_like, part.modules())):
            what = f"{type(part).__name__} has a qconfig, and nothing in it can be quantized"
            yield Fault(NO_EFFECT, path, what, "take the qconfig off, or give a mapping for this class")


def refuse_static(model: nn.Module, custom: Collection[Any]) -> None:
    """Recurrent layers and attention have no static form here: refuse qconfigs that ask for it."""
    found = [
        path
        for path, module in model.named_modules()
        if isinstance(module, DYNAMIC_ALONE)
        and type_before_parametrizations(module) not in custom
        and qconfig_of(module) is not None
        and not is_dynamic(qconfig_of(module))
    ]
    if found:
        kinds = sorted({type(model.get_submodule(path)).__name__ for path in found})
        raise NoStaticFormError(
            f"{', '.join(kinds)} has no static form: its scales are found as it runs",
            where=", ".join(found),
            advice="give it qconfig = default_dynamic_qconfig, or None to leave it float, with a DeQuantStub before it and a "
            "QuantStub behind; or a class of your own in prepare_custom_config_dict",
        )


def in_training(model: nn.Module, purpose: str) -> Iterator[Fault]:
    """Modules in training mode where inference is meant."""
    modules = ((path, module) for path, module in model.named_modules() if not _is_in_observer(model, path))
    wrong = [(path, module) for path, module in modules if module.training]
    if not wrong:
        return
    names = [path for path, module in wrong if path and not module._modules] or [path for path, _ in wrong]
    whole = "it is" if model.training else f"the model is in eval mode, but {_few(names)}"
    what = f"{whole} in training mode, and {purpose}"
    yield Fault(MODE, wrong[0][0], what, "call model.eval() first; to train it quantized use prepare_qat")


def _is_in_observer(model: nn.Module, path: str) -> bool:
    names = path.split(".")
    return any(is_observer_like(model.get_submodule(".".join(names[: end + 1]))) for end in range(len(names)))


def not_observed(model: nn.Module, mapping: Mapping[Any, Any], ledger: Ledger | None) -> Iterator[Fault]:
    """Layers that would be given a scale out of nothing."""
    for path, module in layers(model):
        observer = observer_of(module)
        is_swapped = type_before_parametrizations(module) in mapping
        if observer is None or not is_swapped or not has_scale(module) or isinstance(observer, WithoutRange):
            continue
        if isinstance(module, FUNCTIONALS) and ledger is not None and ledger.runs:
            continue  # it may serve for sums with numbers alone, which are not observed: the converted one knows
        if not _has_data(observer, path, ledger):
            runs = ledger.runs if ledger is not None else 0
            what = (
                f"in {runs} runs of the model no data reached it" if runs else "the prepared model was not run on data"
            )
            yield Fault(NOT_OBSERVED, path, what)


def _has_data(observer: nn.Module, path: str, ledger: Ledger | None) -> bool:
    """By its buffers, which may have been loaded; for observers of users' own, by whether they were called."""
    if has_seen(observer):
        return True
    has_range = hasattr(inner(observer), "min_val")
    return not has_range and ledger is not None and ledger.most_calls[path] > 0


def fusable_runs(model: nn.Module, read_by: Mapping[str, str]) -> list[list[str]]:
    """Runs of layers that read each other and could be fused: the lists that `fuse_modules` takes."""
    found: list[list[str]] = []
    taken: set[str] = set()
    for path, module in layers(model):
        names, kinds = [path], [type_before_parametrizations(module)]
        best: list[str] = []
        while names[-1] in read_by and len(names) < 3:
            names.append(read_by[names[-1]])
            kinds.append(type_before_parametrizations(model.get_submodule(names[-1])))
            best = list(names) if tuple(kinds) in FUSER_METHODS else best
        if best and not taken & set(best):
            taken |= set(best)
            found.append(best)
    return found


def _few(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
