"""`convert_fx` and `convert_to_reference_fx`."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from quantc.flows.fx.argument_forms import check_flag, config_of
from quantc.flows.fx.assign_qconfigs import quant_type_of
from quantc.flows.fx.backend_config_rules import backend_of
from quantc.flows.fx.custom_config import ConvertCustomConfig, CustomConfigError
from quantc.flows.fx.observed_module import ObservedGraphModule, Preparation, preserve
from quantc.flows.fx.observers_in_graph import read, remove
from quantc.flows.fx.original_weights import original_weights
from quantc.flows.fx.qconfig_mapping import mapping_of
from quantc.flows.fx.quantized_module import QuantizedGraphModule
from quantc.flows.fx.swapped_modules import quantize_modules
from quantc.ir.program import Program
from quantc.verbs.convert import convert as convert_program
from quantc.verify.finite_constants import refuse_unsound_module


def convert_fx(
    graph_module: nn.Module,
    convert_custom_config: ConvertCustomConfig | dict[str, Any] | None = None,
    _remove_qconfig: bool = True,
    qconfig_mapping: Any = None,
    backend_config: Any = None,
    keep_original_weights: bool = False,
    *,
    convert_custom_config_dict: ConvertCustomConfig | dict[str, Any] | None = None,
) -> QuantizedGraphModule:
    """Convert a calibrated or trained model from `prepare_fx` or `prepare_qat_fx` to a module on int8 kernels. The prepared model
    is not changed, and can be calibrated further.

    Kernels are those of `torch.backends.quantized.engine`: QNNPACK's if that is set, else those of fbgemm and onednn.
    With `keep_original_weights` the result has the float weights and biases too, as `original_weights_lookup`.
    """
    custom = config_of(ConvertCustomConfig, convert_custom_config, convert_custom_config_dict)
    check_flag("keep_original_weights", keep_original_weights)
    prepared, program = _convert_program(graph_module, custom, _remove_qconfig, qconfig_mapping, backend_config)
    target = "qnnpack" if torch.backends.quantized.engine == "qnnpack" else "x86"
    boundary = prepared.custom.input_quantized_indexes, prepared.custom.output_quantized_indexes
    made = QuantizedGraphModule.of(program, target, *boundary)
    names = dict.fromkeys([*prepared.custom.preserved_attributes, *custom.preserved_attributes])
    made.preserve(graph_module, names)
    if keep_original_weights:
        made.original_weights_lookup = original_weights(prepared.program)
    return made


def convert_to_reference_fx(
    graph_module: nn.Module,
    convert_custom_config: ConvertCustomConfig | dict[str, Any] | None = None,
    _remove_qconfig: bool = True,
    qconfig_mapping: Any = None,
    backend_config: Any = None,
    *,
    convert_custom_config_dict: ConvertCustomConfig | dict[str, Any] | None = None,
) -> fx.GraphModule:
    """The quantized model in Q/DQ form: float ops between quantize and dequantize ops, for other backends to lower."""
    custom = config_of(ConvertCustomConfig, convert_custom_config, convert_custom_config_dict)
    prepared, program = _convert_program(graph_module, custom, _remove_qconfig, qconfig_mapping, backend_config)
    module = program.module
    preserve(graph_module, module, dict.fromkeys([*prepared.custom.preserved_attributes, *custom.preserved_attributes]))
    return module


def _convert_program(
    graph_module: nn.Module, custom: ConvertCustomConfig, remove_qconfig: Any, mapping: Any, backend: Any
) -> tuple[Preparation, Program]:
    check_flag("_remove_qconfig", remove_qconfig)
    if not isinstance(graph_module, ObservedGraphModule):
        raise CustomConfigError(
            f"convert takes what prepare_fx or prepare_qat_fx gave, and this is a {type(graph_module).__name__}",
            advice="prepared = prepare_fx(model, qconfig_mapping, example_inputs)",
        )
    refuse_unsound_module(graph_module)
    prepared = graph_module.preparation
    if mapping is not None and mapping_of(mapping) != prepared.mapping:
        raise CustomConfigError(
            "the qconfig_mapping is another than that of prepare",
            advice="leave it out; what is to stay float is said in prepare",
        )
    if backend is not None and backend_of(backend) != prepared.backend:
        raise CustomConfigError(
            "the backend_config is another than that of prepare", advice="leave it out, or give prepare_fx the same one"
        )
    program = prepared.program.draft()
    if not program.is_live:
        makers = Preparation(program, prepared.mapping, prepared.custom).makers()
        read(program, makers, prepared.observers)
        remove(program)
    converted = convert_program(program)
    quantize_modules(converted, prepared, custom, quant_type_of, convert_fx)
    if remove_qconfig:
        for module in converted.root.modules():
            module.__dict__.pop("qconfig", None)
    return prepared, converted
