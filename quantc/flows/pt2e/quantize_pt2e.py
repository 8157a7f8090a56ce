"""The verbs of the PT2 export flow: `prepare_pt2e`, `prepare_qat_pt2e`, `convert_pt2e`."""

from __future__ import annotations

from typing import Any

from torch import fx

from quantc.capture.model_copies import Tensors
from quantc.errors import AnnotationError, CalibrationError
from quantc.flows.pt2e.annotations import Annotations, read_annotations
from quantc.flows.pt2e.conversion import convert_observers, observer_nodes
from quantc.flows.pt2e.graph_modules import PATH, check_flag, check_graph_module, finish_module, loop_bodies, own_copy
from quantc.flows.pt2e.group_observers import insert_observers, make_observers, to_device
from quantc.flows.pt2e.inplace_writes import name_results
from quantc.flows.pt2e.norms import fold_norms
from quantc.flows.pt2e.reference import reference_form
from quantc.flows.pt2e.regions import inline_regions
from quantc.flows.pt2e.trained_norms import close_norms, open_norms
from quantc.support.gc_pause import paused_collector
from quantc.verify.finite_constants import refuse_unsound_module

PREPARED = "quantc_prepared"
"""In `meta` of a prepared model: it can be converted, also where `allow_empty` left it without observers."""
QUANTIZER_MEMBERS = ("transform_for_annotation", "annotate", "validate")


def prepare_pt2e(model: fx.GraphModule, quantizer: Any, *, allow_empty: bool = False) -> fx.GraphModule:
    """Put observers into an exported graph where a quantizer wants them. The model itself is not changed.

    `model` is what `torch.export.export(...).module()` gives, in eval mode. `quantizer` is one of this package, or any
    object with the methods of `Quantizer`, such as those of torchao and ExecuTorch. Run the result on data, then call
    `convert_pt2e`. A quantizer that annotates nothing is an error unless `allow_empty`."""
    check_graph_module(model, "prepare_pt2e")
    check_quantizer(quantizer)
    with paused_collector():
        return _prepare(model, quantizer, allow_empty)


def prepare_qat_pt2e(model: fx.GraphModule, quantizer: Any, *, allow_empty: bool = False) -> fx.GraphModule:
    """Put fake quantizers into an exported graph where a quantizer wants them, to train it. The model itself, tensors
    included, is not changed.

    Convolutions with batch norms behind them are rounded as they will be once the norm is folded, and the norm learns
    on; `convert_pt2e` folds it."""
    check_graph_module(model, "prepare_qat_pt2e")
    check_quantizer(quantizer)
    with paused_collector():
        owned = own_copy(model, Tensors.COPIED)
        name_results(owned.graph)
        owned = _annotate(owned, quantizer)
        annotations = _read_annotations(owned, quantizer, allow_empty)
        _observe(owned, quantizer, annotations.moved(open_norms(owned)), is_qat=True)
        return finish_module(owned, model.meta | {PREPARED: True})


def _prepare(model: fx.GraphModule, quantizer: Any, allow_empty: bool, path: str = "") -> fx.GraphModule:
    owned = own_copy(model, Tensors.SHARED)
    if path:
        owned.meta[PATH] = path
    inline_regions(owned)
    name_results(owned.graph)
    fold_norms(owned)
    owned = _annotate(owned, quantizer)
    _observe(owned, quantizer, _read_annotations(owned, quantizer, allow_empty), is_qat=False)
    for name, body in loop_bodies(owned):
        setattr(owned, name, _prepare(body, quantizer, allow_empty=True, path=f"{path}/{name}".lstrip("/")))
    return finish_module(owned, model.meta | {PREPARED: True})


def _annotate(module: fx.GraphModule, quantizer: Any) -> fx.GraphModule:
    module = quantizer.transform_for_annotation(module)
    quantizer.annotate(module)
    quantizer.validate(module)
    return module


def _read_annotations(module: fx.GraphModule, quantizer: Any, allow_empty: bool) -> Annotations:
    annotations = read_annotations(module.graph)
    if not annotations.wanted and not allow_empty:
        reasons = getattr(quantizer, "left_float", None) or {}
        raise AnnotationError(
            f"{type(quantizer).__name__} annotated nothing, so nothing would be quantized",
            where="; ".join(f"{name}: {reason}" for name, reason in [*reasons.items()][:3])
            or f"{len(module.graph.nodes)} nodes",
            advice="configure the quantizer, as with set_global(config), or give allow_empty=True",
        )
    return annotations


def _observe(module: fx.GraphModule, quantizer: Any, annotations: Annotations, *, is_qat: bool) -> None:
    """Make what the annotations of a graph ask for, and put it there."""
    observers = make_observers(annotations, is_qat)
    callback = getattr(quantizer, "prepare_obs_or_fq_callback", None)
    if callback is not None:
        callback(module, observers)
    to_device(observers, module)
    insert_observers(module, annotations, observers)


def check_quantizer(quantizer: Any) -> None:
    """Refuse what cannot annotate."""
    missing = [name for name in QUANTIZER_MEMBERS if not callable(getattr(quantizer, name, None))]
    if missing:
        raise AnnotationError(
            f"{quantizer!r} is not a quantizer: it lacks {', '.join(missing)}",
            where="the second argument of prepare_pt2e",
            advice="derive it from quantc.flows.pt2e.quantizer.Quantizer",
        )


def convert_pt2e(
    model: fx.GraphModule, use_reference_representation: bool = False, fold_quantize: bool = True
) -> fx.GraphModule:
    """Make of a prepared and calibrated model a quantized one. The prepared model is not changed and can be
    calibrated further.

    The result computes in float between quantize and dequantize ops. `use_reference_representation` gives integer
    arithmetic in ATen ops instead. Without `fold_quantize` weights stay float, with a quantize op behind them."""
    check_graph_module(model, "convert_pt2e")
    check_flag("use_reference_representation", use_reference_representation)
    check_flag("fold_quantize", fold_quantize)
    parts = [part for part in model.modules() if isinstance(part, fx.GraphModule)]
    if PREPARED not in model.meta and not any(observer_nodes(part) for part in parts):
        raise CalibrationError(
            "the model has no observers, so there is nothing to convert",
            where="the first argument of convert_pt2e",
            advice="prepare it first: model = prepare_pt2e(model, quantizer)",
        )
    with paused_collector():
        refuse_unsound_module(model)
        converted = _convert(model, fold=fold_quantize or use_reference_representation)
        return reference_form(converted) if use_reference_representation else converted


def _convert(model: fx.GraphModule, *, fold: bool) -> fx.GraphModule:
    owned = own_copy(model, Tensors.SHARED)
    for name, body in loop_bodies(owned):
        setattr(owned, name, _convert(body, fold=fold))
    close_norms(owned)
    convert_observers(owned, fold=fold)
    owned.graph.eliminate_dead_code()
    return finish_module(owned, {key: value for key, value in model.meta.items() if key != PREPARED})


convert_to_pt2e = convert_pt2e
"""The heading of the document that this flow goes back to has this name."""
