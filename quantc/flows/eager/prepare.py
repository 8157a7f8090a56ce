"""`prepare` and `prepare_qat`: observers on a model, and fake quantizers in it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from quantc.flows.eager import checks
from quantc.flows.eager.adopt_modules import adopt
from quantc.flows.eager.attach_observers import add_observer, get_observer_dict, is_observer_like
from quantc.flows.eager.convert import swap_modules
from quantc.flows.eager.faults import (
    MODE,
    Accept,
    AlreadyDoneError,
    Fault,
    NothingQuantizedError,
    accepted_checks,
    settle,
)
from quantc.flows.eager.layer_runs import ledger_of, watch
from quantc.flows.eager.mappings import (
    get_default_custom_config_dict,
    get_default_qat_module_mappings,
    get_default_qconfig_propagation_list,
)
from quantc.flows.eager.propagate import own_qconfigs, propagate_qconfig_

SET_ONE = 'give the model a qconfig first: model.qconfig = get_default_qconfig("x86")'


def prepare(
    model: nn.Module,
    inplace: bool = False,
    allow_list: Collection[Any] | None = None,
    observer_non_leaf_module_list: Collection[Any] | None = None,
    prepare_custom_config_dict: Mapping[str, Any] | None = None,
    *,
    accept: Accept = (),
) -> nn.Module:
    """Put observers on a float model for calibration: run it on data next, then `convert` it.

    Qconfigs are attributes of the model or of its parts. `allow_list` has the classes of layers to observe in place of the
    default ones. Faults are errors before any observer is put on: the model in training mode, one module at two places, no
    QuantStub, a qconfig without effect; `accept` names those that are meant.
    """
    accepted_checks(accept)
    settle(checks.in_training(model, "static quantization is for inference: norms would learn from the data"), accept)
    _refuse_prepared(model)
    prepared = adopt(model if inplace else copy.deepcopy(model))
    kinds = get_default_qconfig_propagation_list() if allow_list is None else allow_list
    config = prepare_custom_config_dict or get_default_custom_config_dict()
    custom = config.get("float_to_observed_custom_module_class", {})
    _hand_down(prepared, {*kinds, *custom, *(observer_non_leaf_module_list or ())}, accept, custom)
    _observe(prepared, kinds, observer_non_leaf_module_list, custom)
    return prepared


def _hand_down(model: nn.Module, kinds: Collection[Any], accept: Accept, custom: Collection[Any] = ()) -> None:
    settle(checks.without_effect(model, own_qconfigs(model), kinds), accept)
    propagate_qconfig_(model)
    checks.refuse_static(model, custom)
    settle(checks.shared_layers(model, kinds), accept)
    settle(checks.missing_stub(model, kinds), accept)


def _observe(
    model: nn.Module, kinds: Collection[Any], whole: Collection[Any] | None, custom: Mapping[Any, Any]
) -> None:
    add_observer(model, kinds, whole, custom_module_class_mapping=custom)
    if not get_observer_dict(model):
        raise _nothing(model)
    watch(model, checks.watched_modules(model))


def prepare_qat(
    model: nn.Module, mapping: Mapping[Any, Any] | None = None, inplace: bool = False, *, accept: Accept = ()
) -> nn.Module:
    """Put modules that round their weights, and fake quantizers, into a model in training mode: train it next, then
    `convert(model.eval())`."""
    accepted_checks(accept)
    if not model.training:
        what = "it is in eval mode, and is prepared to be trained"
        settle([Fault(MODE, "", what, "call model.train() first; to calibrate it use prepare")], accept)
    _refuse_prepared(model)
    table = get_default_qat_module_mappings() if mapping is None else mapping
    trained = adopt(model if inplace else copy.deepcopy(model))
    kinds = {*get_default_qconfig_propagation_list(), *table}
    _hand_down(trained, kinds, accept)
    swap_modules(trained, table)
    _observe(trained, kinds, set(table.values()), {})
    return trained


def _refuse_prepared(model: nn.Module) -> None:
    if ledger_of(model) is not None or _observers_of_layers(model):
        raise AlreadyDoneError(
            "the model was prepared before",
            where=next(iter(_observers_of_layers(model)), ""),
            advice="calibrate or train it, and convert it; or start again from the float model",
        )


def _observers_of_layers(model: nn.Module) -> dict[str, Any]:
    """Observers on layers, without those that functional modules and fake quantizers are made with."""
    return {
        path: found
        for path, found in get_observer_dict(model).items()
        if is_observer_like(found) and not is_observer_like(model.get_submodule(path.rpartition(".")[0]))
    }


def _nothing(model: nn.Module) -> NothingQuantizedError:
    if not own_qconfigs(model):
        return NothingQuantizedError("no module has a qconfig, so nothing would be quantized", advice=SET_ONE)
    return NothingQuantizedError(
        "no module with a qconfig is of a class that can be quantized",
        where=", ".join(sorted({type(module).__name__ for module in model.modules()})),
        advice="see get_default_static_quant_module_mappings(), or pass allow_list and a mapping",
    )
