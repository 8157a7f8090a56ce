"""The first run of a converted model, on the last batch of calibration or training."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from quantc.errors import MixedTensorsError
from quantc.flows.eager import checks
from quantc.flows.eager.attach_observers import observer_of
from quantc.flows.eager.faults import ClippedWarning, EagerWarning, MissingStubError
from quantc.flows.eager.layer_runs import Ledger
from quantc.nn.quantized_tensor import QuantizedTensor

Limits = dict[str, tuple[int, int]]
SELDOM = 1e-3
"""A share of values beyond the range that is not worth a word."""


def trained_limits(prepared: nn.Module) -> Limits:
    """The levels that layers were trained with, by path, where they are fewer than a byte has."""
    found: Limits = {}
    for path, layer in checks.layers(prepared):
        observer: Any = observer_of(layer)
        if observer is None or not hasattr(observer, "fake_quant_enabled"):
            continue
        inner = getattr(observer, "activation_post_process", observer)
        low, high = getattr(inner, "quant_min", 0), getattr(inner, "quant_max", 0)
        if high - low < 255:
            found[path] = (int(low), int(high))
    return found


def try_out(model: nn.Module, ledger: Ledger, limits: Limits) -> None:
    """Run a converted model: floats that meet quantized tensors are an error; what training clipped is a warning."""
    args, kwargs = ledger.inputs or ((), {})
    beyond: dict[str, float] = {}
    watched = [(path, model.get_submodule(path)) for path in limits]
    hooks = [module.register_forward_hook(_Counts(path, *limits[path], beyond)) for path, module in watched]
    try:
        with torch.no_grad():
            output = model(*args, **kwargs)
    except MixedTensorsError as error:
        what = f"the converted model does not run: {error.what}"
        raise MissingStubError(what, where=error.where, advice=_advice(model, ledger, error)) from error
    finally:
        for hook in hooks:
            hook.remove()
    _warn_clipped({path: share for path, share in beyond.items() if share > SELDOM}, limits)
    if any(isinstance(leaf, QuantizedTensor) for leaf in pytree.tree_leaves(output)):
        warnings.warn(
            "the converted model returns quantized tensors: without a DeQuantStub at its end, readers get levels and a scale",
            EagerWarning,
            stacklevel=3,
        )


def _advice(model: nn.Module, ledger: Ledger, error: MixedTensorsError) -> str | None:
    """A norm that has no quantized form of its own belongs into the layer before it."""
    path = (error.where or "").partition(" ")[0]
    norms = nn.modules.batchnorm._BatchNorm
    for before, after in ledger.read_by.items():
        if after == path and isinstance(model.get_submodule(path), norms):
            return f"fuse it before prepare: fuse_modules(model, {[[before, after]]})"
    return error.advice


class _Counts:
    """A hook that tells which share of a layer's results is beyond what it was trained with."""

    def __init__(self, path: str, low: int, high: int, beyond: dict[str, float]) -> None:
        self.path, self.low, self.high, self.beyond = path, low, high, beyond

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, QuantizedTensor) and output.numel():
            levels = output.data_of
            share = ((levels < self.low) | (levels > self.high)).float().mean()
            self.beyond[self.path] = max(self.beyond.get(self.path, 0.0), float(share))


def _warn_clipped(beyond: dict[str, float], limits: Limits) -> None:
    if not beyond:
        return
    shown = ", ".join(f"{path} ({share:.1%} beyond {limits[path][1]})" for path, share in beyond.items())
    warnings.warn(
        f"the converted model is not what was trained: values that training clipped to fewer levels are not clipped now: "
        f'{shown}; train until the ranges have settled, or with all levels: get_default_qat_qconfig("onednn")',
        ClippedWarning,
        stacklevel=4,
    )
