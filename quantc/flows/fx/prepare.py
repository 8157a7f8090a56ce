"""`prepare_fx` and `prepare_qat_fx`."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from quantc.flows.fx.argument_forms import config_of
from quantc.flows.fx.assign_qconfigs import Choice, quant_type_of
from quantc.flows.fx.backend_config_rules import backend_of
from quantc.flows.fx.capturing import capture_model, leaves_of
from quantc.flows.fx.custom_config import (
    CustomConfigError,
    PrepareCustomConfig,
    StandaloneModuleConfigEntry,
)
from quantc.flows.fx.kept_whole import watch
from quantc.flows.fx.observed_module import ObservedGraphModule, Preparation, preserve
from quantc.flows.fx.observers_in_graph import Makers, insert
from quantc.flows.fx.open_sizes import Shapes
from quantc.flows.fx.qconfig_mapping import QConfigMapping, mapping_of
from quantc.flows.fx.quantizer import QConfigQuantizer
from quantc.ir.program import Program, attribute
from quantc.verbs.prepare import prepare as prepare_program


def prepare_fx(
    model: nn.Module,
    qconfig_mapping: Any,
    example_inputs: Any,
    prepare_custom_config: PrepareCustomConfig | dict[str, Any] | None = None,
    _equalization_config: Any = None,
    backend_config: Any = None,
    *,
    prepare_custom_config_dict: PrepareCustomConfig | dict[str, Any] | None = None,
) -> ObservedGraphModule:
    """Prepare a model for static, dynamic or weight-only quantization; call the result on data to calibrate it.

    `qconfig_mapping` says what is quantized how. The model must be in eval mode, unless it computes the same in either, and
    is not changed. `backend_config` is a `BackendConfig`, quantc's or torch's, or a `Backend`, in place of the flow's own
    table.
    """
    if _equalization_config is not None:
        raise CustomConfigError(
            "equalization is not part of this flow", where="_equalization_config", advice="leave it out"
        )
    custom = config_of(PrepareCustomConfig, prepare_custom_config, prepare_custom_config_dict)
    return _prepare_model(model, qconfig_mapping, example_inputs, custom, backend_config, trained=False)


def prepare_qat_fx(
    model: nn.Module,
    qconfig_mapping: Any,
    example_inputs: Any,
    prepare_custom_config: PrepareCustomConfig | dict[str, Any] | None = None,
    backend_config: Any = None,
    *,
    prepare_custom_config_dict: PrepareCustomConfig | dict[str, Any] | None = None,
) -> ObservedGraphModule:
    """Prepare a model for training: it rounds as the quantized one will, and its parameters can be trained."""
    custom = config_of(PrepareCustomConfig, prepare_custom_config, prepare_custom_config_dict)
    return _prepare_model(model, qconfig_mapping, example_inputs, custom, backend_config, trained=True)


def _prepare_model(
    model: nn.Module, mapping: Any, examples: Any, custom: PrepareCustomConfig, backend: Any, *, trained: bool
) -> ObservedGraphModule:
    mapping = QConfigMapping.from_dict(mapping_of(mapping).to_dict())  # the user's may change before convert
    backend = backend_of(backend)
    program, shapes = capture_model(model, examples, leaves_of(model, custom))
    if program.training and not trained and not program.modes.rows and not program.counters.rows:
        program.eval()  # it computes the same in either mode
    choice = Choice(program, mapping)
    choice.warn_unmatched({name for name, _ in model.named_modules()})
    _swap_modules(program, choice, custom, shapes, trained=trained)
    quantizer = QConfigQuantizer(mapping, custom, backend)
    prepared = prepare_program(program, quantizer, allow_empty=True, qat=trained)
    makers = Makers(prepared, Choice(prepared, mapping))
    if trained:
        from quantc.flows.fx.training import put_fake_quantizers

        names = put_fake_quantizers(prepared, makers)
    else:
        names = insert(prepared, makers)
    module = ObservedGraphModule(Preparation(prepared, mapping, custom, names, backend))
    preserve(model, module, custom.preserved_attributes)
    return module


# -- modules that are kept whole ---------------------------------------------------------------------------------------


def _swap_modules(
    program: Program, choice: Choice, custom: PrepareCustomConfig, shapes: dict[str, Shapes], *, trained: bool
) -> None:
    """Put observed modules in the place of float ones, and prepare those that are prepared on their own."""
    done: set[str] = set()
    for node in program.graph.find_nodes(op="call_module"):
        name = str(node.target)
        if name in done:
            continue
        done.add(name)
        module = attribute(program.root, name)
        swapped = _swap(module, name, node, choice, custom, trained)
        watch(swapped, name, shapes.get(name))
        parent, _, leaf = name.rpartition(".")
        setattr(program.root.get_submodule(parent), leaf, swapped)


def _swap(
    module: nn.Module, name: str, node: fx.Node, choice: Choice, custom: PrepareCustomConfig, trained: bool
) -> nn.Module:
    qconfig = choice[node]
    entry = custom.standalone_module_names.get(name, custom.standalone_module_classes.get(type(module)))
    if entry is not None:
        return _standalone(module, entry, choice, trained)
    for path, part in module.named_modules(prefix=name):
        part.qconfig = choice.of_module(path, part)
    if qconfig is None:
        return module
    kind = quant_type_of(qconfig)
    observed = custom.float_to_observed_mapping.get(kind, {}).get(type(module)) if kind is not None else None
    if observed is None:
        return module
    made: nn.Module = observed.from_float(module)  # type: ignore[attr-defined]
    made.qconfig = qconfig
    return made


def _standalone(module: nn.Module, entry: StandaloneModuleConfigEntry, choice: Choice, trained: bool) -> nn.Module:
    mapping = choice.mapping if entry.qconfig_mapping is None else entry.qconfig_mapping
    custom = config_of(PrepareCustomConfig, entry.prepare_custom_config, None)
    return _prepare_model(module, mapping, entry.example_inputs, custom, entry.backend_config, trained=trained)
